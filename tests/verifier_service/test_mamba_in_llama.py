"""Mamba-in-Llama: its configuration, its tensors, and mixers whose heads share x and B.

What it has in common with the other hybrids is tested with them (`test_states.py`, `test_heads.py`).
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from dendro.state import MemoryStates
from safetensors.torch import load_file, save_file

from tests.support.engines import engine_of
from tests.support.exactness import announces_what_it_must
from tests.support.routers import LAWS, RoundByRound
from tests.support.tiny_hybrids import VOCABULARY, make_mamba_in_llama, oracle, paths_below, tree_below
from verifier_service.models import load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mamba_in_llama")
    make_mamba_in_llama(made)
    return made


def target_of(folder):
    return load_target(folder, torch.float32, torch.device("cpu"), [8])


def changed(folder, to, ssm=None, **changes):
    """A checkpoint with changes to `mamba_config.json`; None removes a key."""
    shutil.copytree(folder, to)
    raw = json.loads((to / "mamba_config.json").read_text()) | changes
    raw["ssm_cfg"] = raw["ssm_cfg"] | (ssm or {}) if isinstance(raw["ssm_cfg"], dict) else raw["ssm_cfg"]
    raw["ssm_cfg"] = {key: value for key, value in (raw["ssm_cfg"] or {}).items() if value is not None}
    (to / "mamba_config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return to


def with_tensors(folder, to, change):
    """A checkpoint whose tensors were changed by `change`."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize(
    "settings",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attn_layers": ()},
        {"attn_layers": (0, 1, 2)},
        {"ssm": {"d_conv": 3}},
        {"ssm": {"dt_limit": (0.02, 0.3)}},
        {"ssm": {"chunk_size": 64, "D_has_hdim": False, "repeat_kv_before_conv": False}},
        {"tie_word_embeddings": True},
        {"mixers": {"rms_norm_eps": 0.5}},
    ],
    ids=str,
)
def test_checkpoints_of_all_settings_have_the_oracles_logits_and_independent_rows(tmp_path, settings):
    model = make_mamba_in_llama(tmp_path, **settings)
    announces_what_it_must(engine_of(tmp_path, torch.bfloat16))
    engine = engine_of(tmp_path)
    announces_what_it_must(engine)
    rng = np.random.default_rng(0)
    for length in (1, 17, 60):
        ids = rng.integers(0, VOCABULARY, length).tolist()
        truth = torch.stack([oracle(model, path) for path in paths_below(ids)])
        assert (engine.logits_of(ids, tree_below(ids[-1])) - truth).abs().max() < 1e-4, length


def test_the_memory_of_a_token_holds_each_shared_x_and_b_once(folder):
    """Four heads of eight channels share two x and two B of eight: 16 numbers each, and 64 before the convolution."""
    target = target_of(folder)
    assert len(target.mixers) == 2 and len(target.layouts) == 1
    assert target.mixers[0].token_bytes == 4 * (64 + 16 + 16) + 4 * 4
    assert target.mixers[0].state_bytes == 4 * 8 * 8 * 4


def test_the_fingerprint_depends_on_the_mixers_configuration(folder, tmp_path):
    other = changed(folder, tmp_path / "c", ssm={"dt_limit": [0.0, 1.0]})
    assert target_of(folder).fingerprint != target_of(other).fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm": {"ngroups": None}}, "ssm_cfg has no ngroups, so the mixers are Mamba-1's"),
        ({"ssm": {"repeat_kv_before_conv": True}}, "ssm_cfg.repeat_kv_before_conv True is not supported"),
        ({"ssm": {"D_has_hdim": True}}, "ssm_cfg.D_has_hdim True is not supported"),
        ({"ssm": {"norm_before_gate": True}}, "ssm_cfg.norm_before_gate True is not supported"),
        ({"ssm": {"dt_rank": 4}}, r"ssm_cfg \['dt_rank'\] is not supported"),
        ({"ssm": {"ngroups": 8}}, "d_inner 32 is not ngroups 8 times d_state 8"),
        ({"ssm": {"d_state": 0}}, "ssm_cfg.d_state is 0, not a number of 1 or more"),
        ({"ssm": {"dt_limit": 3}}, "ssm_cfg.dt_limit is 3, not two numbers"),
        ({"d_xb": 24}, "d_xb 24 is no multiple of d_state 8 that divides d_inner 32"),
        ({"d_xb": None}, "d_xb is None, not a number of 1 or more"),
        ({"d_model": 64}, "d_model is 64, but hidden_size is 32"),
        ({"n_layer": 4}, "n_layer is 4, but num_hidden_layers is 3"),
        ({"attn_layers": [3]}, r"attn_layers \[3\] are not all among its 3 layers"),
        ({"attn_layers": None}, "attn_layers is None, not a list"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a number above 0"),
        ({"headdim": 8}, r"unknown keys \['headdim'\]"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_file_and_key(folder, tmp_path, changes, message):
    with pytest.raises(BadRequest, match=f"checkpoint: .*mamba_config.json:.* {message}"):
        target_of(changed(folder, tmp_path / "c", **changes))


def test_an_unreadable_configuration_and_mixers_in_another_family_are_refused(folder, tmp_path):
    broken = changed(folder, tmp_path / "a")
    (broken / "mamba_config.json").write_text("{")
    with pytest.raises(BadRequest, match="mamba_config.json is unreadable"):
        target_of(broken)
    other = changed(folder, tmp_path / "b")
    (other / "config.json").write_text(
        json.dumps(json.loads((other / "config.json").read_text()) | {"model_type": "mistral"})
    )
    with pytest.raises(BadRequest, match="mamba_config.json beside a mistral"):
        target_of(other)


@pytest.mark.parametrize("name", ["in_proj.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight"])
@pytest.mark.parametrize("kind", ["missing", "extra", "misshapen"])
def test_tensors_that_do_not_fit_are_named(folder, tmp_path, name, kind):
    def change(tensors):
        if kind == "extra":
            tensors[f"model.layers.1.mamba.{name}"] = tensors[f"model.layers.2.mamba.{name}"].clone()
        elif kind == "missing":
            del tensors[f"model.layers.2.mamba.{name}"]
        else:
            tensors[f"model.layers.2.mamba.{name}"] = tensors[f"model.layers.2.mamba.{name}"][1:].clone()

    layer = 1 if kind == "extra" else 2
    with pytest.raises(BadRequest, match=rf"checkpoint: .*model\.layers\.{layer}\.mamba\.{name}"):
        target_of(with_tensors(folder, tmp_path / "c", change))


async def test_a_session_without_attention_goes_on_at_another_replica_from_its_saved_state(tmp_path):
    make_mamba_in_llama(tmp_path, attn_layers=())
    store = MemoryStates()
    engines = [engine_of(tmp_path, states=store) for _ in range(2)]
    for engine in engines:
        await engine.start()
    try:
        first = RoundByRound(engines[0], range(3, 40), LAWS[1], 30)
        await first.finish()
        other = RoundByRound(engines[1], first.text.ids, LAWS[1], 30)
        assert (await other.open()).restored == len(first.text.ids) - 1
        again = RoundByRound(engine_of(tmp_path), first.text.ids, LAWS[1], 30)
        await again.engine.start()
        try:
            assert await other.go_on() == await again.finish()
        finally:
            await again.engine.stop()
    finally:
        for engine in engines:
            await engine.stop()
