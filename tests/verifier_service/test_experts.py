"""Experts have the library's results, and a row's bits do not depend on how many rows chose the same experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from tree_layers.linear import RowForms
from tree_layers.row_weights import make_rows_independent

from tests.support.engines import engine_of
from tests.support.exactness import announces_what_it_must, bitwise_or_skip
from tests.support.made_once import made_once
from tests.support.routers import LAWS, arrive_at_random
from tests.support.tiny_experts import FAMILIES, make_checkpoint
from tests.support.tiny_hybrids import paths_below, tree_below
from verifier_service.models.activations import make_activations_safe
from verifier_service.models.experts import is_experts, seat_experts

VOCABULARY = 257
BUCKETS = (8, 16, 24, 32, 48, 64)
ROWS, WIDTH, INNER, COUNT = 64, 40, 20, 6


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def experts_of(dtype, transposed=False, biased=False, gated=True, normed=False):
    """A module with the attributes of the library's experts. Its forward is a plain loop over experts."""

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = COUNT
            self.first = "gate_up_proj" if gated else "up_proj"
            for name, outputs, inputs in ((self.first, (1 + gated) * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
                shape = (COUNT, inputs, outputs) if transposed else (COUNT, outputs, inputs)
                self.register_parameter(name, nn.Parameter(torch.randn(shape) / inputs**0.5))
                if biased:
                    self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(COUNT, outputs)))
            self.act_fn = ACT2FN["silu"]
            if normed:
                self.post_expert_norm = Norm()

        def product(self, name, expert, x):
            weight = getattr(self, name)[expert]
            bias = getattr(self, f"{name}_bias")[expert] if biased else None
            return F.linear(x, weight.T if transposed else weight, bias)

        def forward(self, hidden, index, weights):
            total = torch.zeros_like(hidden)
            for expert in range(COUNT):
                rank, row = torch.where((index == expert).T)
                inner = self.product(self.first, expert, hidden[row])
                inner = self._apply_gate(inner) if gated else self.act_fn(inner)
                outer = self.product("down_proj", expert, inner)
                outer = self.post_expert_norm(outer) if normed else outer
                total.index_add_(0, row, (outer * weights[row, rank, None]).to(total.dtype))
            return total

    torch.manual_seed(0)
    describe = use_experts_implementation(
        is_transposed=transposed, has_bias=biased, has_gate=gated, has_post_expert_norm=normed
    )
    config = type("Config", (), {"_experts_implementation": "eager"})()
    return describe(Experts)(config).to(dtype).requires_grad_(False)


def chosen(dtype, ranks=2):
    """Rows, their experts and the experts' weights: most rows choose the first expert, few the last."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    likely = torch.tensor([40.0, 20, 4, 2, 1, 0.5]).expand(ROWS, -1)
    index = torch.multinomial(likely, ranks, generator=generator)
    return hidden, index, torch.rand(ROWS, ranks, generator=generator).to(dtype)


KINDS = {
    "plain": {},
    "transposed": {"transposed": True},
    "biased": {"biased": True},
    "transposed and biased": {"transposed": True, "biased": True},
    "ungated": {"gated": False},
    "normed": {"normed": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts_has_the_librarys_sums_and_independent_rows(kind, dtype):
    experts = experts_of(dtype, **KINDS[kind])
    hidden, index, weights = chosen(dtype)
    with torch.inference_mode():
        expected = experts.double()(hidden.double(), index, weights.double())
        experts = experts_of(dtype, **KINDS[kind])
        assert is_experts(experts)
        make_activations_safe(experts)
        forms = RowForms(BUCKETS)
        seat_experts(experts, forms)
        make_rows_independent(experts, forms)
        assert forms.report().independent
        truth = experts(hidden, index, weights)
        assert (truth.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.15)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
        for count in (1, 2, 3, 8, 24, 40, 64):
            rows = order[:count]
            assert torch.equal(experts(hidden[rows], index[rows], weights[rows]), truth[rows]), count


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return made_once(tmp_path_factory, make_checkpoint)


def oracle(model, ids):
    """The library's logits [vocabulary] after a text."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1, :VOCABULARY]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_trees_have_the_librarys_logits(models, family):
    folder, model = models(family)
    engine = engine_of(folder)
    rng = np.random.default_rng(0)
    for length in (1, 17, 100):
        ids = rng.integers(0, VOCABULARY, length).tolist()
        found = engine.logits_of(ids, tree_below(ids[-1]))
        truth = torch.stack([oracle(model, path) for path in paths_below(ids)])
        assert (found - truth).abs().max() < 1e-4, length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_rows_are_independent(models, family, dtype):
    bitwise_or_skip(engine_of(models(family)[0], dtype))


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen2_moe", "gpt_oss"))]
)
async def test_random_arrivals_and_departures_change_no_token(models, family):
    rng = np.random.default_rng(2)
    engine = engine_of(models(family)[0])
    await engine.start()
    try:
        prompts = [rng.integers(0, 256, int(rng.integers(1, 90))).tolist() for _ in range(6)]
        laws = [LAWS[place % len(LAWS)] for place in range(len(prompts))]
        await arrive_at_random(engine, prompts, laws, 30, rng)
    finally:
        await engine.stop()


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe", "deepseek_v3"])
def test_experts_of_two_workers_have_the_librarys_logits(models, family):
    folder, model = models(family)
    engine = engine_of(folder, tensor_parallel=2)
    try:
        announces_what_it_must(engine)
        ids = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
        found = engine.logits_of(ids, tree_below(ids[-1]))
        truth = torch.stack([oracle(model, path) for path in paths_below(ids)])
        assert (found - truth).abs().max() < 1e-4
    finally:
        engine.runner.crew.stop()
