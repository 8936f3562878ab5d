"""The gate of an MLP on an accelerator: one program for a part of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 1024
"""Numbers of a row that a program computes."""


def swiglu_rows(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of gate [..., width] times up [..., width], of one type, whose last dimensions are contiguous; the result is
    contiguous."""
    gates, ups = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
    assert gates.shape == ups.shape and gates.dtype == ups.dtype and gates.stride(1) == ups.stride(1) == 1
    made = gates.new_empty(gate.shape)
    rows, width = gates.shape
    if rows:
        _swiglu[(rows, triton.cdiv(width, BLOCK))](
            gates, ups, made, gates.stride(0), ups.stride(0), width, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return made


if triton.knobs.runtime.interpret:

    @triton.jit
    def _exp(x):
        return tl.exp(x)

else:

    @triton.jit
    def _exp(x):
        return libdevice.exp(x)  # torch's on a GPU; Triton's own has other bits


@triton.jit
def _swiglu(
    gate,  # [rows, width], a row gate_row numbers after the one before it
    up,  # [rows, width], a row up_row numbers after the one before it
    made,  # [rows, width]; written here
    gate_row,
    up_row,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0)
    u = tl.load(up + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    silu = tl.div_rn(wide, 1.0 + _exp(-wide)).to(g.dtype).to(tl.float32)
    tl.store(made + row * width + columns, (silu * u).to(g.dtype), mask=inside)
