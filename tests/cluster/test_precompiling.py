"""Kernels that are compiled while Ray starts are those that the engines load, and only where the cache has none."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from tree_kernels.matmul import why_not_packed

from cluster import precompiling
from cluster.config import DrafterConfig, TargetConfig, demo_config
from cluster.precompiling import kernel_modules, precompiled
from cluster.sections import Resources

OF_ALL = ["tree_kernels.noise.loops", "tree_kernels.row_softmax.loops"]
LOADED = """
from tree_kernels import kernel_cache
load, names = kernel_cache.load_kernels, []

def noted(module):
    names.append(module)
    return load(module)

kernel_cache.load_kernels = noted
from dendro.state import MemoryStates
from cluster.config import demo_config
from cluster.peers.pools import LocalPeers
LocalPeers.load(demo_config(), MemoryStates())
print(*sorted({*names}))
"""


@pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())
def test_the_kernels_of_the_demo_are_those_that_its_engines_load():
    found = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=90, check=True)
    assert found.stdout.split() == sorted(kernel_modules(demo_config()))


def test_engines_on_an_accelerator_and_eager_ones_need_noise_and_softmax_and_a_verifier_the_slots_of_rows():
    config, gpu = demo_config(), Resources(gpu=1)
    targets = {"one": TargetConfig(checkpoint=next(iter(config.targets.values())).checkpoint, resources=gpu)}
    checkpoint = next(iter(config.drafters.values())).checkpoint
    drafters = {
        "one": DrafterConfig(checkpoint=checkpoint, resources=gpu),
        "two": DrafterConfig(checkpoint=checkpoint, form="eager"),
    }
    slots = "tree_kernels.row_slots.loops"
    assert kernel_modules(config.model_copy(update={"targets": targets, "drafters": drafters})) == [*OF_ALL, slots]
    assert kernel_modules(config.model_copy(update={"targets": {}, "drafters": drafters})) == OF_ALL


def test_a_missing_checkpoint_is_no_error_here(tmp_path):
    config = demo_config()
    drafter = DrafterConfig(checkpoint=tmp_path / "nowhere")
    assert kernel_modules(config.model_copy(update={"targets": {}, "drafters": {"one": drafter}})) == OF_ALL


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_compiles_what_the_cache_lacks_and_ends_with_the_context(kept, monkeypatch, tmp_path):
    monkeypatch.setattr(precompiling, "kept", lambda module: kept or module.endswith("bf16"))
    monkeypatch.setenv("DENDRO_KERNEL_CACHE", str(tmp_path))
    before = {*psutil.Process().children()}
    with precompiled(demo_config()):
        started = {*psutil.Process().children()} - before
        commands = [process.cmdline() for process in started]
    assert len(commands) == (0 if kept else 1)
    for command in commands:
        assert command[1:3] == ["-m", "tree_kernels.precompile"]
        assert "tree_kernels.matmul.loops" in command and "tree_kernels.matmul.bf16" not in command
    assert not any(process.is_running() for process in started)
