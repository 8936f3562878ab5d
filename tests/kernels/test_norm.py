"""The norm kernel against the formula in float64 and, bit for bit, against its reference and itself among other rows.

Without an accelerator it runs in Triton's interpreter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch
from tree_kernels.norm import GATE_FIRST, GATE_LAST, NO_GATE, RowNorm, norm

from tests.support.compiled import printed_by
from tests.support.nearest_casts import round_casts

triton = pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.norm.triton import add_and_norm_rows, norm_rows  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A device compiles the kernel for each width, kind and type.
ON_DEVICE = DEVICE.type == "cuda"
TYPES = [torch.float32, *(() if ON_DEVICE else (torch.float16,)), torch.bfloat16]
WIDTHS = [80, 4096] if ON_DEVICE else [1, 3, 80, 112, 576, 4096]
STEPS = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""The largest difference from the formula, as a share of a row's largest number."""
KINDS = {
    "llama": RowNorm(1e-5, rounded=True),
    "gemma": RowNorm(1e-6),
    "layer-norm": RowNorm(1e-5, centred=True),
    "mamba2": RowNorm(1e-5, rounded=True, gate=GATE_FIRST),
    "falcon-h1": RowNorm(1e-5, gate=GATE_LAST),
}


@dataclass(frozen=True, eq=False)
class NormCase:
    """Rows of a norm: x and gate [rows, groups * width]."""

    x: torch.Tensor
    gate: torch.Tensor | None
    form: RowNorm

    def kernel(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """The kernel's results for some of the rows; its output's memory has NaN in it before."""
        form = replace(self.form, **{name: getattr(self.form, name).to(DEVICE) for name in self.tensors})
        gate = None if self.gate is None else self.gate[rows].to(DEVICE)
        return norm_rows(self.x[rows].to(DEVICE), form, gate).cpu()

    @property
    def tensors(self):
        return [name for name in ("weight", "bias") if getattr(self.form, name) is not None]

    def truth(self):
        form = replace(self.form, rounded=False)
        return norm(self.x.double(), form, None if self.gate is None else self.gate.double())


def case_of(kind, width, dtype, rows=5, weight=True, bias=False, groups=1, scale=1.0):
    generator = torch.Generator().manual_seed(width)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    columns = groups * width
    form = replace(
        KINDS[kind],
        groups=groups,
        weight=draw(columns) if weight else None,
        bias=draw(columns) if bias else None,
    )
    x = torch.randn(rows, columns, generator=generator) * (0.2 + torch.rand(columns, generator=generator)) + 0.1
    return NormCase((x * scale).to(dtype), draw(rows, columns) if form.gate != NO_GATE else None, form)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that the launcher takes for results has NaN in it."""
    taken = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **named: taken(*args, **named).fill_(float("nan")))


@pytest.fixture(autouse=True)
def nearest_casts(monkeypatch):
    if DEVICE.type == "cpu":
        round_casts(monkeypatch)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_those_of_the_formula_in_float64(kind, width, dtype):
    case = case_of(kind, width, dtype)
    found, truth = case.kernel(), case.truth()
    assert found.dtype == dtype
    # A number is rounded twice where it is rounded before the weight.
    assert ((found.double() - truth).abs().amax(1) <= 2 * STEPS[dtype] * truth.abs().amax(1).clamp(min=1e-3)).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma", "layer-norm"])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_have_the_bits_of_the_reference(kind, width, dtype):
    """On a device, too: sums have one order, and quotients and roots are rounded to the nearest."""
    case = case_of(kind, width, dtype, bias=kind == "layer-norm")
    assert torch.equal(case.kernel(), norm(case.x, case.form))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_number_of_rows_at_any_place_beside_any_others(kind, dtype):
    case = case_of(kind, 4096, dtype, rows=33 if ON_DEVICE else 11)
    whole = case.kernel()
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))
    for count in (1, 2, 3, 8, 17):
        places = order[:count]
        assert torch.equal(case.kernel(places), whole[places])
    others = torch.full_like(case.x, 3e4)
    others[7] = case.x[7]
    assert torch.equal(replace(case, x=others).kernel()[7], whole[7])


@pytest.mark.parametrize("kind", ["layer-norm", "mamba2"])
def test_rows_of_any_strides_and_alignment_have_the_same_bits(kind):
    """Wider loads of aligned rows change no order."""
    case = case_of(kind, 576, torch.bfloat16, rows=4)
    whole = case.kernel()

    def shifted(x, by):
        if x is None:
            return None
        wide = torch.full((len(x), x.shape[1] + 9), float("nan"), dtype=x.dtype)
        wide[:, by : by + x.shape[1]] = x
        return wide[:, by : by + x.shape[1]]

    form = replace(case.form, weight=case.form.weight.to(DEVICE))
    for by in (0, 1, 8):
        x, gate = (None if each is None else shifted(each, by).to(DEVICE) for each in (case.x, case.gate))
        assert torch.equal(norm_rows(x, form, gate).cpu(), whole)
    turned = case.x.t().contiguous().t().to(DEVICE)
    assert torch.equal(norm_rows(turned, form, None if case.gate is None else case.gate.to(DEVICE)).cpu(), whole)


@pytest.mark.parametrize("kind", ["layer-norm", "mamba2", "falcon-h1"])
@pytest.mark.parametrize("groups", [2, 8])
def test_a_group_is_normed_alone(kind, groups):
    case = case_of(kind, 48, torch.float32, groups=groups)
    whole = case.kernel()
    for group in range(groups):
        part = slice(48 * group, 48 * (group + 1))
        alone = NormCase(
            case.x[:, part],
            None if case.gate is None else case.gate[:, part],
            replace(case.form, groups=1, weight=case.form.weight[part].contiguous()),
        )
        assert torch.equal(alone.kernel(), whole[:, part])


@pytest.mark.parametrize("weight, bias", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["gemma", "layer-norm", "falcon-h1"])
def test_weight_and_bias_are_optional(kind, weight, bias):
    case = case_of(kind, 80, torch.float32, weight=weight, bias=bias)
    truth = case.truth()
    assert torch.allclose(case.kernel().double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1e4, 1e15])
def test_small_and_large_rows_are_normed(scale):
    case = case_of("llama", 96, torch.float32, scale=scale)
    assert torch.allclose(case.kernel().double(), case.truth(), rtol=1e-5, atol=1e-6)


def test_rows_times_a_wider_weight_are_as_wide():
    """As a Mamba's norm with a float32 weight; and float32 rows with a bfloat16 weight."""
    case = case_of("llama", 64, torch.bfloat16)
    wide = replace(case, form=replace(case.form, weight=case.form.weight.float()))
    assert wide.kernel().dtype == torch.float32
    assert torch.equal(wide.kernel().bfloat16(), case.kernel())
    rows = replace(case, x=case.x.float())
    assert rows.kernel().dtype == torch.float32
    assert torch.equal(rows.kernel(), norm(rows.x, rows.form))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["llama", "layer-norm"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_residuals_are_added_and_normed_with_the_bits_of_torchs_sums_and_the_norm(kind, dtype, count):
    case = case_of(kind, 576, dtype, rows=7, bias=kind == "layer-norm")
    generator = torch.Generator().manual_seed(count)
    others = [torch.randn(7, 600, generator=generator).to(dtype)[:, :576] for _ in range(count)]
    total = case.x if not others else case.x + (others[0] if count == 1 else others[0] + others[1])
    form = replace(case.form, **{name: getattr(case.form, name).to(DEVICE) for name in case.tensors})
    found = add_and_norm_rows(case.x.to(DEVICE), [each.to(DEVICE) for each in others], form)
    assert torch.equal(found[0].cpu(), total) and torch.equal(found[1].cpu(), norm(total, case.form))


@pytest.mark.parametrize("count", [0, 1])
def test_residuals_in_float32_are_rounded_for_the_norm_as_a_mamba2_block_does(count):
    """The first block's rows are in the weights' type; later ones are float32."""
    case = case_of("llama", 576, torch.bfloat16, rows=7)
    added = torch.randn(7, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    for x in (case.x, case.x.float() * 1.001):
        total = x.float() + added if count else x
        form = replace(case.form, weight=case.form.weight.to(DEVICE))
        given = x.to(DEVICE), [added.to(DEVICE)][:count], form
        found = add_and_norm_rows(*given, sum_type=torch.float32, row_type=torch.bfloat16)
        assert torch.equal(found[0].cpu(), total) and found[0].dtype == total.dtype
        assert torch.equal(found[1].cpu(), norm(total.bfloat16(), case.form)) and found[1].dtype == torch.bfloat16


def test_a_gated_norms_result_may_be_rounded_to_another_type():
    case = case_of("mamba2", 576, torch.float32)
    form = replace(case.form, weight=case.form.weight.to(DEVICE))
    found = norm_rows(case.x.to(DEVICE), form, case.gate.to(DEVICE), torch.bfloat16)
    assert found.dtype == torch.bfloat16 and torch.equal(found.cpu(), case.kernel().bfloat16())


def test_no_rows_give_none():
    assert case_of("llama", 64, torch.float32).kernel(slice(0, 0)).shape == (0, 64)


# Compilation for accelerators, without one

COMPILED = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
import triton.language as tl
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tree_kernels.norm.form import GATE_FIRST, GATE_LAST, NO_GATE, padded_width
from tree_kernels.norm.triton import _norm, warps_of

TOOL = Path(next(iter(nvidia.__path__)), "bin", "cuobjdump")
ROWS = {"*bf16": tl.bfloat16, "*fp32": tl.float32}

def compiled(capability, x, weight, width, **constants):
    types = [x, x, weight, weight, x, x, x, x, "i32", "i32", "i32", "i32", "fp32"]
    block = padded_width(width)
    constants = {"WIDTH": width, "BLOCK": block, "ADDED": 0, "ROWS": ROWS[x], **constants}
    names = _norm.arg_names
    signature = dict(zip(names, types)) | {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind != "fp32"}
    source = ASTSource(fn=_norm, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps_of(block), "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    print(width, capability, made.metadata.shared, usage.stdout.splitlines()[-1])

llama = dict(CENTRED=False, ROUNDED=True, WEIGHTED=True, BIASED=False, GATE=NO_GATE)
layer_norm = dict(CENTRED=True, ROUNDED=False, WEIGHTED=True, BIASED=True, GATE=NO_GATE)
mamba2 = dict(CENTRED=False, ROUNDED=True, WEIGHTED=True, BIASED=False, GATE=GATE_FIRST)
for capability in (90, 80):
    compiled(capability, "*bf16", "*bf16", 4096, **llama)
    compiled(capability, "*fp32", "*bf16", 16384, **mamba2)
compiled(90, "*bf16", "*bf16", 16384, **layer_norm)
compiled(90, "*bf16", "*bf16", 4096, **llama, ADDED=1)
compiled(90, "*bf16", "*bf16", 16384, **layer_norm, ADDED=2)
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_sm_90_and_sm_80_without_spilling():
    lines = printed_by(COMPILED)
    assert len(lines) == 7
    for line in lines:
        assert "STACK:0" in line and "LOCAL:0" in line, line
        assert int(re.search(r"REG:(\d+)", line)[1]) <= 128, line
