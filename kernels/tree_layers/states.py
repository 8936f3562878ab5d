"""The recurrent memory of a model: slots with the state and the last convolution inputs of every layer.

States stored outside the process are numpy arrays; two-byte floats are stored as uint16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tree_kernels.state_step import Slots

ZERO_SLOT = 0
"""The memory of the empty text. Never written or allocated."""


class PoolFull(RuntimeError):
    """Too few slots are free."""


class SlotPool:
    """Allocates slots; consecutive ones if possible, since they are cheaper to write."""

    def __init__(self, slots: int) -> None:
        self._free = bytearray(b"\1" * slots)
        self._free[ZERO_SLOT] = 0
        self.free = slots - 1

    def allocate(self, count: int) -> list[int]:
        """Slots with undefined contents. Raises PoolFull, allocating none, if fewer are free."""
        if count > self.free:
            raise PoolFull(f"{count} slots wanted, {self.free} free")
        start = self._free.find(b"\1" * count)
        if start >= 0:
            slots = list(range(start, start + count))
        else:
            slots = np.flatnonzero(np.frombuffer(bytes(self._free), np.uint8))[:count].tolist()
        for slot in slots:
            self._free[slot] = 0
        self.free -= count
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Release slots. Raises ValueError for a slot that is not allocated."""
        for slot in slots:
            if slot == ZERO_SLOT or self._free[slot]:
                raise ValueError(f"slot {slot} is not allocated")
            self._free[slot] = 1
            self.free += 1


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shapes of one layer's memory of a text."""

    recurrent: tuple[int, ...]  # Mamba-1 [I, N], Mamba-2 [H, P, N]; float32
    conv: tuple[int, int]  # [W - 1, channels], the last raw inputs, oldest first; in the activations' dtype

    def bytes_of(self, dtype: torch.dtype) -> int:
        """Bytes of one text's memory with activations of this dtype."""
        return 4 * math.prod(self.recurrent) + dtype.itemsize * math.prod(self.conv)


class States:
    """The slots of every layer: `recurrent[layer]` [slots, *shape] float32, `conv[layer]` [slots, W - 1, channels]."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        conv: Sequence[Tensor] = (),
        recurrent: Sequence[Tensor] = (),
    ) -> None:
        """conv, recurrent: existing tensors to use, one per layer; those of `conv` may be float32 for any `dtype`, and
        those of `recurrent` may have any strides."""
        self.shapes = tuple(shapes)
        self.dtype = dtype
        # Empty instead of zeroed: memory is then allocated only when it is first written.
        self.recurrent = list(recurrent) or [torch.empty((slots, *shape.recurrent), device=device) for shape in shapes]
        self.conv = list(conv) or [torch.empty((slots, *shape.conv), dtype=dtype, device=device) for shape in shapes]
        for memory in (*self.recurrent, *self.conv):
            memory[ZERO_SLOT].zero_()

    @property
    def layout(self) -> str:
        """Shapes and dtypes of a slot as one word; part of a saved state's name."""
        words = ["x".join(map(str, shape.recurrent)) + "+" + "x".join(map(str, shape.conv)) for shape in self.shapes]
        return f"recurrent-v1/{len(words)}/{','.join(sorted(set(words)))}/float32+{str(self.dtype).split('.')[-1]}"

    def copy(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        for memory in (*self.recurrent, *self.conv):
            memory[target] = memory[source]

    def save(self, slot: int) -> dict[str, npt.NDArray[np.generic]]:
        """A slot as plain arrays, `recurrent.N` and `conv.N`."""
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        for layer, (recurrent, conv) in enumerate(zip(self.recurrent, self.conv, strict=True)):
            arrays[f"recurrent.{layer}"] = recurrent[slot].cpu().numpy().copy()
            arrays[f"conv.{layer}"] = as_array(conv[slot].to(self.dtype))
        return arrays

    def check(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Raise ValueError unless the arrays have the names, shapes and dtypes of `save`, and finite numbers."""
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for layer, shape in enumerate(self.shapes):
            wanted[f"recurrent.{layer}"] = (shape.recurrent, torch.float32)
            wanted[f"conv.{layer}"] = (shape.conv, self.dtype)
        check_arrays(arrays, wanted)

    def load(self, slot: int, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Write the arrays of `save`, of the same shapes, into a slot."""
        for layer, (recurrent, conv) in enumerate(zip(self.recurrent, self.conv, strict=True)):
            recurrent[slot] = torch.from_numpy(arrays[f"recurrent.{layer}"])
            conv[slot] = as_tensor(arrays[f"conv.{layer}"], self.dtype)


def as_slots(slots: npt.NDArray[np.int64], device: torch.device) -> Slots:
    """Slots to write to: a slice if they are consecutive, otherwise an index [rows]."""
    first, count = int(slots[0]), len(slots)
    if (slots == np.arange(first, first + count)).all():
        return slice(first, first + count)
    return torch.from_numpy(slots).to(device)


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
