"""Which modules get our row functions: those that compute the same, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm
from tree_kernels.row_functions import why_not_compiled

from tests.support.odd_norms import LimitedRMSNorm, OuterEpsilonRMSNorm
from verifier_service.models.row_functions import use_row_functions

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())


class DoublingRMSNorm(LlamaRMSNorm):
    """Has the attributes of a Llama's norm, and computes something else."""

    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def mlp(act="silu", dtype=torch.float32):
    return (
        LlamaMLP(LlamaConfig(hidden_size=48, intermediate_size=96, num_attention_heads=4, hidden_act=act))
        .to(dtype)
        .requires_grad_(False)
    )


def ours(module):
    return "forward" in module.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_and_gated_mlps_of_a_llama_are_ours_and_compute_what_they_did(dtype):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(48))
    layer = mlp(dtype=dtype)
    x = torch.randn(1, 5, 48).to(dtype)
    expected = norm(x), layer(x)
    assert use_row_functions(nn.ModuleList([norm, layer])) == 2
    assert ours(norm) and ours(layer)
    for got, wanted in zip((norm(x), layer(x)), expected, strict=True):
        assert got.dtype == dtype and torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=1e-3)


def test_rows_of_another_dtype_than_the_weights_are_normed_by_the_library():
    """As a Mamba's float32 residual with a bfloat16 weight."""
    norm = LlamaRMSNorm(48).bfloat16().requires_grad_(False)
    x = torch.randn(1, 5, 48)
    expected = norm(x)
    assert use_row_functions(nn.ModuleList([norm])) == 1
    assert torch.equal(norm(x), expected) and norm(x).dtype == expected.dtype == torch.float32


class ByHeadRMSNorm(LlamaRMSNorm):
    """Takes rows of four dimensions alone."""

    def forward(self, hidden_states):
        _, _, _, _ = hidden_states.shape
        return super().forward(hidden_states)


def nearly_linear_gelu():
    """At gates near zero GELU and SiLU agree in bfloat16."""
    layer = mlp("gelu", torch.bfloat16)
    layer.gate_proj.weight.mul_(1e-4)
    return layer


class LimitedMLP(LlamaMLP):
    """As gpt-oss' experts."""

    def forward(self, x):
        up = self.up_proj(x).clamp(-60, 60)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def limited_mlp(dtype):
    config = LlamaConfig(hidden_size=48, intermediate_size=96, num_attention_heads=4)
    return LimitedMLP(config).to(dtype)


@pytest.mark.parametrize(
    "module",
    [
        *(ByHeadRMSNorm(48), nearly_linear_gelu(), DoublingRMSNorm(48), Gemma2RMSNorm(48), mlp("gelu"), nn.RMSNorm(48)),
        *(LimitedRMSNorm(48), OuterEpsilonRMSNorm(48)),
        *map(limited_mlp, (torch.float32, torch.float16, torch.bfloat16)),
    ],
)
def test_modules_that_compute_something_else_keep_their_forward(module):
    torch.manual_seed(0)
    module.requires_grad_(False)
    assert use_row_functions(nn.ModuleList([module])) == 0
    assert not ours(module)
