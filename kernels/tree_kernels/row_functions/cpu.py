"""Calls the compiled norms and gated SiLU of rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_kernels.kernel_cache import load_kernels, why_missing
from tree_kernels.matmul.cpu import PRECISIONS
from tree_kernels.matmul.shapes import float_bits
from tree_kernels.row_functions.shapes import UNIT, norm_scratch

MODULE = "tree_kernels.row_functions.loops"


@cache
def _kernels() -> Any:
    return load_kernels(MODULE)


@cache
def row_kernels() -> tuple[int, int, int]:
    """The addresses of the kernels of norms, gates and widening (`shapes.py`)."""
    norms, gates, widened = map(_kernels().address, ("norms", "gates", "widened"))
    return norms, gates, widened


def why_not_compiled() -> str:
    """Reason why norms and gates cannot be compiled here; empty if they can."""
    return why_missing(MODULE)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of rows x [..., D] with a contiguous weight [D] of the same dtype: bfloat16, float16 or float32. Raises
    ValueError for others."""
    if x.dtype != weight.dtype or x.shape[-1:] != weight.shape or not weight.is_contiguous():
        raise ValueError(
            f"rows {list(x.shape)} of {x.dtype} do not fit a weight {list(weight.shape)} of {weight.dtype}"
        )
    given = x.contiguous()
    made = torch.empty_like(given)
    width = len(weight)
    scratch, kind = torch.empty(norm_scratch(width)), PRECISIONS[x.dtype]
    addresses, sizes = (given.data_ptr(), weight.data_ptr(), made.data_ptr()), (given.numel() // width, width)
    call = np.array([*addresses, *sizes, kind, kind, float_bits(eps), scratch.data_ptr(), 0], np.int64)
    _kernels().functions["norms"](call.ctypes.data, 0)
    return made


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, for gate and up [..., D] of one dtype: bfloat16, float16 or float32. Raises ValueError for
    others."""
    if gate.dtype != up.dtype or gate.shape != up.shape:
        raise ValueError(f"gates {list(gate.shape)} of {gate.dtype} do not fit {list(up.shape)} of {up.dtype}")
    gate, up = gate.contiguous(), up.contiguous()
    made = torch.empty_like(gate)
    scratch, kind = torch.empty(UNIT), PRECISIONS[gate.dtype]
    addresses = (gate.data_ptr(), up.data_ptr(), made.data_ptr())
    call = np.array([*addresses, gate.numel(), kind, kind, scratch.data_ptr(), 0], np.int64)
    _kernels().functions["gates"](call.ctypes.data, 0)
    return made
