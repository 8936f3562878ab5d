"""Tensors as numpy arrays, for states stored outside the process. Two-byte floats are stored as uint16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def kind_of(dtype: torch.dtype) -> str:
    """The numpy dtype that `as_array` returns for this dtype: float32, or uint16 for bfloat16 and float16."""
    return "uint16" if dtype.itemsize == 2 else str(dtype).removeprefix("torch.")


def as_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """A copy of a tensor; for bfloat16, which numpy lacks, and float16, a copy of the bits."""
    bits = tensor.cpu()
    array: npt.NDArray[Any] = (bits.view(torch.uint16) if bits.dtype.itemsize == 2 else bits).numpy().copy()
    return array


def as_tensor(array: npt.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
    """The inverse of `as_array`; shares the array's memory."""
    bits = torch.from_numpy(array)
    return bits.view(dtype) if dtype.itemsize == 2 else bits


def check_arrays(
    arrays: Mapping[str, npt.NDArray[np.generic]], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Raise ValueError unless the arrays have exactly the wanted names, shapes and dtypes, and finite numbers."""
    found = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
    expected = {name: (shape, kind_of(dtype)) for name, (shape, dtype) in wanted.items()}
    if found != expected:
        raise ValueError(f"the arrays are {found}, not {expected}")
    for name, (_, dtype) in wanted.items():
        if not as_tensor(arrays[name], dtype).isfinite().all():
            raise ValueError(f"{name} has a number that is not finite")
