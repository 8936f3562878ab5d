"""Tiny targets of each kind with random weights, each with a drafter, and the sizes with which they are certified in
Triton's interpreter, where a step takes a third of a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import engines
from cluster.certify import checks, command
from cluster.certify.command import CertifySize
from cluster.config import Config, TargetConfig, pair_config
from tests.support import tiny_hybrids, tiny_mamba, tiny_models
from tests.support.device_engines import LONGEST_S
from verifier_service import options
from verifier_service.options import VerifierOptions

BYTES = 95
"""Number of bytes that have a token."""
WORDS = {"vocab_size": BYTES + 1, "bos_token_id": BYTES, "eos_token_id": BYTES, "pad_token_id": BYTES}
"""The library's model may answer any token of its own, so that the tokenizer has as many."""
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY = CertifySize(
    greedy_prompts=1,
    greedy_tokens=4,
    prompts=1,
    tokens=3,
    draws=500,
    far_draws=8,
    own_prompts=1,
    own_tokens=3,
    stop_draws=1,
    combinations=2,
)
ROWS = 16
"""Of the largest tree."""
PROMPT_TOKENS = 20
OF_TARGET = {"max_length": 40, "max_rows": ROWS, "max_depth": 4, "arms": ("off", "(3,2,1)")}
OF_EACH = {"max_sessions": 4, "longest_step_s": LONGEST_S}


def _mamba(folder: Path, family: tiny_mamba.Family) -> None:
    heads = {"num_heads": 2, "head_dim": 32, "n_groups": 1} if family == "mamba2" else {}
    config = tiny_mamba.tiny_config(family, num_hidden_layers=1, **heads, **WORDS)
    tiny_mamba.make_checkpoint(folder, family, config=config)


def _bamba(folder: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 2, "mamba_d_head": 32}
    layers = {"num_hidden_layers": 2, "attn_layer_indices": [1]}
    tiny_hybrids.make_checkpoint(folder, "bamba", mamba_n_groups=1, **heads, **layers, **WORDS)


KINDS: Mapping[str, Callable[[Path], object]] = {
    "llama": lambda folder: tiny_models.make_checkpoint(folder, "llama", num_key_value_heads=1, **SMALL, **WORDS),
    "neox": lambda folder: tiny_models.make_checkpoint(folder, "neox", **SMALL, **WORDS),
    "mamba": lambda folder: _mamba(folder, "mamba"),
    "mamba2": lambda folder: _mamba(folder, "mamba2"),
    "hybrid": _bamba,
}
"""Writes a target of each kind. The hybrid is a Bamba."""


def write_pair(folder: Path, kind: str) -> tuple[Path, Path]:
    """Write a target of one of KINDS and its drafter, with one token per byte of printed text; returns their folders.
    The drafter is a Mamba for a Mamba, else a Mamba-2."""
    target, drafter = folder / kind, folder / "drafter"
    target.mkdir()
    drafter.mkdir()
    KINDS[kind](target)
    _mamba(drafter, "mamba" if kind == "mamba" else "mamba2")
    tokenizer = tiny_models.byte_tokenizer(BYTES)
    tokenizer.add_special_tokens(["<|end|>"])
    for each in (target, drafter):
        tokenizer.save(str(each / "tokenizer.json"))
    return target, drafter


def configuration_of(pair: tuple[Path, Path], patch: pytest.MonkeyPatch) -> Config:
    """The configuration of a tiny pair, of few rows and arms; the checks of `certify` have few tokens, laws and
    shapes from here on."""
    library = engines.verifier_options

    def of_few_rows(name: str, target: TargetConfig) -> VerifierOptions:
        return replace(library(name, target), prefill_chunk=2 * ROWS)

    patch.setattr(options, "MAX_ROWS", ROWS)
    patch.setattr(engines, "verifier_options", of_few_rows)
    patch.setattr(command, "verifier_options", of_few_rows)
    patch.setattr(command, "PROMPT_TOKENS", PROMPT_TOKENS)
    patch.setattr(command, "OF_EACH_KIND", command.OF_EACH_KIND[1:3])
    patch.setattr(checks, "LAWS", (checks.LAWS[2], checks.LAWS[3]))  # 0.7 with top-p, 1 without a filter
    patch.setattr(checks, "SHAPES_OF_ITS_OWN", checks.SHAPES_OF_ITS_OWN[1::2])
    patch.setattr(checks, "TEMPERATURES_OF_ITS_OWN", (0.0, 1.0))
    config = pair_config(pair[0], [pair[1]], speculation={"proposers": ["lookup"]})
    targets = {name: each.model_copy(update=OF_EACH | OF_TARGET) for name, each in config.targets.items()}
    drafters = {name: each.model_copy(update=OF_EACH | {"form": "eager"}) for name, each in config.drafters.items()}
    # Rounds with a fixed shape wait for their draft as long as this.
    router = config.router.model_copy(update={"draft_timeout_ms": 1e3 * LONGEST_S})
    return config.model_copy(update={"targets": targets, "drafters": drafters, "router": router})
