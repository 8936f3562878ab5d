"""Compiles the kernels of engines on this machine's processor while Ray starts, which uses one core of several.

A replica compiles or loads its kernels itself; this only begins earlier, where the cache has none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tree_kernels.kernel_cache import kept
from tree_layers.checkpoint import GGUF, read_config
from tree_layers.errors import CheckpointError
from tree_layers.gguf_forms import FORMS_OF
from tree_layers.gguf_header import read_gguf_header

from cluster.config import Config, DrafterConfig, TargetConfig

LEVELS = {"mamba": "mamba1", "mamba2": "mamba2"}
"""Modules of fused Mamba drafters, by the checkpoint's kind."""
ANYWHERE = ("noise.loops", "row_softmax.loops")
"""The modules of noise and of probabilities, which processes load wherever the layers run."""
PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def kernel_modules(config: Config) -> list[str]:
    """The modules whose kernels the configuration's engines use on a processor: those of every engine, of its
    drafters and of its targets."""
    found: dict[str, None] = dict.fromkeys(ANYWHERE)
    for drafter in config.drafters.values():
        found.update(dict.fromkeys(_of_drafter(drafter)))
    for target in config.targets.values():
        found.update(dict.fromkeys(_of_target(target)))
    return [f"tree_kernels.{name}" for name in found]


def _of_drafter(drafter: DrafterConfig) -> list[str]:
    if drafter.resources.gpu or drafter.form == "eager":
        return []
    with suppress(CheckpointError):
        if level := LEVELS.get(read_config(drafter.checkpoint).get("model_type", "")):
            head = [] if drafter.head is None else ["acceptance_head.loops"]
            scans = ["mamba_level.tiles"] if level == "mamba2" else []
            return ["matmul.bf16", f"mamba_level.{level}", *scans, "tree_levels.loops", "ranking.loops", *head]
    return []


def _of_target(target: TargetConfig) -> list[str]:
    if target.resources.gpu:
        return ["row_slots.loops"]
    products = ["matmul.loops", f"matmul.{PRECISIONS[target.dtype]}", "row_draw.loops", "row_slots.loops"]
    with suppress(CheckpointError):
        products += quantised_modules(target)
        if read_config(target.checkpoint).get("model_type") not in LEVELS:
            return [*products, "row_functions.loops", "tree_attention.loops", "decoder_layer.loops", "taken_rows.loops"]
    return products


def quantised_modules(target: TargetConfig) -> list[str]:
    """Modules with kernels for the weights of a GGUF file that may stay quantised."""
    file = target.checkpoint / GGUF
    if target.dtype != "bfloat16" or not file.is_file():
        return []
    forms = {FORMS_OF[name] for name in read_gguf_header(file).stored if name in FORMS_OF}
    return [f"matmul.{form.lower()}" for form in sorted(forms)]


@contextmanager
def precompiled(config: Config) -> Iterator[None]:
    """Context in which another process compiles the kernels that the cache lacks. It is ended with the context."""
    missing = [module for module in kernel_modules(config) if not kept(module)]
    if not missing:
        yield
        return
    command = [sys.executable, "-m", "tree_kernels.precompile", *missing]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as compiling:
        try:
            yield
        finally:
            compiling.terminate()
