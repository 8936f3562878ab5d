"""Every field of a drafter's configuration is honoured or refused by name: a drafter has the library's logits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafter_service.models import MODELS, load_model
from drafter_service.models.fused import FUSED
from drafter_service.plan import EMPTY_TEXT, Chains
from tests.support.cases import few_of
from tests.support.rare_limits import TEXT, library_logits, random_model, write_rare_checkpoint
from tests.support.tiny_families import VOCABULARY, tiny_config
from tests.support.tiny_models import byte_tokenizer

KINDS = few_of(sorted(MODELS), "llama", "mamba", "mamba2")
SET: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}}
"""What a kind's default configuration has that a drafter refuses."""
REFUSED = {"llama": {"attention_bias", "mlp_bias"}, "qwen3": {"attention_bias"}}
"""Switches that a drafter refuses, though their kind has them."""
OTHER_THAN_FIELDS = re.compile(
    r"vocab_size|.*_token_id|use_cache|initializer_range|output_.*|return_dict|id2label|label2id|dtype|architectures"
    r"|transformers_version|model_type|num_labels|problem_type|is_encoder_decoder|chunk_size_feed_forward|_.*"
)
"""Keys of a configuration that change no logits, or of which the tokenizer decides."""
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0},
)
SCALES = (100.0, 10_000.0)
TOLERANCE = 3e-3
"""How far a row's logits may be from the library's, as a share of their spread."""
SCALED_TOLERANCE = 0.01
"""That of scaled products, whose decays have less precision."""
SENSITIVE = 1e-7
"""Relative noise in a library's weights. Where it moves logits further than a tolerance, so may the order of sums."""


def drafter_logits(folder: Path, form: str) -> Tensor:
    """Logits of TEXT [T, V], in chunks."""
    model, _ = load_model(folder, torch.float32, torch.device("cpu"), form=form)
    memory, found = model.memory(texts=2, nodes=1), []
    with torch.inference_mode():
        for start, stop in ((0, 1), (1, 20), (20, 41), (41, len(TEXT))):
            lengths, starts, sources, targets = np.array([[stop - start], [start], [1 if start else EMPTY_TEXT], [1]])
            rows = Chains(np.array([TEXT[start:stop]]), lengths, starts, sources, targets, np.zeros(0, np.int64))
            found.append(model.logits(memory.chain(rows)[0]))
    return torch.cat(found)


def written(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Write a checkpoint; returns it as the library reads it."""
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    byte_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    return read(folder)


def read(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def distance(found: Tensor, truth: Tensor) -> float:
    """The largest distance of a row, as a share of the truth's spread."""
    found, truth = found.double(), truth[:, : found.shape[1]].double()
    spread, off = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1), (found - truth).norm(dim=-1)
    return float((off / spread).where(off != 0, 0.0).max())  # squares of a norm may overflow, and all logits be 0


def forms_of(kind: str) -> tuple[str, ...]:
    return ("eager", "fused") if kind in FUSED else ("eager",)


def other_values(name: str, value: Any) -> Iterator[Any]:
    """Values of a field beside its default."""
    if name == "rope_parameters":
        yield from ({"rope_theta": 10000.0, **rope} for rope in ROPES)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value)
    elif isinstance(value, float):
        yield 1.3 * value + 0.01
    elif isinstance(value, str) and "act" in name:
        yield from ("gelu", "relu2")
    elif isinstance(value, (list, tuple)) and name == "time_step_limit":
        yield (0.02, 0.5)
    elif isinstance(value, (list, tuple)) and all(isinstance(each, float) for each in value):
        yield [1.3 * each for each in value]
    elif value is None:
        yield from (True, 2, 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_configuration_is_honoured_or_refused_by_name(tmp_path, kind):
    config, honoured, refused = tiny_config(kind), set[str](), set[str]()
    for name, default in config.to_dict().items():
        if OTHER_THAN_FIELDS.fullmatch(name):
            continue
        for value in other_values(name, default):
            model = random_model(kind, config, SET.get(kind, {}) | {name: value})
            try:
                assert model is not None
                truth = library_logits(written(tmp_path, model))
            except Exception:  # the library's model has no such value
                continue
            for form in forms_of(kind):
                try:
                    off = distance(drafter_logits(tmp_path, form), truth)
                except BadRequest as error:
                    named = value["rope_type"] if isinstance(value, dict) else value if isinstance(value, str) else name
                    assert str(named) in str(error) or name in str(error)
                    refused.add(name)
                else:
                    assert off < TOLERANCE, f"{name} = {value} is not honoured: off by {off:.3g} of the logits' spread"
                    honoured.add(name)
    assert len(honoured) > 10 and REFUSED.get(kind, set()) <= refused, (honoured, refused)


@pytest.mark.parametrize("kind", KINDS)
def test_limits_that_act_on_few_tokens_and_large_products_give_the_librarys_logits(tmp_path, kind):
    """Each projection in turn has its results multiplied, so that a limit of any of them acts on some tokens."""
    given = SET.get(kind, {})
    library, changes = write_rare_checkpoint(tmp_path, kind, REFUSED.get(kind, ()), **given)
    assert changes.keys() > given.keys()
    matrices = [name for name, weight in library.named_parameters() if weight.dim() == 2 and ".layers." in name]
    modules = sorted({name.split(".")[-2] for name in matrices if not re.search("embed|router|gate.weight", name)})
    for module, scale in [("", 1.0), *((module, scale) for module in modules for scale in SCALES)]:
        scaled = read(tmp_path)
        with torch.no_grad():
            for name, weight in scaled.named_parameters():
                if name.split(".")[-2] == module:
                    weight *= scale
        scaled = written(tmp_path / "scaled", scaled)
        truth, allowed = library_logits(scaled), TOLERANCE if scale == 1.0 else SCALED_TOLERANCE
        assert torch.isfinite(truth).all()
        for form in forms_of(kind):
            found = drafter_logits(tmp_path / "scaled", form)
            off = distance(found, truth)
            if off >= allowed:
                allowed = max(allowed, 4 * moved_by_noise(scaled, truth))
            assert off < allowed, f"{form} {module} x {scale:g}: off by {off:.3g} of the logits' spread"
            assert torch.equal(found.argmax(1), truth[:, : found.shape[1]].argmax(1))


@torch.no_grad()
def moved_by_noise(library: PreTrainedModel, truth: Tensor) -> float:
    """How far relative noise in its weights moves the library's own logits."""
    generator = torch.Generator().manual_seed(0)
    for weight in library.parameters():
        weight *= 1 + SENSITIVE * torch.randn(weight.shape, generator=generator)
    return distance(library_logits(library), truth)
