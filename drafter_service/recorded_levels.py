"""Levels of a Mamba drafter on an accelerator, and folds of accepted nodes, recorded as graphs: one upload and one
replay instead of hundreds of launches for a level, or for the folds of a step.

A level is padded to one of few sizes, and each size is recorded when it first occurs. Padded rows write to a node slot
that no tree has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from dendro.tree import IntArray
from torch import Tensor
from tree_layers.graphs import Graphs, Recordings
from tree_layers.step_buffers import StepBuffers

from drafter_service.plan import Level, TextFold

log = logging.getLogger("dendro.drafter")

FEWEST_NODES = 8
"""Least number of nodes to which a tree's are padded: each smaller number would need a recording of its own."""


@dataclass(frozen=True, slots=True)
class LevelSize:
    """The sizes to which a level is padded. Levels of equal sizes share a recording."""

    trees: int
    new: int  # new nodes of each tree
    nodes: int  # nodes of each tree, new nodes included; 0 where a level reads its parents alone

    @property
    def rows(self) -> int:
        return self.trees * self.new

    @classmethod
    def of(cls, rows: Level) -> LevelSize:
        """The size of a level that reads all nodes of its trees."""
        new = at_least(max(rows.counts))
        before = max(len(nodes.slots) - count for nodes, count in zip(rows.trees, rows.counts, strict=True))
        return cls(at_least(len(rows.counts)), new, max(at_least(before + new), FEWEST_NODES))

    @classmethod
    def of_rows(cls, rows: Level) -> LevelSize:
        """The size of a level whose rows do not depend on their trees."""
        return cls(1, at_least(rows.count), 0)


@dataclass(frozen=True, slots=True)
class PaddedLevel:
    """A level's arrays, which are uploaded, and the places of its rows among the padded ones."""

    whole: Mapping[str, IntArray]  # arrays of integers, by name
    real: Mapping[str, npt.NDArray[np.float32]]  # arrays of float32, by name
    places: IntArray  # [rows]


@runtime_checkable
class RecordableMemory(Protocol):
    """A memory whose levels can be recorded: they are operations of fixed shapes on arrays of fixed addresses."""

    def size_of(self, rows: Level) -> LevelSize:
        """The size to which a level is padded."""
        ...

    def padded(self, rows: Level, size: LevelSize, scratch: int) -> PaddedLevel:
        """Called once for each level. The arrays have the same shapes for all levels of a size.

        scratch: node slot that padded rows write
        """
        ...

    def fold_numbers(self, folds: Sequence[TextFold], longest: int) -> Mapping[str, list[Any]]:
        """Called once for each step with folds. Returns lists of whole numbers, one entry for each fold, whose shapes
        depend on `longest` alone. Zeros are a fold that changes nothing. longest: nodes to which each fold's path is
        padded"""
        ...

    def run_folds(self, given: Mapping[str, Tensor]) -> Tensor:
        """Fold paths of nodes into their texts, from uploaded arrays, without waiting for the device. Returns the text
        slots that were written. The arrays may have the same fold several times, as padding."""
        ...

    def run(self, given: Mapping[str, Tensor], size: LevelSize) -> Tensor:
        """Run a level from its uploaded arrays, without waiting for the device. Returns hidden rows [size.rows, d]; a
        second run with the same arrays writes the same."""
        ...


class RecordedLevels:
    """The recorded levels of one memory."""

    def __init__(self, memory: RecordableMemory, scratch: int, device: torch.device, graphs: Graphs) -> None:
        """scratch: a node slot of the memory that no tree has"""
        self._memory = memory
        self._scratch = scratch
        self._device = device
        self._buffers: dict[LevelSize, tuple[StepBuffers, StepBuffers]] = {}
        self.recordings = Recordings[LevelSize, Tensor](graphs, "drafter: levels", log)

    def level(self, rows: Level) -> Tensor:
        """Run a level of new nodes. Returns hidden rows [rows, d]; writes the nodes' slots."""
        size = self._memory.size_of(rows)
        padded = self._memory.padded(rows, size, self._scratch)
        given = self._uploaded(size, padded)
        hidden = self.recordings.run(size, lambda: self._memory.run(given, size))
        return hidden.index_select(0, given["places"][: rows.count])

    def _uploaded(self, size: LevelSize, padded: PaddedLevel) -> dict[str, Tensor]:
        places = np.zeros(size.rows, np.int64)
        places[: len(padded.places)] = padded.places
        kinds = ({**padded.whole, "places": places}, torch.int64), (padded.real, torch.float32)
        if size not in self._buffers:
            whole, real = (
                StepBuffers({name: array.shape for name, array in arrays.items()}, dtype, self._device)
                for arrays, dtype in kinds
            )
            self._buffers[size] = whole, real
        for buffers, (arrays, _) in zip(self._buffers[size], kinds, strict=True):
            buffers.clear()
            for name, array in arrays.items():
                buffers.host[name][:] = array
            buffers.upload()
        return self._buffers[size][0].device | self._buffers[size][1].device


@dataclass(frozen=True, slots=True)
class FoldSize:
    """The sizes to which the folds of a step are padded. Folds of equal sizes share a recording."""

    rows: int  # number of folds
    longest: int  # nodes of each fold's path

    @classmethod
    def of(cls, folds: Sequence[TextFold]) -> FoldSize:
        longest = max([len(fold.path) for fold in folds])
        return cls(at_least(len(folds)), max(at_least(longest), FEWEST_NODES))


class RecordedFolds:
    """The recorded folds of one memory."""

    def __init__(self, memory: RecordableMemory, device: torch.device, graphs: Graphs) -> None:
        self._memory = memory
        self._device = device
        self._buffers: dict[FoldSize, StepBuffers] = {}
        self.recordings = Recordings[FoldSize, Tensor](graphs, "drafter: folds", log)

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Fold accepted nodes into the memories of their texts."""
        size = FoldSize.of(folds)
        padded = [*folds, *[folds[0]] * (size.rows - len(folds))]
        numbers = self._memory.fold_numbers(padded, size.longest)
        buffers = self._buffers.get(size)
        if buffers is None:
            shapes = {name: np.shape(each) for name, each in numbers.items()}
            buffers = self._buffers[size] = StepBuffers(shapes, torch.int64, self._device)
            self._run(size, buffers)  # recording runs the folds twice, so the buffers still have zeros: no change
        buffers.clear()
        for name, each in numbers.items():
            buffers.host[name][:] = each
        buffers.upload()
        self._run(size, buffers)

    def _run(self, size: FoldSize, buffers: StepBuffers) -> None:
        self.recordings.run(size, lambda: self._memory.run_folds(buffers.device))


def at_least(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
