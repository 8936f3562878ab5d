"""The check at start names the module whose rows depend on their neighbours."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from tree_kernels.tree_attention import compiled, cpu

import verifier_service.models as models
from cluster.certify.command import _exactness
from tests.support.engines import engine_of
from tests.support.exactness import announces_what_it_must, bitwise_or_skip
from tests.support.made_once import made_once
from tests.support.other_kernels import give_a_batch_of_one_other_bits
from tests.support.tiny_experts import make_checkpoint as make_experts
from tests.support.tiny_hybrids import make_checkpoint as make_hybrid
from tests.support.tiny_models import make_checkpoint
from verifier_service.row_check import RowTrace

MAKERS: dict[str, Callable[..., Any]] = {
    "llama": make_checkpoint,
    "mixtral": make_experts,
    "mamba2": make_hybrid,
    "bamba": make_hybrid,
}


@pytest.fixture(autouse=True)
def library_functions(monkeypatch):
    """The activations that these tests spoil are called: a gated MLP with our row functions does not call its own."""
    monkeypatch.setattr(models, "use_row_functions", lambda model: 0)


@pytest.fixture
def library_attention(monkeypatch):
    """The library's products, which these tests spoil, are called: compiled attention does not call them."""
    monkeypatch.setattr(compiled, "why_not_compiled", lambda: "numba is not installed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = made_once(tmp_path_factory, lambda folder, family: MAKERS[family](folder, family))
    return lambda family: made(family)[0]


def spoil(module, rows=8):
    """Change a module's results by one unit in the last place in steps of so many rows."""
    forward = module.forward

    def run(x, *args, **kwargs):
        made = forward(x, *args, **kwargs)
        if x.shape[-2] != rows:
            return made
        return torch.nextafter(made, made.new_full((), torch.inf))

    module.forward = run


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.act_fn"),
        ("llama", "model.layers.0.input_layernorm"),
        ("llama", "model.layers.2.self_attn.o_proj"),
        ("mixtral", "model.layers.1.mlp.experts"),
        ("mamba2", "backbone.layers.1.mixer.in_proj"),
    ],
)
def test_the_module_whose_rows_differ_is_named_with_their_number(folders, family, name):
    runner = engine_of(folders(family), torch.bfloat16).runner
    assert runner.check_rows() == []
    spoil(runner.target.model.get_submodule(name))
    assert runner.check_rows() == [f"8 rows, first in {name}"]


def test_keys_of_rows_that_differ_are_not_read_by_the_rows_checked_after_them(folders):
    """Of the rows in steps of 8, the 17th differs: steps of 16 that read its keys would differ in attention."""
    runner = engine_of(folders("llama"), torch.bfloat16).runner
    generator = np.random.default_rng(0)
    ids, order = generator.integers(0, runner.target.vocabulary, 128), generator.permutation(128)
    row = runner.target.model.get_input_embeddings()(torch.tensor([ids[order[16]]]))
    norm = runner.target.model.model.layers[0].input_layernorm
    forward = norm.forward

    def run(x):
        made = forward(x)
        return made * 1.5 if x.shape[-2] == 8 and (x == row).all(-1).any() else made

    norm.forward = run
    assert runner.check_rows() == ["8 rows, first in model.layers.0.input_layernorm"]


def test_a_difference_in_a_parents_own_computation_is_named_as_the_next_modules_input(folders):
    runner = engine_of(folders("llama"), torch.bfloat16).runner
    mlp = runner.target.model.model.layers[1].mlp

    def forward(x):
        gated = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        return mlp.down_proj(gated * 1.01 if x.shape[1] == 16 else gated)

    mlp.forward = forward
    assert runner.check_rows() == ["16 rows, first in model.layers.1.mlp.down_proj's input"]


@pytest.mark.usefixtures("library_attention")
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_batch_of_one_has_the_same_bits_where_the_library_uses_another_kernel_for_it(family, tmp_path, monkeypatch):
    """With one kv head, a single row is a batch of one."""
    give_a_batch_of_one_other_bits(monkeypatch)
    MAKERS[family](tmp_path, family, num_key_value_heads=1)
    engine = engine_of(tmp_path, torch.bfloat16)
    assert engine.dependent == () and engine._hello.exactness == "bitwise"


@pytest.mark.usefixtures("library_attention")
def test_a_single_rows_difference_is_named(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, "llama", num_key_value_heads=1)
    give_a_batch_of_one_other_bits(monkeypatch)
    monkeypatch.setattr(cpu, "bmm", torch.bmm)
    assert engine_of(tmp_path, torch.bfloat16).dependent == ("1 row, first in model.layers.0.self_attn.o_proj's input",)


def test_the_head_is_checked_too(folders):
    runner = engine_of(folders("llama"), torch.bfloat16).runner
    product = runner.target.head._product
    runner.target.head._product = lambda x: product(x) * (1.0001 if x.shape[-2] == 24 else 1)
    assert runner.check_rows() == [f"{bucket} rows, first in the head" for bucket in (24, 56)]  # 56 are 32 and 24


def test_the_engine_its_log_and_certify_name_what_differs(folders, monkeypatch, caplog):
    def spoiled(model):
        spoil(model.get_submodule("model.layers.1.mlp.act_fn"))

    monkeypatch.setattr(models, "make_activations_safe", spoiled)
    with caplog.at_level(logging.INFO, logger="dendro.verifier"):
        engine = engine_of(folders("llama"), torch.bfloat16)
    line = "8 rows, first in model.layers.1.mlp.act_fn"
    assert engine._hello.exactness == "margin" and engine.dependent == (line,)
    assert line in caplog.text
    assert _exactness(engine) == f"margin, as rows depend on others ({line})"
    monkeypatch.undo()
    assert _exactness(engine_of(folders("llama"), torch.bfloat16)) == "bitwise"


def test_bitwise_tests_are_skipped_where_no_form_is_independent_and_fail_for_any_other_cause(folders, monkeypatch):
    bitwise_or_skip(engine_of(folders("llama"), torch.bfloat16))
    with monkeypatch.context() as patch:
        patch.setattr("tree_layers.linear._first_independent", lambda *_: None)
        engine = engine_of(folders("llama"), torch.bfloat16)
        assert not announces_what_it_must(engine)
        assert "64 x 64 torch.bfloat16" in engine.dependent
        with pytest.raises(pytest.skip.Exception, match="NOT RUN: .*64 x 64"):
            bitwise_or_skip(engine)
    monkeypatch.setattr(models, "make_activations_safe", lambda model: spoil(model.model.layers[1].mlp.act_fn))
    with pytest.raises(AssertionError, match=r"8 rows, first in model.layers.1.mlp.act_fn"):
        bitwise_or_skip(engine_of(folders("llama"), torch.bfloat16))


def test_the_parts_of_experts_are_not_compared_row_by_row():
    """The rows of each part are in its own order."""

    class UnevenExperts(nn.Module):
        has_gate, is_transposed = True, False

        def __init__(self):
            super().__init__()
            self.down_proj = nn.Identity()

        def forward(self, x):
            return self.down_proj(x.flip(0)).flip(0)

    model, rows, order = nn.Sequential(UnevenExperts()), torch.randn(8, 5), torch.tensor([3, 1, 2, 0])
    whole, part = RowTrace(), RowTrace()
    with whole.of(model, 8):
        model(rows)
    with part.of(model, 4):
        model(rows[order])
    assert whole.first_difference(part, order) == "the head"


def test_a_trace_compares_every_dtype_bit_by_bit():
    class Casts(nn.Module):
        def forward(self, x):
            return x, x.bfloat16(), x > 0, x.argsort(-1)

    model = nn.Sequential(Casts())
    rows = torch.randn(8, 5)
    whole, same, other = RowTrace(), RowTrace(), RowTrace()
    with whole.of(model, 8):
        model(rows)
    with same.of(model, 4):
        model(rows[[3, 1, 2, 0]])
    changed = rows[[3, 1, 2, 0]].clone()
    changed[2, 4] = torch.nextafter(changed[2, 4], torch.tensor(9.0))
    with other.of(model, 4):
        model(changed)
    order = torch.tensor([3, 1, 2, 0])
    assert whole.first_difference(same, order) == "the head"
    assert whole.first_difference(other, order) == "0's input"
