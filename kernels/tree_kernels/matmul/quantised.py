"""Products with weights that stay quantised, bit for bit those with the unpacked weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.kernel_cache import load_kernels
from tree_kernels.matmul.cpu import PackedWeight, RowLimit, matrix_table
from tree_kernels.matmul.packing import in_large_pages
from tree_kernels.matmul.quantised_shapes import (
    DOT_PANELS,
    FORMS,
    QuantisedForm,
    dot_symbol,
    quantised_matrix_symbol,
    tile_panels,
    tile_symbol,
    unpack_symbol,
)
from tree_kernels.matmul.shapes import MATRIX_INPUTS, MATRIX_PANELS, UNPACKED_CHUNK, Argument, Precision
from tree_kernels.processor import has_dots, has_matrix_tiles, panel


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedBlocks:
    """A quantised weight [outputs, inputs] as `BlockForm` describes it."""

    form: QuantisedForm
    fields: Tensor  # [outputs, inputs] uint8
    scales: Tensor  # [outputs, inputs / block] float16 or float32
    offsets: Tensor | None  # shaped like the scales; None if the form has no offsets

    def of_rows(self, rows: Tensor) -> QuantisedBlocks:
        """Blocks of these outputs only."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return QuantisedBlocks(self.form, self.fields[rows], self.scales[rows], offsets)

    def unpacked(self) -> Tensor:
        """[outputs, inputs] float32."""
        form = FORMS[self.form]
        made = self.fields.view(len(self.fields), -1, form.block).float()
        if form.zero:
            made -= form.zero
        made *= self.scales[..., None].float()
        if self.offsets is not None:
            made += self.offsets[..., None].float()
        return made.flatten(1)

    def fits(self, rounded: Tensor | None = None) -> bool:
        """Whether the kernels compute `unpacked`: what they compute in place of its products and sums must be exact.

        rounded: `unpacked` in bfloat16, with further rows or in another order, where it is known
        """
        form = FORMS[self.form]
        scales = self.scales.double()
        offsets = self.offsets.double() if self.offsets is not None else -scales * form.zero
        made = [offsets] if self.offsets is None else [offsets, scales * ((1 << form.bits) - 1)]
        if not form.wide:
            made += [offsets - place.base * scales for place in form.places]
        if not all(torch.equal(each.float().double(), each) and each.isfinite().all() for each in made):
            return False
        rounded = self.unpacked().bfloat16() if rounded is None else rounded
        return not bool(((rounded != 0) & (rounded.abs() <= torch.finfo(torch.bfloat16).tiny)).any())


@cache
def _tile_tables(form: QuantisedForm) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tables of tiles (`cpu.tile_table`), of tiles of dot products, and of tiles with matrix tiles; None in place of
    those that this processor does not have. Raises NoKernelsError."""
    address = load_kernels(f"tree_kernels.matmul.{form.name.lower()}").addresses

    def table(panels: Sequence[int], symbol: Callable[[QuantisedForm, int, int], str]) -> Tensor:
        every = range(1, len(panels))
        return torch.tensor(
            [(panels[n], address[symbol(form, n, panels[n])], address[symbol(form, n, 1)]) for n in every]
        )

    return (
        table(tile_panels(), tile_symbol),
        table(DOT_PANELS, dot_symbol) if has_dots() else None,
        table(MATRIX_PANELS, quantised_matrix_symbol) if has_matrix_tiles() else None,
    )


def _unpacking(form: QuantisedForm) -> int:
    """Address of what unpacks inputs of a panel for matrix tiles. Raises NoKernelsError."""
    return load_kernels(f"tree_kernels.matmul.{form.name.lower()}").addresses[unpack_symbol(form)]


def pack_blocks(blocks: QuantisedBlocks, panel: int, pairs: bool) -> Tensor:
    """[panels, blocks, bytes] uint8: of each block the outputs' scales and offsets, then the words with their fields.
    The last panel is padded with zeros.

    pairs: words of every second input, the odd ones first, and factors in the order in which `FIRST` and `SECOND` of
    `quantised_tiles` take them; else words of neighbouring inputs
    """
    form = FORMS[blocks.form]
    outputs, inputs = blocks.fields.shape
    count, length = -(-outputs // panel), inputs // form.block
    made = in_large_pages((count, length, form.block_bytes(panel)), torch.uint8)
    at, place = 0, torch.arange(panel)
    if pairs:  # the first 2 of each 4 neighbouring factors belong to the first half of a vector's outputs
        place = place.view(-1, 2, 4, 2).transpose(1, 2).flatten()
    for given in (blocks.scales, blocks.offsets):
        if given is None:
            continue
        padded = given.new_zeros(count * panel, length)
        padded[:outputs] = given
        laid = padded.view(count, panel, length).transpose(1, 2)[..., place].contiguous().view(torch.uint8)
        made[..., at : at + laid.shape[-1]] = laid
        at += laid.shape[-1]
    fields = blocks.fields.new_zeros(count * panel, inputs)
    fields[:outputs] = blocks.fields
    if pairs:
        fields = fields.view(count * panel, -1, form.fields, 2).flip(3).transpose(2, 3).flatten(1)
    if form.bits == 4:
        fields = fields[:, ::2] | (fields[:, 1::2] << 4)
    words = fields.view(count, panel, length, -1, 8 if pairs else 4).permute(0, 2, 3, 1, 4)
    made[..., at:] = words.reshape(count, length, -1)
    return made


class QuantisedWeight(PackedWeight):
    """A quantised weight whose products have the bits of a PackedWeight of the unpacked weight in bfloat16."""

    def __init__(
        self, blocks: QuantisedBlocks, bias: Tensor | None = None, threads: int = 1, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """blocks: that fit   dtype: of the results"""
        self.form = blocks.form
        outputs, inputs = blocks.fields.shape
        tiles, dots, matrix = _tile_tables(blocks.form)
        matrix = None if inputs % MATRIX_INPUTS else matrix
        self._prepare(
            outputs,
            inputs,
            pack_blocks(blocks, panel(), has_dots()),
            FORMS[blocks.form].entry_bytes(panel()),
            tiles,
            bias,
            threads,
            dtype,
            dots if matrix is None else matrix,
            matrix is not None,
        )
        self._unpack = 0 if matrix is None else _unpacking(blocks.form)

    def call(
        self, x: int, rows: int, target: int, scratch: int, kind: Precision, residual: int = 0
    ) -> npt.NDArray[np.int64]:
        call = super().call(x, rows, target, scratch, kind, residual)
        if self._unpack and kind == Precision.PAIRS:
            call[Argument.UNPACK], call[Argument.UNPACKED_TILES] = self._unpack, matrix_table().data_ptr()
            call[Argument.CHUNK_ROWS] = UNPACKED_CHUNK
        return call


ANY_ROWS = 1 << 31
"""A limit that no product's rows exceed."""


class FewRowsWeight(PackedWeight):
    """A PackedWeight whose products of few rows use the quantised weight, which has fewer bytes."""

    def __init__(
        self,
        weight: Tensor,
        blocks: QuantisedBlocks,
        limit: RowLimit,
        bias: Tensor | None = None,
        threads: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weight: what the blocks unpack to   limit: products of more rows use the unpacked weight"""
        super().__init__(weight, bias, threads, dtype)
        self._limit = limit
        self._few: QuantisedWeight | None = QuantisedWeight(blocks, bias, threads, self.dtype)

    @property
    def limit(self) -> RowLimit:
        return self._limit

    def free_unused(self) -> None:
        """Free the form that products do not use. The limit, 0 or ANY_ROWS, must not change any more."""
        if not self._limit.rows:
            self._few = None
        else:
            self._panels = self._panels[:0].clone()

    def _used(self, rows: int) -> QuantisedWeight | None:
        """The quantised weight, if a product of so many rows uses it."""
        return self._few if rows <= self._limit.rows else None

    def x_kind(self, rows: int) -> Precision:
        few = self._used(rows)
        return super().x_kind(rows) if few is None else few.x_kind(rows)

    def call(
        self, x: int, rows: int, target: int, scratch: int, kind: Precision, residual: int = 0
    ) -> npt.NDArray[np.int64]:
        few = self._used(rows)
        if few is not None:
            return few.call(x, rows, target, scratch, kind, residual)
        return super().call(x, rows, target, scratch, kind, residual)
