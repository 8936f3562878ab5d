"""Calls the compiled product."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_kernels.kernel_cache import NoKernelsError, load_kernels
from tree_kernels.matmul.packing import pack
from tree_kernels.matmul.shapes import CHUNK, MOST, PANELS, WIDEST, symbol
from tree_kernels.processor import panel

KINDS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As `loops.BF16`, `F16` and `F32`."""
THREADED = 1 << 18
"""A product of fewer weights runs in one thread: waking a second one takes longer."""
ARGUMENTS, SCRATCH, NEXT = 14, 8, 9
HELPER_BYTES, THREAD_WORD = 192, 17


@cache
def why_not_packed() -> str:
    """Why products of packed weights cannot be computed here; empty if they can."""
    try:
        _kernels()
    except NoKernelsError as error:
        return str(error)
    return ""


@cache
def _kernels() -> Any:
    return load_kernels(
        "tree_kernels.matmul.loops", ("tree_kernels.matmul.shapes", "tree_kernels.matmul.tiles", "tree_kernels.vectors")
    )


@cache
def tile_table(kind: str) -> Tensor:
    """[MOST, 3] for each number of rows: panels of the wide tile, its address, and the address of the tile of one panel."""
    addresses = _kernels().addresses
    rows = [(PANELS[r], *(addresses[symbol(kind, r, p)] for p in (PANELS[r], 1))) for r in range(1, MOST + 1)]
    return torch.tensor(rows)


class _Helpers:
    """Threads that share a product's work with the caller's; one caller at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory = np.zeros(0, np.int64)
        self.count = 0
        self._threads: list[threading.Thread] = []
        self._all = np.zeros(
            (64, HELPER_BYTES // 8), np.int64
        )  # semaphores start at zero posts, as sem_init makes them

    def at_least(self, count: int) -> int:
        """The address of the memory of `count` helpers, which are started if there are fewer."""
        while len(self._threads) < count:
            number = len(self._threads)
            self._all[number, THREAD_WORD] = number + 1
            address = self._all.ctypes.data + number * HELPER_BYTES
            thread = threading.Thread(
                target=_kernels().functions["serve"], args=(address,), name=f"product-{number + 1}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        return int(self._all.ctypes.data)


_helpers = _Helpers()


class PackedWeight:
    """A weight [outputs, inputs], of bfloat16, float16 or float32, packed for products with rows of its dtype.

    Raises NoKernelsError where kernels cannot be compiled.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, threads: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        """bias [outputs]   dtype: of inputs and results; the weight's, if None"""
        self.outputs, self.inputs = weight.shape
        self.kind = KINDS[weight.dtype]
        self._dtype = dtype or weight.dtype
        self._panels = pack(weight, panel())
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._threads = threads if weight.numel() >= THREADED else 1
        self._product = _kernels().functions["product"]
        entry = panel() * weight.dtype.itemsize
        table = tile_table(self.kind)
        self._call = [
            0,
            0,
            self.inputs,
            self._panels.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            0,
            self.outputs,
            NUMBERS[self._dtype],
            0,
            0,
            0,
            0,
            entry,
            table.data_ptr(),
        ]
        self._table = table

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]"""
        given = x if x.is_contiguous() else x.contiguous()
        rows = given.numel() // self.inputs
        made = torch.empty(*x.shape[:-1], self.outputs, dtype=self._dtype)
        if not rows:
            return made
        widened = given if given.dtype == torch.float32 else torch.empty(rows, self.inputs)
        wide = WIDEST if rows <= MOST else 1
        units = -(-len(self._panels) // wide)
        helpers = self._threads - 1
        taken = helpers and _helpers.lock.acquire(blocking=False)
        if not taken:
            helpers = 0
        try:
            scratch = torch.empty((helpers + 1) * CHUNK * WIDEST * panel())
            call = np.array(self._call, np.int64)
            call[0], call[1], call[5], call[8], call[10], call[11] = (
                widened.data_ptr(),
                rows,
                made.data_ptr(),
                scratch.data_ptr(),
                units,
                wide,
            )
            memory = _helpers.at_least(helpers) if helpers else 0
            self._product(call.ctypes.data, given.data_ptr(), NUMBERS[given.dtype], memory, helpers)
        finally:
            if taken:
                _helpers.lock.release()
        return made
