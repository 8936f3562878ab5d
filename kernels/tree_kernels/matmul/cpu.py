"""Calls the compiled product of rows and a packed weight."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.kernel_cache import load_kernels, why_missing
from tree_kernels.matmul.packing import pack
from tree_kernels.matmul.shapes import (
    CHUNK,
    MATRIX_CHUNK,
    MATRIX_INPUTS,
    MATRIX_PANELS,
    MATRIX_PART_BYTES,
    PANELS,
    PART_BYTES,
    SCRATCH,
    WIDEST,
    Argument,
    Helper,
    Precision,
    matrix_symbol,
    symbol,
)
from tree_kernels.processor import has_dots, has_matrix_tiles, panel

MODULE = "tree_kernels.matmul.loops"
PRECISIONS = {torch.bfloat16: Precision.BF16, torch.float16: Precision.F16, torch.float32: Precision.F32}
X_BYTES = {Precision.F32: 4, Precision.PAIRS: 2}
THREADED = 1 << 18
"""A product of fewer weights runs in one thread: waking a second one takes longer."""
MOST_HELPERS = 63


def why_not_packed() -> str:
    """Reason why products with packed weights cannot be computed here; empty if they can."""
    return why_missing(MODULE)


def _kernels() -> Any:
    return load_kernels(MODULE)


@cache
def tile_table(kind: Precision) -> Tensor:
    """Table of tiles [most rows, 3] for `Argument.TILES`. PAIRS: tiles of dot products. Raises NoKernelsError."""
    weights = Precision.BF16 if kind == Precision.PAIRS else kind
    address = load_kernels(f"tree_kernels.matmul.{weights.name.lower()}").addresses
    return torch.tensor(
        [
            (panels, address[symbol(kind, rows, panels)], address[symbol(kind, rows, 1)])
            for rows, panels in enumerate(PANELS[kind])
            if rows
        ]
    )


@cache
def matrix_table() -> Tensor:
    """Table of the tiles that multiply bfloat16 weights by matrix tiles (AMX), in `tile_table`'s form. Raises
    NoKernelsError."""
    address = load_kernels("tree_kernels.matmul.bf16").addresses
    return torch.tensor(
        [
            (panels, address[matrix_symbol(rows, panels)], address[matrix_symbol(rows, 1)])
            for rows, panels in enumerate(MATRIX_PANELS)
            if rows
        ]
    )


def in_matrix_tiles(weight: Tensor) -> bool:
    """True if rows of bfloat16 times this weight [outputs, inputs] are multiplied by matrix tiles, which add inputs in
    an order of their own."""
    return weight.dtype == torch.bfloat16 and not weight.shape[1] % MATRIX_INPUTS and has_matrix_tiles()


DOT_ROWS, DOT_WEIGHT, DOT_TRIALS = 16, (512, 1022), 5
"""Rows of the products that are compared, outputs and inputs of their weight, and how often each is timed. Matrix tiles
take no weight of 1022 inputs, which is no multiple of MATRIX_INPUTS."""
DOT_SHARE = 0.9
"""Dot products must take at most this share of the time."""


@cache
def dots_pay() -> bool:
    """True if this processor's dot products have the bits of fused multiply-adds, and take less time. Processors differ
    in what a dot product computes, and on some it takes twice as long as a multiply-add."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(DOT_ROWS)[:, None] * 2 - 140  # rows whose numbers, or whose sums, are not normal
    rows = torch.randn(DOT_ROWS, DOT_WEIGHT[1], generator=generator)
    rows = torch.cat([rows, torch.ldexp(rows, exponents)]).bfloat16()
    weight = PackedWeight(torch.randn(DOT_WEIGHT, generator=generator).bfloat16(), dtype=torch.float32)
    kinds = Precision.PAIRS, Precision.F32
    if not torch.equal(*(weight.product(rows, kind) for kind in kinds)):
        return False
    took_s: dict[Precision, list[float]] = {kind: [] for kind in kinds}
    for _ in range(DOT_TRIALS):
        for kind in kinds:
            began = time.perf_counter()
            weight.product(rows[:DOT_ROWS], kind)
            took_s[kind].append(time.perf_counter() - began)
    return min(took_s[Precision.PAIRS]) <= DOT_SHARE * min(took_s[Precision.F32])


class Helpers:
    """Threads that share a kernel's work with the caller's. One caller at a time holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._started = 0
        self._memory = np.zeros((MOST_HELPERS, Helper.SIZE), np.int64)  # zeros: semaphores that nobody has posted
        self._address = int(self._memory.ctypes.data)

    def share(self, threads: int, call: Callable[[int, int], None]) -> None:
        """Call with the address of the helpers' memory and the number of helpers that may work, up to `threads` - 1;
        with none while another caller has them, since no result depends on their number."""
        if threads == 1 or not self.lock.acquire(blocking=False):
            call(self._address, 0)
            return
        try:
            call(self._address, self._at_most(min(threads - 1, MOST_HELPERS)))
        finally:
            self.lock.release()

    def _at_most(self, count: int) -> int:
        """The number of helpers, at most `count`, after missing ones are started; fewer where no thread can start."""
        while self._started < count:
            memory = self._memory[self._started]
            memory[Helper.THREAD] = self._started + 1
            serve, name = _kernels().functions["serve"], f"kernels-{self._started + 1}"
            try:
                threading.Thread(target=serve, args=(memory.ctypes.data,), name=name, daemon=True).start()
            except RuntimeError:  # the system has no more threads, or the interpreter ends
                return self._started
            self._started += 1
        return count


_helpers = Helpers()


def helpers() -> Helpers:
    """The helper threads of this process."""
    return _helpers


def _in_child() -> None:
    """Begin without helpers in a forked process, which has none of its parent's threads."""
    global _helpers
    _helpers = Helpers()


os.register_at_fork(after_in_child=_in_child)


class _Memory(threading.local):
    """A thread's scratch memory, which it uses again for each product."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def scratch(self, threads: int) -> int:
        """Address of scratch memory for this many threads."""
        if len(self._held) < threads * SCRATCH:
            self._held = torch.empty(threads * SCRATCH)
        return self._held.data_ptr()


_memory = _Memory()


@dataclass(slots=True)
class RowLimit:
    """The most rows of a product that reads a quantised weight's blocks. Weights of a model share one, which may change
    until the model is loaded."""

    rows: int


class PackedWeight:
    """A weight [outputs, inputs] of bfloat16, float16 or float32, packed, and a bias [outputs]: x -> x weight^T + bias.

    Sums are float32 and rounded once. Raises NoKernelsError where kernels cannot be compiled.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, threads: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        """dtype: the results' dtype; None: the weight's"""
        kind = PRECISIONS[weight.dtype]
        pairs: Tensor | None = None
        if in_matrix_tiles(weight):
            pairs = matrix_table()
        elif kind == Precision.BF16 and not weight.shape[1] % 2 and has_dots():
            pairs = tile_table(Precision.PAIRS)
        self._prepare(
            weight.shape[0],
            weight.shape[1],
            pack(weight, panel()),
            panel() * weight.dtype.itemsize,
            tile_table(kind),
            bias,
            threads,
            dtype or weight.dtype,
            pairs,
            in_matrix_tiles(weight),
        )

    def _prepare(
        self,
        outputs: int,
        inputs: int,
        panels: Tensor,
        entry_bytes: int,
        tiles: Tensor,
        bias: Tensor | None,
        threads: int,
        dtype: torch.dtype,
        pairs: Tensor | None = None,
        matrix: bool = False,
    ) -> None:
        """panels: the packed weight, a panel for each entry of the first dimension   entry_bytes: bytes of one input in
        a panel   dtype: the results' dtype   pairs: table of tiles that read rows as PAIRS; None: the weight has none
        matrix: True if `pairs` has matrix tiles"""
        self.outputs, self.inputs, self.dtype = outputs, inputs, dtype
        self._threads = threads if outputs * inputs >= THREADED else 1
        self._panels, self._tiles, self._pairs, self._matrix = panels, tiles, pairs, matrix
        self._bias = None if bias is None else bias.detach().float().contiguous()
        kernels = _kernels()
        self._product, self.kernel = kernels.functions["product"], kernels.address("units")
        call = self._call = np.zeros(len(Argument), np.int64)  # numbers that all calls have in common
        call[Argument.INPUTS], call[Argument.OUTPUTS] = inputs, outputs
        call[Argument.WEIGHTS] = panels.data_ptr()
        call[Argument.ENTRY_BYTES] = entry_bytes
        call[Argument.TARGET_KIND] = PRECISIONS[dtype]
        if self._bias is not None:
            call[Argument.BIAS] = self._bias.data_ptr()

    @property
    def limit(self) -> RowLimit | None:
        """Number of rows up to which `call` reads the weight's blocks; None: the weight has none."""
        return None

    def x_kind(self, rows: int) -> Precision:
        """Type as which `rows` rows of bfloat16 numbers are read: PAIRS or F32. With dot products both give the same
        bits, and the one that takes less time is used."""
        if self._matrix:
            return Precision.PAIRS
        return Precision.PAIRS if self._pairs is not None and dots_pay() else Precision.F32

    def call(
        self, x: int, rows: int, target: int, scratch: int, kind: Precision, residual: int = 0
    ) -> npt.NDArray[np.int64]:
        """The arguments of `kernel`, which computes units until none is left, by `Argument`. Arrays are addresses.

        x  [rows, inputs] of this kind, F32 or `x_kind(rows)`   target, residual  [rows, outputs] of `dtype`
        scratch  [threads, SCRATCH] float32
        """
        tiles = self._tiles
        if kind == Precision.PAIRS:
            assert self._pairs is not None
            tiles = self._pairs
        matrix = self._matrix and kind == Precision.PAIRS
        panels = WIDEST if matrix or rows <= len(tiles) else 1
        call = self._call.copy()
        call[Argument.X], call[Argument.ROWS], call[Argument.TARGET] = x, rows, target
        call[Argument.UNITS], call[Argument.UNIT_PANELS] = -(-len(self._panels) // panels), panels
        call[Argument.SCRATCH], call[Argument.RESIDUAL] = scratch, residual
        call[Argument.TILES], call[Argument.TILE_ROWS] = tiles.data_ptr(), len(tiles)
        call[Argument.X_BYTES] = X_BYTES[kind]
        call[Argument.CHUNK_ROWS] = MATRIX_CHUNK if matrix else CHUNK
        call[Argument.PART] = MATRIX_PART_BYTES if matrix else PART_BYTES
        return call

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., inputs] of bfloat16, float16 or float32 -> [..., outputs]. Raises ValueError for other rows."""
        if x.shape[-1] != self.inputs or x.dtype not in PRECISIONS:
            raise ValueError(f"rows {list(x.shape)} of {x.dtype} do not fit {self.inputs} inputs")
        rows = x.numel() // self.inputs
        return self.product(x, self.x_kind(rows) if x.dtype == torch.bfloat16 else Precision.F32)

    def product(self, x: Tensor, kind: Precision) -> Tensor:
        """Multiply x [..., inputs], read as `kind`. PAIRS needs a bfloat16 `x` and a weight with tiles for PAIRS."""
        made = torch.empty(*x.shape[:-1], self.outputs, dtype=self.dtype)
        rows = made.numel() // self.outputs
        if not rows:
            return made
        given = x.contiguous()
        dtype = torch.bfloat16 if kind == Precision.PAIRS else torch.float32
        read = given if given.dtype == torch.float32 else torch.empty(rows, self.inputs, dtype=dtype)

        def multiply(memory: int, count: int) -> None:
            call = self.call(read.data_ptr(), rows, made.data_ptr(), _memory.scratch(count + 1), kind)
            self._product(call.ctypes.data, given.data_ptr(), PRECISIONS[given.dtype], self.kernel, memory, count)

        _helpers.share(self._threads, multiply)
        return made
