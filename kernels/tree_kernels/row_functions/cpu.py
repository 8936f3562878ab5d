"""Calls the compiled functions."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tree_kernels.kernel_cache import NoKernelsError, load_kernels
from tree_kernels.matmul.cpu import PRECISIONS
from tree_kernels.row_functions.shapes import SUMS


@cache
def _functions() -> Any:
    return load_kernels("tree_kernels.row_functions.loops").functions


def why_not_compiled() -> str:
    """Why the functions cannot be compiled here; empty if they can."""
    try:
        _functions()
    except NoKernelsError as error:
        return str(error)
    return ""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], contiguous weight [D] of one dtype, bfloat16, float16 or float32 -> [..., D]. Raises ValueError for
    others."""
    if x.dtype != weight.dtype or x.shape[-1:] != weight.shape or not weight.is_contiguous():
        raise ValueError(
            f"rows {list(x.shape)} of {x.dtype} do not fit a weight {list(weight.shape)} of {weight.dtype}"
        )
    given = x.contiguous()
    made = torch.empty_like(given)
    width = len(weight)
    scratch = torch.empty(SUMS + width)
    addresses = (given.data_ptr(), weight.data_ptr(), made.data_ptr())
    rows = given.numel() // width
    _functions()["rms_norm"](*addresses, rows, width, PRECISIONS[x.dtype], scratch.data_ptr(), eps)
    return made


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., D] of one dtype, bfloat16, float16 or float32 -> [..., D]. Raises ValueError for others."""
    if gate.dtype != up.dtype or gate.shape != up.shape:
        raise ValueError(f"gates {list(gate.shape)} of {gate.dtype} do not fit {list(up.shape)} of {up.dtype}")
    gate, up = gate.contiguous(), up.contiguous()
    made = torch.empty_like(gate)
    addresses = (gate.data_ptr(), up.data_ptr(), made.data_ptr())
    _functions()["gated_silu"](*addresses, gate.numel(), PRECISIONS[gate.dtype])
    return made
