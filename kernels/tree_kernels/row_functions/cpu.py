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


class CompiledNorm:
    """An RMS norm with a contiguous weight [D] of bfloat16, float16 or float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Raises ValueError for a weight that is not contiguous, NoKernelsError where nothing can be compiled."""
        if not weight.is_contiguous():
            raise ValueError(f"a weight {list(weight.shape)} is not contiguous")
        self.weight = weight
        self._run, self._scratch = _kernels().functions["norms"], norm_scratch(len(weight))
        kind = PRECISIONS[weight.dtype]
        self._numbers = len(weight), kind, kind, float_bits(eps)

    def __call__(self, x: Tensor) -> Tensor:
        """The norms of rows x [..., D] of the weight's dtype. Raises ValueError for others."""
        weight = self.weight
        if x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
            raise ValueError(
                f"rows {list(x.shape)} of {x.dtype} do not fit a weight {list(weight.shape)} of {weight.dtype}"
            )
        given = x.contiguous()
        made, scratch = torch.empty_like(given), torch.empty(self._scratch)
        addresses, rows = (given.data_ptr(), weight.data_ptr(), made.data_ptr()), given.numel() // len(weight)
        call = np.array([*addresses, rows, *self._numbers, scratch.data_ptr(), 0], np.int64)
        self._run(call.ctypes.data, 0)
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
