"""Every causal family of the installed transformers is served and certified, or refused for a listed property."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from dendro.errors import BadRequest
from torch import nn
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral import modeling_mistral
from tree_layers.checkpoint import read_facts
from tree_layers.tree_mixers import TreeMamba2

from tests.families import HOW_TO_RECORD, PAGE, read, try_family, written
from tests.support import tiny_mamba
from tests.support.tiny_families import FAMILIES, WINDOW, make_checkpoint
from verifier_service import models
from verifier_service.engine import VerifierEngine
from verifier_service.models import families, load_target, mixers
from verifier_service.models.families import FamilyError, Property
from verifier_service.options import VerifierOptions

KNOWN = read()
BUCKETS = (8, 40)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*FAMILIES, *KNOWN["served"], *KNOWN["refused"]}))
def test_every_causal_family_is_served_and_certified_or_refused_for_a_property(family, tmp_path):
    """`-k` with a name tries that family alone. A family that is served must stay so."""
    if family not in FAMILIES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    found = try_family(family, tmp_path)
    command = HOW_TO_RECORD.format(family=family)
    if family in KNOWN["served"]:
        assert found.refused is None, f"{family} was served, and is refused now: {found.message}"
    elif transformers.__version__ == KNOWN["transformers"]:  # another version may have changed or added it
        assert found.refused is not None, f"{family} is served now: record it with `{command}`"
        assert KNOWN["refused"].get(family) == found.refused.name, f"another property: record it with `{command}`"


def test_the_page_of_families_is_up_to_date():
    assert PAGE.read_text() == written(KNOWN), "write it with `python -m tests.families`"


def test_every_recorded_refusal_gives_a_property_of_the_closed_list():
    assert {*KNOWN["refused"].values()} <= set(Property.__members__)
    assert not {*KNOWN["served"]} & KNOWN["refused"].keys()


def load(folder, dtype=torch.float32):
    return load_target(folder, dtype, torch.device("cpu"), BUCKETS)


@pytest.mark.parametrize("named", [True, False], ids=["named", "by the class alone"])
def test_a_text_longer_than_whispers_learned_positions_is_refused_by_max_length(tmp_path, named):
    make_checkpoint(tmp_path, "whisper")
    config = json.loads((tmp_path / "config.json").read_text())
    positions = config["max_target_positions"] if named else config.pop("max_target_positions")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_facts(tmp_path).positions == (positions if named else None)
    options = VerifierOptions(name="t", dtype=torch.float32, max_length=positions + 1, max_sessions=1)
    with pytest.raises(BadRequest, match=f"max_length: {positions + 1}; the model has {positions} positions"):
        VerifierEngine.load(tmp_path, options)
    assert load(tmp_path).max_positions == positions


def refused(folder, dtype=torch.float32):
    """The property for which a checkpoint is refused."""
    with pytest.raises(BadRequest) as caught:
        load(folder, dtype)
    assert isinstance(caught.value.__cause__, FamilyError), caught.value
    assert caught.value.__cause__.property in str(caught.value)
    return caught.value.__cause__.property


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("falcon", Property.OUTSIDE_INTERFACE),  # its constructor rejects our attention
        ("gptj", Property.OUTSIDE_INTERFACE),
        ("bloom", Property.OUTSIDE_INTERFACE),  # it never calls the interface
        ("bart", Property.POSITIONS),
        ("lfm2", Property.CONVOLUTION),
        ("recurrent_gemma", Property.STATES),
        ("llama4_text", Property.CHUNKED),
        ("diffllama", Property.CALLED_TWICE),
        ("doge", Property.OWN_MASK),
        ("mllama", Property.NO_CAUSAL_CLASS),
    ],
)
def test_a_family_that_cannot_be_served_is_refused_for_its_property(family, why, tmp_path):
    assert make_checkpoint(tmp_path, family)
    assert refused(tmp_path) == why


def test_opt_is_served_with_the_librarys_answers(tmp_path):
    """OPT's model calls its decoder, not its base model: the head must get its rows from the decoder."""
    assert try_family("opt", tmp_path).refused is None


def test_an_encoder_is_refused_as_it_attends_to_later_tokens(tmp_path):
    make_checkpoint(tmp_path, "bert")
    config = AutoConfig.from_pretrained(tmp_path)
    config.is_decoder = False
    config.save_pretrained(tmp_path)
    assert refused(tmp_path) == Property.BIDIRECTIONAL


class Changed:
    """transformers' table of attention functions, which changes the arguments of every call."""

    def __init__(self, change):
        self.change = change

    def get_interface(self, name, default):
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, default)

        def call(module, query, key, value, mask, **others):
            query, mask = self.change(name, query, mask, others)
            return attention(module, query, key, value, mask, **others)

        return call


def no_window(name, query, mask, others):
    others["sliding_window"] = None
    return query, mask


def own_bias(name, query, mask, others):
    return query, mask + torch.zeros(1)


def no_mask(name, query, mask, others):
    return query, None


def more_arguments(name, query, mask, others):
    others["position_bias"] = query
    return query, mask


def other_scale(name, query, mask, others):
    if name != "eager":
        others["scaling"] *= 0.5
    return query, mask


def rows_joined(name, query, mask, others):
    return query + query.roll(1, 2), mask


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_window, Property.WINDOW_NOT_HANDED),
        (own_bias, Property.OWN_MASK),
        (no_mask, Property.BIDIRECTIONAL),
        (more_arguments, Property.UNKNOWN_ARGUMENT),
        (other_scale, Property.OTHER_LOGITS),
        (rows_joined, Property.ROWS_MIX),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_does_what_our_attention_cannot_is_refused_when_it_is_loaded(
    monkeypatch, tmp_path, change, why, dtype
):
    make_checkpoint(tmp_path, "mistral")
    assert load(tmp_path, dtype).window == WINDOW
    monkeypatch.setattr(modeling_mistral, "ALL_ATTENTION_FUNCTIONS", Changed(change))
    assert refused(tmp_path, dtype) == why


def test_a_layer_of_an_unknown_type_is_refused_though_a_short_text_shows_no_difference(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, "mistral")
    monkeypatch.setattr(families, "PACKABLE_LAYERS", set())
    assert refused(tmp_path) == Property.OTHER_LAYERS


def half_mlps(model):
    for module in model.modules():
        if type(module).__name__ == "MistralMLP":
            module.forward = lambda x, forward=module.forward: 0.5 * forward(x)
    return 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_wrong_replacement_of_a_module_is_noticed_though_the_attention_agrees(monkeypatch, tmp_path, dtype):
    """The logits are compared with those of the library's own modules, from before any was replaced."""
    make_checkpoint(tmp_path, "mistral")
    monkeypatch.setattr(models, "use_row_functions", half_mlps)
    assert refused(tmp_path, dtype) == Property.OTHER_LOGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_limit_that_a_mixer_has_lost_is_noticed_though_a_short_text_does_not_reach_it(monkeypatch, tmp_path, dtype):
    config = tiny_mamba.tiny_config("mamba2", time_step_limit=(0.0, 30.0))
    tiny_mamba.make_checkpoint(tmp_path, "mamba2", config=config)
    load(tmp_path, dtype)
    unlimited = partial(replace, dt_limit=(0.0, math.inf))
    monkeypatch.setattr(mixers, "TreeMamba2", lambda **parts: unlimited(TreeMamba2(**parts)))
    assert refused(tmp_path, dtype) == Property.OTHER_LOGITS


def test_a_head_that_is_no_plain_product_is_refused(monkeypatch, tmp_path):
    make_checkpoint(tmp_path, "mistral")
    library = modeling_mistral.MistralForCausalLM.__init__

    def capped(self, config):
        library(self, config)
        self.lm_head = CappedHead(config.hidden_size, config.vocab_size, bias=False)

    monkeypatch.setattr(modeling_mistral.MistralForCausalLM, "__init__", capped)
    assert refused(tmp_path) == Property.NO_HEAD


class CappedHead(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-1, 1)
