"""Assigns slots in the memory of a state-space target to texts, and a step's rows to these slots. Plain numbers.

A text has a *place*: a ring for the inputs of its newest tokens, and a few checkpoints of its states. A row at position
p starts from the checkpoint at `block * (p // block - 1)` and takes the inputs since, in order of position
(docs/design/scan.md#checkpoints). The checkpoint is at least a block behind the row, and a block holds the deepest
tree. So every row of a tree starts inside the committed text, and its bits depend only on its path.

All rows of a step write scratch slots, in order. Accepted rows are then copied into the rings, in the same way for
prompts, decode steps and trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from dendro.tree import DraftTree
from tree_kernels import ROW_MULTIPLE
from tree_kernels.tree_scan import BlockFold, Group, Paths
from tree_layers.tree_mixers import RecurrentStep

Ints = npt.NDArray[np.int64]

NOT_KEPT = -1
"""Target of a checkpoint that only its own step needs."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a place.

    Blocks of 16 tokens, trees of depth 8, texts cut by at most 9 tokens: the ring holds 48 tokens, and 3 checkpoints
    are kept. The next row after 100 tokens starts from the checkpoint after 5 blocks, at 80:

    >>> extent = Extent.of(block=16, slack=9, depth=8)
    >>> extent, extent.oldest(100)
    (Extent(block=16, ring=48, checkpoints=3), 5)
    """

    block: int  # tokens of a block: R of docs/design/scan.md#checkpoints
    ring: int  # tokens whose inputs the ring holds
    checkpoints: int  # number of checkpoints that are kept

    @classmethod
    def of(cls, block: int, slack: int, depth: int) -> Extent:
        """Size of the place of a text that is computed again when it is cut by more than `slack` tokens."""
        # The next row is at most `slack` before the last token, and takes inputs of less than two blocks before it.
        return cls(block, -(-(2 * block + slack) // block) * block, (depth + slack - 1) // block + 2)

    @classmethod
    def of_whole(cls, block: int, tokens: int, depth: int) -> Extent:
        """Size of a place that holds a whole text of up to `tokens` tokens."""
        return cls(block, -(-tokens // block) * block + block, (tokens + depth) // block + 1)

    def oldest(self, length: int) -> int:
        """Number of the checkpoint, in blocks, from which the next row after `length` tokens starts. Later rows start
        from this or newer ones."""
        return max(length // self.block - 1, 0)


@dataclass(slots=True)
class TextStates:
    """One text's place in the memory, and what it holds."""

    extent: Extent
    first_token: int  # first slot of the ring
    first_state: int  # first slot of the checkpoints
    folded: int = 0  # the newest valid checkpoint: the state after `folded` blocks
    lowest: int = 0  # the oldest checkpoint that was not overwritten
    written: int = 0  # tokens written to the ring so far

    def token_slots(self, positions: Ints) -> Ints:
        """Ring slots of the inputs of committed tokens at these positions."""
        return self.first_token + positions % self.extent.ring

    def state_slot(self, block: int) -> int:
        """Slot of the state after `block` blocks; 0, the zero state, before the text."""
        return self.first_state + block % self.extent.checkpoints if block > 0 else 0

    def fold_to(self, block: int) -> None:
        """Record that checkpoints up to this block are being written."""
        self.folded = max(self.folded, block)
        self.lowest = max(self.lowest, block - self.extent.checkpoints + 1)

    def append(self, tokens: int) -> None:
        """Record that the text has consumed `tokens` tokens in all."""
        self.written = max(self.written, tokens)

    def can_cut(self, length: int) -> bool:
        """True if the place still holds the checkpoint and inputs that a text of this length needs."""
        block = self.extent.oldest(length)
        return (not block or block >= self.lowest) and block * self.extent.block >= self.written - self.extent.ring

    def base_of(self, length: int) -> int:
        """Number, in blocks, of the checkpoint that is saved with a text of this length, beside the inputs since: the
        one from which the next row starts, or an older one."""
        return min(self.extent.oldest(length), self.folded)

    def restore(self, block: int, length: int) -> None:
        """Record that this checkpoint and the inputs after it, up to `length` tokens, are restored."""
        self.folded = self.lowest = block
        self.written = length

    def cut(self, length: int) -> None:
        """Shorten the text to this length. Requires `can_cut`."""
        self.folded = min(self.folded, length // self.extent.block)


class StatePool:
    """Allocates places."""

    def __init__(self, count: int, extent: Extent) -> None:
        self.count = count
        self.extent = extent
        self._free = list(range(count, 0, -1))  # the lowest is allocated first

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> TextStates:
        """A place of undefined contents, for a text that has consumed nothing."""
        return place_of(self._free.pop() - 1, self.extent)

    def release(self, place: TextStates) -> None:
        """Release a place. It must be allocated."""
        self._free.append((place.first_token - 1) // self.extent.ring + 1)


def place_of(index: int, extent: Extent) -> TextStates:
    """The place with this number among places of one extent; slot 0 belongs to none."""
    return TextStates(extent, 1 + index * extent.ring, 1 + index * extent.checkpoints)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Layout of the memory: the texts' places, one place for the runner's own checks, and scratch for a step's rows."""

    extent: Extent  # size of a text's place
    places: int  # number of texts' places
    whole: Extent  # size of the runner's own place
    scratch: int  # the first token slot for a step's rows
    tokens: int  # token slots in all
    states: int  # state slots in all

    @classmethod
    def of(cls, places: int, block: int, depth: int, step_rows: int) -> Arrangement:
        """Lay out the memory. places: number of texts   block: tokens of a block   depth: of the deepest tree
        step_rows: most rows of a step"""
        extent = Extent.of(block, depth + 1, depth)  # a dropped verdict cuts a text by a path
        whole = Extent.of_whole(block, step_rows, depth)
        scratch = 1 + places * extent.ring + whole.ring
        states = 1 + places * extent.checkpoints + whole.checkpoints
        return cls(extent, places, whole, scratch, scratch + step_rows, states)

    def own_place(self) -> TextStates:
        """The runner's own place, empty."""
        after = place_of(self.places, self.extent)
        return TextStates(self.whole, after.first_token, after.first_state)


@dataclass(frozen=True, slots=True, eq=False)
class FoldOf:
    """Computation of a checkpoint from the checkpoint one block earlier."""

    source: int  # slot of the states; -1 - f for the result of the step's fold f
    columns: Ints  # [block] slots of the block's inputs
    target: int  # slot of the states, or NOT_KEPT


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRows:
    """A step's rows, or one text's of them, for a target with states."""

    columns: Ints  # [rows, 2 * block] slots of the inputs at positions from the row's checkpoint on; 0 where none is
    own: Ints  # [rows] column of the row's own input
    homes: Ints  # [rows] slot of the row's position in its text's ring
    sources: Ints  # [rows] checkpoint from which the row starts, numbered like `FoldOf.source`
    folds: tuple[FoldOf, ...]


@dataclass(frozen=True, slots=True)
class _InputSlots:
    """Slots of the inputs of one text's tokens during a step."""

    place: TextStates
    committed: Ints  # [n] positions of rows of this step, in any order
    scratch: int  # slot of the first of these rows
    order: Ints = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", np.argsort(self.committed, kind="stable"))

    def at(self, positions: Ints) -> Ints:
        """Slots of committed tokens at these positions: this step's own, else the ring's."""
        slots = self.place.token_slots(positions)
        if len(self.committed):
            ascending = self.committed[self.order]
            found = np.minimum(np.searchsorted(ascending, positions), len(ascending) - 1)
            mine = ascending[found] == positions
            slots = np.where(mine, self.scratch + self.order[found], slots)
        return slots


def recurrent_rows(
    place: TextStates, committed: Ints, root: int, tree: DraftTree | None, scratch: int, folds: int = 0
) -> RecurrentRows:
    """One text's rows of a step: committed ones at these positions, then a tree's, whose root is at position `root`.
    Records in `place` which checkpoints the step writes.

    scratch: slot of the first of these rows   folds: number of the step's folds that come before this text's
    """
    block = place.extent.block
    positions = committed
    certain = committed  # the last position of a row's path that is not a guess
    trail = np.zeros((len(committed), 1), np.int64)  # column d: the slot of the row's ancestor at depth d
    known = committed
    if tree is not None:
        depths = tree.depths.astype(np.int64)
        first = scratch + len(committed)
        paths = np.where(tree.paths < 0, 0, first + tree.paths)
        trail = np.concatenate([np.zeros((len(committed), paths.shape[1]), np.int64), paths])
        positions = np.concatenate([committed, root + depths])
        certain = np.concatenate([committed, np.full(tree.rows, root)])
        known = np.append(committed, root)
    slots = _InputSlots(place, known, scratch)
    starts = block * (positions // block - 1)
    keys = starts[:, None] + np.arange(2 * block)
    columns = slots.at(np.clip(keys, 0, certain[:, None]).ravel()).reshape(keys.shape)
    depth = np.minimum(keys, positions[:, None]) - certain[:, None]
    rows = np.broadcast_to(np.arange(len(positions))[:, None], keys.shape)
    guessed = depth > 0
    columns[guessed] = trail[rows[guessed], depth[guessed]]
    columns[(keys < 0) | (keys > positions[:, None])] = 0

    blocks = np.maximum(positions // block - 1, 0)
    newest, before = int(blocks.max()), place.folded

    def source(after: int) -> int:
        return place.state_slot(after) if after <= before else -1 - (folds + after - before - 1)

    made = tuple(
        FoldOf(
            source(after - 1),
            slots.at(np.arange((after - 1) * block, after * block)),
            place.state_slot(after) if after > newest - place.extent.checkpoints else NOT_KEPT,
        )
        for after in range(before + 1, newest + 1)
    )
    sources = np.array([source(int(after)) for after in blocks], np.int64)
    place.fold_to(newest)
    return RecurrentRows(columns, positions - starts, place.token_slots(positions), sources, made)


def pack_recurrent(parts: Sequence[RecurrentRows]) -> RecurrentRows:
    """Join the rows of several texts in one step, in this order."""
    return RecurrentRows(
        columns=np.concatenate([part.columns for part in parts]),
        own=np.concatenate([part.own for part in parts]),
        homes=np.concatenate([part.homes for part in parts]),
        sources=np.concatenate([part.sources for part in parts]),
        folds=tuple(each for part in parts for each in part.folds),
    )


def last_writers(source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Drop copies whose target a later copy has, too: a long chunk of a prompt goes round its ring more than once.

    >>> source, target = last_writers(np.array([7, 8, 9]), np.array([1, 2, 1]))
    >>> source.tolist(), target.tolist()
    ([8, 9], [2, 1])
    """
    _, first = np.unique(target[::-1], return_index=True)
    rows = np.sort(len(target) - 1 - first)
    return source[rows], target[rows]


def on_device(device: torch.device, array: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def recurrent_step(rows: RecurrentRows, padded: int, scratch: int, device: torch.device) -> RecurrentStep:
    """Convert a step's rows for the model's mixers. Inputs are written to slots from `scratch` on; rows of padding have
    no path."""
    tensor = partial(on_device, device)
    missing = (0, padded - len(rows.columns))
    groups = []
    for source in np.unique(rows.sources).tolist():
        if source:
            its = np.flatnonzero(rows.sources == source)
            more = np.full(-len(its) % ROW_MULTIPLE, its[0])
            groups.append(Group(source, tensor(np.concatenate([its, more])), len(its)))
    folds = [BlockFold(each.source, tensor(each.columns), each.target) for each in rows.folds]
    columns = torch.nn.functional.pad(tensor(rows.columns), (0, 0, *missing))
    own = torch.nn.functional.pad(tensor(rows.own), missing, value=rows.columns.shape[1] // 2)
    return RecurrentStep(torch.arange(scratch, scratch + padded, device=device), own, Paths(columns, groups, folds))
