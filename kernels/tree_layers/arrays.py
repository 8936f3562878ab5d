"""Tensors as numpy arrays, for states that are kept outside the process: numbers of two bytes travel as their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def kind_of(dtype: torch.dtype) -> str:
    """The numpy dtype of `as_array` of a tensor of this dtype: float32, or uint16 for bfloat16 and float16."""
    return "uint16" if dtype.itemsize == 2 else str(dtype).removeprefix("torch.")


def as_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """A copy of a tensor as an array."""
    bits = tensor.cpu()
    array: npt.NDArray[Any] = (bits.view(torch.uint16) if bits.dtype.itemsize == 2 else bits).numpy().copy()
    return array


def as_tensor(array: npt.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
    """The tensor of this dtype that `as_array` made the array of; shares its memory."""
    bits = torch.from_numpy(array)
    return bits.view(dtype) if dtype.itemsize == 2 else bits
