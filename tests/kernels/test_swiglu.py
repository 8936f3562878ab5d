"""The gate of an MLP on an accelerator against torch's operations. Without one it runs in Triton's interpreter."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tree_kernels.swiglu import swiglu

from tests.support.compiled import printed_by
from tests.support.nearest_casts import round_casts

pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.swiglu.triton import swiglu_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def repaired(monkeypatch):
    if DEVICE.type == "cpu":
        round_casts(monkeypatch)
    taken = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **named: taken(*args, **named).fill_(float("nan")))


def every_number(dtype):
    """All finite numbers of a type of two bytes, shuffled."""
    bits = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0)).to(torch.int32).to(torch.int16)
    return bits.view(dtype).nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_gate_has_torchs_bits(dtype):
    """On a GPU all; an interpreter's exponential is another one, which few roundings show, and its casts lose the
    smallest numbers."""
    gate = every_number(dtype).view(32, -1).to(DEVICE)
    up = torch.full_like(gate, 1.0)
    with np.errstate(over="ignore"):
        found, expected = swiglu_rows(gate, up), swiglu(gate, up)
    same = (found == expected) | ((expected.abs() < 1e-36) & (DEVICE.type == "cpu"))
    assert bool(same.all()) if DEVICE.type == "cuda" else float(same.float().mean()) > 0.999
    assert torch.allclose(found.float(), expected.float(), rtol=2.0**-7, atol=1e-36)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 96), (3, 1030), (2, 14336), (0, 64)], ids=str)
def test_gates_and_numbers_may_lie_side_by_side(dtype, shape):
    both = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    gate, up = both.chunk(2, -1)
    found, expected = swiglu_rows(gate, up), swiglu(gate, up)
    assert found.shape == shape and found.is_contiguous()
    assert torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(swiglu_rows(gate.contiguous(), up.contiguous()), found)


COMPILED = """
import subprocess, tempfile
from pathlib import Path
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tree_kernels.swiglu.triton import BLOCK, _swiglu

TOOL = Path(next(iter(nvidia.__path__)), "bin", "cuobjdump")
for capability in (90, 80):
    kinds = ["*bf16", "*bf16", "*bf16", "i32", "i32", "i32"]
    signature = dict(zip(_swiglu.arg_names, [*kinds, "constexpr"]))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(kinds))}
    source = ASTSource(fn=_swiglu, signature=signature, constexprs={"BLOCK": BLOCK}, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    print(usage.stdout.splitlines()[-1], "EXP", made.asm["ptx"].count("ex2.approx"))
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_sm_90_and_sm_80_without_spilling():
    lines = printed_by(COMPILED)
    assert len(lines) == 2
    for line in lines:
        assert "STACK:0" in line and "LOCAL:0" in line, line
        assert int(re.search(r"REG:(\d+)", line)[1]) <= 64, line
