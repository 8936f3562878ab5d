"""Tiny checkpoints of a family in which every limit, clip, cap, scale, bias and switch of its configuration has an
effect; limits have one on few tokens.

An effect that few tokens show is missed by a check of few rows: a module that is replaced by one without a clamp, for
example. So the limits are as high as they can be with an effect on some logits of `TEXT`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dendro.tree import DraftTree
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.support.tiny_families import VOCABULARY, randomise, tiny_config
from tests.support.tiny_models import byte_tokenizer
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

TEXT: list[int] = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
CHAIN = 5
"""Rows of a tree after its root, in a chain."""
TOLERANCE, EFFECT = 3e-3, 0.02
"""How far a row's float32 logits may be from the library's, as a share of their spread, and how far a limit must move
those of some row."""

LIMITS = re.compile(r"clip_qkv|swiglu_limit|.*softcapping|time_step_limit|time_step_min")
FACTORS = re.compile(
    r".*multiplier|.*scaling_factor|.*logits?_scal(e|ing)|.*attention_value_scale|route_scale|scale_(emb|depth)"
    r"|query_pre_attn_scalar|swiglu_alpha|attention_multiplier"
)
LISTS = re.compile(r".*multipliers")
EPSILONS = re.compile(r".*(norm|rms)_eps(ilon)?|norm_eps(ilon)?")
SWITCHES = re.compile(
    r".*bias|.*qk_(layer)?norm|norm_topk_prob|use_parallel_residual|mamba_rms_norm|mamba_norm_before_gate|use_mem_rope"
    r"|use_shared_attention_adapter|residual_in_fp32|tie_word_embeddings|scale_attn_by_inverse_layer_idx"
    r"|.*post_norm|use_double_wide_mlp|do_layer_norm_before"
)
HIGHEST, STEP, STEPS = 64.0, 0.8, 40
"""Limits that are tried: from the highest down."""


def write_rare_checkpoint(
    folder: Path, family: str, without: Collection[str] = (), **settings: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Write the checkpoint; returns the library's model of it, in float32, and what was set in its configuration.

    without: keys that keep their values   settings: of the configuration, beside those
    """
    byte_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    config = tiny_config(family)
    changes: dict[str, Any] = dict(settings)
    for name, value in _changes(config.get_text_config().to_dict()):
        if name not in without and _runs(made := random_model(family, config, changes | {name: value})):
            changes[name] = value
    fields = config.get_text_config().to_dict()
    for name in (*fields, *fields.get("attn_config", {})):
        if LIMITS.fullmatch(name) and (limit := _highest_with_effect(family, config, changes, name)) is not None:
            changes[name] = limit
    made = random_model(family, config, changes)
    assert made is not None
    made.save_pretrained(folder)
    # As it is read again: some configurations change their values when they are written.
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return library.eval(), changes


def assert_has_the_librarys_logits(engine: VerifierEngine, library: PreTrainedModel) -> None:
    """Assert that greedy tokens and float32 logits are the library's after each token of TEXT, by chains of rows."""
    truth = library_logits(library)[:, :VOCABULARY]
    likeliest = truth.argmax(1)
    for start in range(0, len(TEXT), CHAIN + 1):
        rows = TEXT[start : start + CHAIN + 1]
        chain = DraftTree.of(rows, range(-1, len(rows) - 1))
        found, expected = engine.logits_of(TEXT[: start + 1], chain), truth[start : start + len(rows)]
        spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
        off = float(((found - expected).norm(dim=-1) / spread).max())
        assert off < TOLERANCE, f"off by {off:.3g} of the logits' spread after {start} tokens"
        assert torch.equal(found.argmax(1), likeliest[start : start + len(rows)])


def rare_engine(folder: Path) -> VerifierEngine:
    limits = {"max_length": 192, "max_sessions": 1, "max_waiting": 0, "max_depth": 8, "prefill_chunk": 128}
    return VerifierEngine.load(folder, VerifierOptions(name="tiny", dtype=torch.float32, **limits))


def _changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, bool):
            if SWITCHES.fullmatch(name):
                yield name, not value
        elif isinstance(value, (int, float)) and value:
            if FACTORS.fullmatch(name):
                yield name, 1.3 * value
            elif EPSILONS.fullmatch(name):
                yield name, 0.01
        elif isinstance(value, (list, tuple)) and LISTS.fullmatch(name):
            yield name, [each * (0.7 + 0.2 * place) for place, each in enumerate(value)]


def random_model(family: str, config: PretrainedConfig, changes: dict[str, Any]) -> PreTrainedModel | None:
    """The library's model with random weights; None where it cannot be made."""
    settings = config.to_dict()
    if isinstance(text := settings.get("text_config"), dict):
        text |= changes
    else:
        settings |= changes
    if "attn_config" in settings and "clip_qkv" in changes:
        settings["attn_config"] |= {"clip_qkv": changes["clip_qkv"]}
    torch.manual_seed(0)  # vectors keep the library's initial values
    try:
        made = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[family](**settings), dtype=torch.float32, attn_implementation="eager"
        )
    except Exception:  # constructors raise errors of every kind
        return None
    randomise(made, 0)
    model: PreTrainedModel = made.eval()
    return model


def library_logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([TEXT]), use_cache=False).logits[0].float()
    return logits


def _runs(model: PreTrainedModel | None) -> bool:
    try:
        return model is not None and bool(torch.isfinite(library_logits(model)).all())
    except Exception:  # a family's forward may raise anything
        return False


def _highest_with_effect(family: str, config: PretrainedConfig, changes: dict[str, Any], name: str) -> Any:
    """The highest limit that changes some logits; of a lower limit the lowest. None where no limit does."""
    lower = name == "time_step_min"
    none: Any = (0.0, math.inf) if name == "time_step_limit" else 1e-6 if lower else 1e9
    free = random_model(family, config, changes | {name: none})
    if not _runs(free):
        return None
    assert free is not None
    truth = library_logits(free)
    for step in range(STEPS):
        limit = HIGHEST * STEP**step if not lower else 1e-3 / STEP**step
        value = (0.0, limit) if name == "time_step_limit" else limit
        limited = random_model(family, config, changes | {name: value})
        if limited is not None:
            limited.load_state_dict(free.state_dict())  # some initial weights depend on the limits
        if _runs(limited) and limited is not None and _changed(library_logits(limited), truth):
            return value
    return None


def _changed(found: Tensor, truth: Tensor) -> bool:
    spread = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((found - truth).norm(dim=-1) / spread > EFFECT).any())
