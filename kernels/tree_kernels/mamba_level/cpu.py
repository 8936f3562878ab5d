"""Calls the compiled forwards of Mamba-1 and Mamba-2 drafters. A call holds no interpreter lock."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels.kernel_cache import load_kernels, why_missing
from tree_kernels.mamba_level import shapes
from tree_kernels.mamba_level.team_shapes import ENTERED, TEAM_WORDS
from tree_kernels.matmul.cpu import PRECISIONS, dots_pay, helpers, tile_table
from tree_kernels.matmul.packing import pack
from tree_kernels.matmul.shapes import Precision
from tree_kernels.processor import has_dots, panel

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

MODULES = {"mamba": "tree_kernels.mamba_level.mamba1", "mamba2": "tree_kernels.mamba_level.mamba2"}
SCANS = "tree_kernels.mamba_level.tiles"
"""The module of the tiles that Mamba-2's kernels call."""

Ints = npt.NDArray[np.int64]
FEW_ROWS = 64
"""Scratch memory for more rows than these is freed by the next call with fewer."""
LINE = 64
"""Bytes of a cache line."""


def why_not_compiled(kind: str) -> str:
    """Reason why the kernels of this kind cannot be compiled here; empty if they can."""
    # Most weights fit the tiles of bfloat16; those of other weights are compiled when a model has them.
    scans = [SCANS] if kind == "mamba2" else []
    return why_missing("tree_kernels.matmul.bf16", MODULES[kind], *scans)


@cache
def kernels(kind: str) -> Kernels:
    """The kernels of Mamba-1, "mamba", or Mamba-2, "mamba2". Raises NoKernelsError."""
    return load_kernels(MODULES[kind])


@cache
def scan_table() -> Ints:
    """Addresses of the tiles of Mamba-2's recurrence, for `shapes.SCANS`. Raises NoKernelsError."""
    addresses = load_kernels(SCANS).addresses
    return np.array([addresses[shapes.scan_symbol(tokens)] for tokens in range(1, shapes.SCAN_TOKENS + 1)], np.int64)


class Table:
    """Rows of words for kernels, and the tensors whose addresses they hold, which it keeps alive."""

    def __init__(self, rows: int, words: int) -> None:
        self.words = np.zeros((rows, words), np.int64)
        self._kept: list[object] = []

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def put(self, row: int, word: int, tensor: Tensor) -> None:
        """Write the address of a contiguous tensor into a word."""
        assert tensor.is_contiguous(), tuple(tensor.shape)
        self._kept.append(tensor)
        self.words[row, word] = tensor.data_ptr()

    def put_product(self, row: int, word: int, product: Product) -> None:
        self._kept.append(product)
        self.words[row, word] = product.words.ctypes.data


class Product:
    """A weight [inputs, outputs], packed for few rows, with its bias [outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = pack(narrowest(weight).t(), panel())
        self.step = 4 * panel() * len(self._packed)
        """Bytes of a row of results, in whole panels of float32."""
        self._bias = None if bias is None else F.pad(bias.detach().float(), (0, self.step // 4 - len(bias)))
        table = tile_table(PRECISIONS[self._packed.dtype])
        self.words = np.zeros(shapes.PRODUCT_WORDS, np.int64)
        self.words[shapes.WEIGHTS] = self._packed.data_ptr()
        self.words[shapes.ENTRY] = panel() * self._packed.element_size()
        self.words[shapes.TILES] = table.data_ptr()  # kept for ever by the cache of `tile_table`
        self.words[shapes.TILE_ROWS] = len(table)
        self.words[shapes.PANELS] = len(self._packed)
        self.words[shapes.BIAS] = 0 if self._bias is None else self._bias.data_ptr()
        if self._packed.dtype == torch.bfloat16 and not len(weight) % 2 and has_dots() and dots_pay():
            dots = tile_table(Precision.PAIRS)
            self.words[shapes.DOTS], self.words[shapes.DOT_ROWS] = dots.data_ptr(), len(dots)


def narrowest(weight: Tensor) -> Tensor:
    """A weight in bfloat16 if that holds its numbers exactly: it is then read in half the time."""
    if weight.dtype != torch.float32:
        return weight
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else weight


class Team:
    """Threads that share the large products of a model's calls. While another call of the process has the helpers, a
    call runs in one thread, with the same results."""

    def __init__(self, kernels: Kernels, threads: int) -> None:
        """kernels: those of the model's kind"""
        self._threads = threads
        memory = np.zeros(TEAM_WORDS + LINE // 8, np.int64)
        self._address = -(-int(memory.ctypes.data) // LINE) * LINE
        self._memory = memory[(self._address - int(memory.ctypes.data)) // 8 :]
        self._lead, self._joining = kernels.functions["lead"], kernels.address("join")

    @property
    def joined(self) -> int:
        """Times that helpers have joined a product of the last call."""
        return int(self._memory[ENTERED])

    def run(self, kernel: int, words: int, model: Ints) -> None:
        """Call a kernel. kernel, words: address of the kernel and of its words   model: the model's words"""

        def lead(memory: int, count: int) -> None:
            model[shapes.TEAM] = self._address if count else 0
            self._lead(kernel, words, self._address, self._joining, memory, count)

        helpers().share(self._threads, lead)


class Scratch:
    """Memory for the intermediate results of a call; the next call uses it again. Used by one thread."""

    def __init__(self) -> None:
        self._held, self._rows = torch.empty(0), 0
        self._found: dict[tuple[int, ...], list[int]] = {}  # addresses in `_held` by sizes

    def parts(self, sizes: tuple[int, ...], rows: int) -> list[int]:
        """Addresses of parts with these numbers of bytes, valid until the next call of `parts`. rows: of the forward"""
        if sizes not in self._found:
            starts = [0, *accumulate(-(-size // LINE) * LINE for size in sizes)]
            wanted = starts.pop() // 4 + LINE
            if len(self._held) < wanted or (self._rows > FEW_ROWS and rows <= FEW_ROWS):
                self._held, self._rows, self._found = torch.empty(wanted), rows, {}
            first = -(-self._held.data_ptr() // LINE) * LINE
            self._found[sizes] = [first + start for start in starts]
        return self._found[sizes]


def kind_number(dtype: torch.dtype) -> int:
    """The number by which the kernels name a dtype."""
    return int(PRECISIONS[dtype])
