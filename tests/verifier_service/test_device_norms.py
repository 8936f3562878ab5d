"""Which norms of a target on an accelerator get our kernel: those that compute what it does, by the formula that rounds
where they do. Without an accelerator the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tree_layers.library_mixers import GroupedNorm

from tests.support.nearest_casts import round_casts
from tests.support.odd_norms import LimitedRMSNorm, OuterEpsilonRMSNorm

pytest.importorskip("triton", reason="triton is not installed")
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from verifier_service.models.device_norms import use_norm_kernel
from verifier_service.models.heads import SpreadNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 96


@pytest.fixture(autouse=True)
def nearest_casts(monkeypatch):
    if DEVICE.type == "cpu":
        round_casts(monkeypatch)


def made(module, dtype=torch.bfloat16):
    """A norm with trained weights."""
    generator = torch.Generator().manual_seed(0)
    module = module.to(DEVICE, dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return module


NORMS = {
    "llama": (lambda: LlamaRMSNorm(WIDTH), (WIDTH,)),
    "gemma": (lambda: Gemma2RMSNorm(WIDTH), (WIDTH,)),
    "gpt-oss": (lambda: GptOssRMSNorm(WIDTH), (WIDTH,)),
    "gemma-without-weight": (lambda: Gemma3nRMSNorm(WIDTH, with_scale=False), (WIDTH,)),
    "norm-of-heads": (lambda: LlamaRMSNorm(32), (3, 32)),
    "cohere": (lambda: CohereLayerNorm(WIDTH), (WIDTH,)),
    "cohere-heads": (lambda: CohereLayerNorm((3, 32)), (3, 32)),
    "olmo": (lambda: OlmoLayerNorm(WIDTH), (WIDTH,)),
    "layer-norm": (lambda: nn.LayerNorm(WIDTH), (WIDTH,)),
    "layer-norm-without-bias": (lambda: nn.LayerNorm(WIDTH, bias=False), (WIDTH,)),
    "nemotron": (lambda: NemotronLayerNorm1P(WIDTH), (WIDTH,)),
    "mamba2": (lambda: GroupedNorm(nn.Parameter(torch.ones(WIDTH)), WIDTH, 1e-5), (WIDTH,)),
    "mamba2-in-groups": (lambda: GroupedNorm(nn.Parameter(torch.ones(WIDTH)), 32, 1e-5), (WIDTH,)),
    "zamba2": (lambda: Zamba2RMSNormGated(WIDTH, 48), (WIDTH,)),
    "falcon-h1": (lambda: FalconH1RMSNormGated(WIDTH, n_groups=2), (WIDTH,)),
    "falcon-h1-gate-first": (lambda: FalconH1RMSNormGated(WIDTH, n_groups=2, norm_before_gate=False), (WIDTH,)),
}
GATED = {"mamba2", "mamba2-in-groups", "zamba2", "falcon-h1", "falcon-h1-gate-first"}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_the_kernels_and_rounds_where_it_did(kind):
    """Another formula differs in a fifth of the numbers; the order of sums in one of hundreds."""
    build, shape = NORMS[kind]
    module = made(build())
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(1, 40, *shape, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    given = (x, gate) if kind in GATED else (x,)
    expected = module(*given)
    assert use_norm_kernel(nn.ModuleList([module]), torch.bfloat16, DEVICE) == 1
    found = module(*given)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.allclose(found.float(), expected.float(), rtol=2.0**-7, atol=1e-3)
    assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("kind", ["mamba2", "mamba2-in-groups", "zamba2", "falcon-h1"])
def test_float32_rows_of_a_mixer_with_bfloat16_gates_stay_float32(kind):
    module = made(NORMS[kind][0]())
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(1, 5, WIDTH, generator=generator).to(DEVICE) for _ in range(2))
    expected = module(x, gate.bfloat16())
    assert use_norm_kernel(nn.ModuleList([module]), torch.bfloat16, DEVICE) == 1
    found = module(x, gate.bfloat16())
    assert found.dtype == expected.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_other_types_are_the_kernels(dtype):
    modules = nn.ModuleList([made(NORMS[kind][0](), dtype) for kind in ("llama", "gemma", "layer-norm")])
    x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    expected = [module(x) for module in modules]
    assert use_norm_kernel(modules, dtype, DEVICE) == 3
    for module, wanted in zip(modules, expected, strict=True):
        assert torch.allclose(module(x), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_row_has_the_same_bits_alone_and_among_others():
    module = made(LlamaRMSNorm(WIDTH))
    assert use_norm_kernel(nn.ModuleList([module]), torch.bfloat16, DEVICE) == 1
    x = torch.randn(1, 9, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    assert torch.equal(torch.cat([module(x[:, row : row + 1]) for row in range(9)], 1), module(x))


class UnusedWeightRMSNorm(nn.Module):
    """As FalconMamba's, which norms dt, B and C."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-6
        self.register_buffer("weight", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


def test_a_norm_with_a_weight_that_it_does_not_use_takes_rows_of_any_width():
    module = made(UnusedWeightRMSNorm())
    assert use_norm_kernel(nn.ModuleList([module]), torch.bfloat16, DEVICE) == 1
    for width in (16, 48):
        x = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        assert torch.allclose(module(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps))


class DoubledRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def spread():
    """Of several workers: it sums over them."""
    return SpreadNorm(Zamba2RMSNormGated(WIDTH, WIDTH), 2 * WIDTH, 1, 0)


@pytest.mark.parametrize(
    "build",
    [
        *(lambda: DoubledRMSNorm(WIDTH), lambda: LimitedRMSNorm(WIDTH), lambda: OuterEpsilonRMSNorm(WIDTH)),
        *(lambda: nn.GroupNorm(4, WIDTH), lambda: nn.LayerNorm((4, 24)), lambda: nn.BatchNorm1d(WIDTH), spread),
    ],
    ids=["doubled", "clamped", "root-epsilon", "group-norm", "two-dimensions", "batch-norm", "spread"],
)
def test_a_norm_that_computes_something_else_keeps_its_forward(build):
    module = made(build(), torch.float32)
    assert use_norm_kernel(nn.ModuleList([module]), torch.float32, DEVICE) == 0
    assert "forward" not in vars(module)


def test_a_cpus_target_keeps_its_own_norms(tmp_path, monkeypatch):
    from tests.support.tiny_models import make_checkpoint
    from verifier_service.models import load_target

    monkeypatch.setattr("verifier_service.models.use_norm_kernel", lambda *_: pytest.fail("a kernel of accelerators"))
    monkeypatch.setattr("verifier_service.models.settle_products", lambda: pytest.fail("settings of a GPU"))
    make_checkpoint(tmp_path)
    assert load_target(tmp_path, torch.float32, torch.device("cpu"), (8,)).linear.independent
