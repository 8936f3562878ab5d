"""Divides the far keys of a step's rows into items of work for tensor cores (README.md in this folder).

A split is a range of absolute positions, the same for every text, row, step and model: so a row's sums of its splits do
not depend on what else is in a step, nor on how many programs run. An item is one split for a block of rows of one
text, which read its keys together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tree_kernels.runs import places_in_runs
from tree_kernels.tree_attention.rows import PAGE, Layout

Ints = npt.NDArray[np.int64]

LINES = 64
"""Lines of a tile: the heads of a group, for a block of rows. With fewer, a GPU multiplies by other instructions."""
SHORTEST, OF_A_LENGTH, GROWTH = 256, 32, 4
"""Lengths of splits: the first OF_A_LENGTH splits have SHORTEST positions, the next OF_A_LENGTH have GROWTH times as
many, and so on. So a long text has enough splits for a GPU, but few sums to add."""
ITEM = 5
"""Numbers of an item: its first row, its number of rows, its split, and the positions [begin, stop) that it reads."""
WIDEST_HEAD = 256
LARGEST_GROUP = 16
HEAD_MULTIPLE = 16


def why_not_on_tensor_cores(layout: Layout, group: int, dtypes: Sequence[torch.dtype]) -> str:
    """Reason why layers of this layout are attended from float32 pages, one program a row; empty if they are not.

    group: query heads of a kv head   dtypes: of a layer's queries, keys and values
    """
    if len(set(dtypes)) > 1 or dtypes[0] not in (torch.bfloat16, torch.float16):
        return f"queries, keys and values are {', '.join(str(each).removeprefix('torch.') for each in dtypes)}"
    if group > LARGEST_GROUP:
        return f"{group} heads share a key"
    for dim in (layout.key_dim, layout.value_dim):
        if dim > WIDEST_HEAD or dim % HEAD_MULTIPLE:
            return f"a head has {dim} numbers"
    return ""


def first_positions(longest: int) -> Ints:
    """The first position of each split of a text of `longest` positions, and the end of the last split."""
    found, length = [0], SHORTEST
    while found[-1] < longest:
        found.append(found[-1] + length)
        if len(found) % OF_A_LENGTH == 1:
            length *= GROWTH
    return np.array(found, np.int64)


class FarPart(Protocol):
    """Rows [start, stop) of one text, and its pages with far keys of any of them, from the page `first` of the text."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def first(self) -> int: ...


@dataclass(frozen=True, slots=True)
class FarSplits:
    """The splits of a runner's longest text, and the rows that share a tile."""

    bounds: Ints  # first position of each split, and the end (`first_positions`)
    near: int
    block: int  # rows of an item at most

    @classmethod
    def of(cls, longest: int, near: int, group: int) -> FarSplits:
        """group: the most query heads of a kv head in any layer"""
        return cls(first_positions(longest), near, LINES // group)

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def most_items(self, rows: int, texts: int) -> int:
        """Most items of a step of at most `rows` rows and `texts` texts."""
        return (rows // self.block + min(texts, rows)) * self.count

    def fill(self, positions: Ints, parts: Sequence[FarPart], items: Ints, splits: Ints) -> int:
        """Write the items of a step, and the splits [first, stop) that each row sums; returns the number of items.

        positions [rows]   parts: in order   items [most, ITEM], splits [rows, 2], both zero: written here
        """
        if not parts:
            return 0
        begins, rows_end, places = np.array([(part.start, part.stop, part.first * PAGE) for part in parts]).T
        counts = rows_end - begins
        rows = np.repeat(begins, counts) + places_in_runs(counts)  # numbers of the rows of all parts
        ends = np.zeros(len(positions), np.int64)  # [rows] end of each row's far keys
        ends[rows] = np.maximum(self.near * (positions[rows] // self.near - 1), 0)
        splits[: len(ends), 1] = np.searchsorted(self.bounds, ends)  # a split is seen if it begins before the end
        earliest = np.searchsorted(self.bounds, places, "right") - 1
        splits[rows, 0] = np.repeat(earliest, counts)
        counts = -(-counts // self.block)  # blocks of each part
        starts = np.repeat(begins, counts) + self.block * places_in_runs(counts)
        stops = np.minimum(starts + self.block, np.repeat(rows_end, counts))
        first = np.repeat(earliest, counts)
        last = np.maximum.reduceat(ends, starts)  # a row between two parts has no far keys
        counts = np.maximum(np.searchsorted(self.bounds, last) - first, 0)
        block = np.repeat(np.arange(len(starts)), counts)
        its = first[block] + places_in_runs(counts)
        ended = np.minimum(self.bounds[its + 1], last[block])
        found = (starts[block], (stops - starts)[block], its, self.bounds[its], ended)
        items[: len(block)] = np.stack(found, 1)
        return len(block)
