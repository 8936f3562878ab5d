"""The paths of a step's rows, and the checkpoints from which they start.

A row's state is a checkpoint of its text, advanced by the inputs in its `columns`, oldest first. A column that is 0 is
empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that start from one checkpoint."""

    source: int  # a slot of the states, or -1 - f: the result of the step's fold f; never 0, the zero state
    rows: Tensor  # [a multiple of ROW_MULTIPLE] int64; padding past `count`
    count: int


@dataclass(frozen=True, slots=True)
class BlockFold:
    """A checkpoint advanced by one block of tokens."""

    source: int  # slot of the states, numbered like `Group.source`; may be 0, the zero state
    columns: Tensor  # [block] int64 slots of the block's inputs, in order; none is 0
    target: int  # the slot of the states that stores it; -1: used in this step only


class Wave(NamedTuple):
    """The tokens at one distance from their checkpoints."""

    columns: Tensor  # [n] int64 slots of the tokens
    parents: Tensor  # [n] int64 index of each token's parent in the wave before, or among the sources
    rows: Tensor  # [m] int64 the step's rows whose paths end in this wave
    ends: Tensor  # [m] int64 index in this wave of each such row's last token


class Waves(NamedTuple):
    """The paths of a step as a forest: checkpoints, and the waves of tokens after them."""

    sources: tuple[int, ...]  # slots of the checkpoints, numbered like `Group.source`; the first is 0, the zero state
    waves: tuple[Wave, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The paths of a step's rows. All layers share them.

    columns [rows, K] int64   slots of each row's inputs since its checkpoint, in order of position, its own included;
    0: none
    """

    columns: Tensor
    groups: Sequence[Group]
    folds: Sequence[BlockFold]
    _gathers: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _slots: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _waves: list[Waves] = field(default_factory=list)

    def waves(self) -> Waves:
        """The paths as a forest that contains each token once."""
        if not self._waves:
            self._waves.append(_forest(self.columns, self.groups))
        return self._waves[0]

    def slots(self) -> Tensor:
        """The unique slots of all columns: far fewer than the columns, since the rows of a tree share most of them."""
        return self._shared()[0]

    def gather(self, parts: int, times: int = 1) -> Tensor:
        """[rows * parts * times, K] indices into `slots()` viewed as [slots * parts, ...]: every row's columns, part by
        part, each repeated `times` times; the newest first."""
        key = (parts, times)
        if key not in self._gathers:
            places = self._shared()[1].flip(1)[:, None, :] * parts
            index = places + torch.arange(parts, device=places.device).repeat_interleave(times)[:, None]
            self._gathers[key] = index.flatten(0, 1)
        return self._gathers[key]

    def _shared(self) -> tuple[Tensor, Tensor]:
        if not self._slots:
            self._slots.append(torch.unique(self.columns, return_inverse=True))
        return self._slots[0]


def _forest(columns: Tensor, groups: Sequence[Group]) -> Waves:
    slots = columns.cpu().numpy()
    rows, width = slots.shape
    sources = (0, *(group.source for group in groups))
    begins = np.zeros(rows, np.int64)  # [rows] index of each row's checkpoint in the sources
    for place, group in enumerate(groups, 1):
        begins[group.rows[: group.count].cpu().numpy()] = place
    paths = np.take_along_axis(slots, np.argsort(slots == 0, axis=1, kind="stable"), 1)
    lengths = (slots != 0).sum(1)
    most = int(slots.max()) + 1
    waves, nodes = [], begins  # nodes: for each row, the index of its token in the wave before
    for distance in range(int(lengths.max(initial=0))):
        active = np.flatnonzero(lengths > distance)
        # A slot may be reached from two checkpoints of its text.
        found, first, places = np.unique(
            begins[active] * most + paths[active, distance], return_index=True, return_inverse=True
        )
        parents = nodes[active][first]
        nodes = nodes.copy()
        nodes[active] = places
        ending = np.flatnonzero(lengths == distance + 1)
        parts = (found % most, parents, ending, nodes[ending])
        waves.append(Wave(*(torch.from_numpy(part).to(columns.device) for part in parts)))
    return Waves(sources, tuple(waves))
