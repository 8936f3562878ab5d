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
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from dendro.tree import DraftTree
from tree_kernels import ROW_MULTIPLE
from tree_kernels.row_slots import Homes, Ints, first_seen, path_slots
from tree_kernels.tree_scan import BlockFold, Group, Paths
from tree_layers.tree_mixers import RecurrentStep

from verifier_service.rows import NOT_KEPT, FoldOf, RecurrentRows, RowPaths, TextPart


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
    begins: int = 0  # position of the first token that was: of a restored text, the first after its checkpoint

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
        held = max(self.begins, self.written - self.extent.ring)  # position of the first token whose inputs are held
        return (not block or block >= self.lowest) and block * self.extent.block >= held

    def base_of(self, length: int) -> int:
        """Number, in blocks, of the checkpoint that is saved with a text of this length, together with the inputs of
        the tokens after it: the checkpoint from which the next row starts, or an older one."""
        return min(self.extent.oldest(length), self.folded)

    def restore(self, block: int, length: int) -> None:
        """Record that the checkpoint after `block` blocks, and the inputs after it up to `length` tokens, are
        restored."""
        self.folded = self.lowest = block
        self.begins, self.written = block * self.extent.block, length

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
    tokens: int  # total number of token slots
    states: int  # total number of state slots

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


def recurrent_rows(
    place: TextStates, committed: Ints, root: int, tree: DraftTree | None, scratch: int
) -> RecurrentRows:
    """Rows of one text in a step (`recurrent_rows_of`). root: position of the text's last token"""
    paths = RowPaths.of([TextPart(range(root + 1), committed, tree)])
    return recurrent_rows_of(paths, [place], scratch)


def recurrent_rows_of(rows: RowPaths, places: Sequence[TextStates], scratch: int) -> RecurrentRows:
    """The rows of a step's texts for mixers. Records in `places` which checkpoints the step writes.

    places: of equal extents   scratch: slot of the first row's inputs
    """
    extent, block = places[0].extent, places[0].extent.block
    newest = [max(position // block - 1, 0) for position in rows.most]
    lowest = [
        min(first_seen(position, block), place.folded * block)
        for position, place in zip(rows.least, places, strict=True)
    ]
    rings = Homes([place.first_token for place in places], range(len(places)), extent.ring, paged=False)
    inputs = path_slots(rows.from_lowest(lowest), block, rings, scratch, for_all=True)
    first_state, before = np.array([(place.first_state, place.folded) for place in places]).T
    made, later = list[FoldOf](), list[int]()  # later: number of each text's first fold, less the block that it ends
    for text, (place, last) in enumerate(zip(places, newest, strict=True)):
        later.append(len(made) - place.folded - 1)
        for after in range(place.folded + 1, last + 1):
            known = after - 1 == place.folded
            made.append(
                FoldOf(
                    place.state_slot(after - 1) if known else -1 - (later[-1] + after - 1),
                    inputs.between(text, (after - 1) * block, after * block),
                    place.state_slot(after) if after > last - extent.checkpoints else NOT_KEPT,
                )
            )
        place.fold_to(last)
    blocks, its = np.maximum(rows.positions // block - 1, 0), rows.texts
    stored = np.where(blocks > 0, first_state[its] + blocks % extent.checkpoints, 0)
    sources = np.where(blocks <= before[its], stored, -1 - (np.array(later)[its] + blocks))
    own = block + rows.positions % block
    return RecurrentRows(inputs.columns, own, inputs.homes, sources, tuple(made))


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
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made if device.type == "cpu" else made.to(device)


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
