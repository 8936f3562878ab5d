"""Mamba-2's mixers on an accelerator, on fixed arrays: three launches a layer beside its products, four where folds
move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tree_kernels.tree_scan import TokenInputs

if TYPE_CHECKING:
    from tree_kernels.tree_scan.triton import ScanTable

Shape = tuple[int, ...]
"""The shape of a checkpoint, [H, P, N]."""
Convolution = tuple[Tensor, Tensor, Tensor, tuple[float, float]]
"""Weight [W, channels] and bias [channels] of a convolution, bias [H] and limits of dt."""


class FoldRooms:
    """Memory for the results of a step's folds that are not yet in a checkpoint's slot. Layers with states of one shape
    share it: each is done with it before the next one begins."""

    def __init__(self, shapes: Sequence[Shape], folds: int, device: torch.device) -> None:
        self.of = {shape: torch.zeros(folds, *shape, device=device) for shape in dict.fromkeys(shapes)}


@dataclass(frozen=True, slots=True, eq=False)
class TabledStep:
    """The rows of a step for mixers, as arrays on the device. All layers share it."""

    table: ScanTable
    scratch: int  # slot of the first row's inputs
    rooms: FoldRooms
    moves: bool  # some of the folds are in the room first

    def run(
        self,
        rows: tuple[Tensor, Tensor],
        memory: tuple[Tensor, TokenInputs, Tensor],
        convolution: Convolution,
        A: Tensor,
        D: Tensor,
    ) -> Tensor:
        """Run a mixer's convolution and recurrence. Returns y [rows, H P] float32, before gate and norm.

        rows: inputs of the convolution [rows, channels], and dt [rows, H] before softplus   memory: the layer's slots
        """
        from tree_kernels.tree_conv.triton import ConvWeights, KeptRows, conv_rows
        from tree_kernels.tree_scan.triton import fold_and_weigh, move, scan_rows

        (given, dt), (raw, inputs, states) = rows, memory
        table, room = self.table, self.rooms.of[tuple(states.shape[1:])]
        kept, by = KeptRows(raw, *inputs), ConvWeights(*convolution)
        C, y = conv_rows(given.to(raw.dtype), dt, kept, table.columns, table.last, self.scratch, by)
        weighed = fold_and_weigh(inputs, states, room, C, table, A)
        scan_rows(inputs, states, room, C, weighed, table, self.scratch, D, y)
        if self.moves:  # a row may have started from a slot's old checkpoint, so the scan comes before
            move(states, room, table)
        return y
