"""Trees of a known form by kernels of an accelerator: one upload, one replay of a graph for each level, one download.

A row's token is its parent's guess of the row's rank, which the device looks up. All else that the levels read is known
before the first one runs: each entry of their arrays is one of a tree's few numbers (slots, positions, order), and the
form alone decides which one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from dendro.tree import IntArray
from torch import Tensor
from tree_layers.graphs import Graphs, Recordings
from tree_layers.step_buffers import StepBuffers

from drafter_service.device_levels import ALIGNED, DeviceLevels, DeviceLevelSize, RowOrder, token_read
from drafter_service.models.backbone import FOREIGN
from drafter_service.plan import Level, Levels, Nodes

log = logging.getLogger("dendro.drafter")

MOST_SIZES = 64
"""Most sizes of trees whose recordings are kept. Before another is recorded, the oldest is dropped."""
MOST_FORMS = 1024
"""Most forms whose tables are kept. Before another is made, all are dropped."""


@dataclass(frozen=True, slots=True)
class DeviceTreeSize:
    """The sizes to which the levels of a tree are padded."""

    levels: tuple[DeviceLevelSize, ...]

    @property
    def rows(self) -> int:
        return sum(level.rows for level in self.levels)

    @property
    def starts(self) -> list[int]:
        """The number of each level's first row among those of all levels."""
        return list(accumulate((level.rows for level in self.levels[:-1]), initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTreeLevel:
    """A recorded level of the trees of a size."""

    number: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class TreeMemory:
    """The buffers that the recordings for trees of one size read and write."""

    size: DeviceTreeSize
    levels: Sequence[DeviceTreeLevel]
    given: StepBuffers  # arrays of level i by their names followed by i
    best: Tensor  # [padded rows, width] guesses, as `ranked_of` reads them
    found: Tensor  # [padded rows, width] a copy on the host, in pinned memory on a GPU


@dataclass(frozen=True, slots=True, eq=False)
class TreeTable:
    """The uploaded arrays of all trees of one form."""

    memory: TreeMemory
    pattern: IntArray  # index in `numbers` of each entry of the arrays
    numbers: IntArray  # the numbers of one tree, overwritten for each; the last ones are 0, 1, ... for all trees
    rows: IntArray  # [rows] place of each row among the padded ones
    taps: IntArray | None  # [rows, W] index in `numbers` of each row's taps; None: levels have no taps


class DeviceTrees:
    """The trees of one drafter, recorded by the sizes of their levels."""

    def __init__(self, levels: DeviceLevels, graphs: Graphs) -> None:
        self._levels = levels
        self._device = levels.model.device
        self._tables: dict[tuple[object, ...], TreeTable] = {}
        self._memory: dict[DeviceTreeSize, TreeMemory] = {}
        self.recordings = Recordings[DeviceTreeLevel, Tensor](graphs, "drafter: levels of trees", log)
        self._done = torch.cuda.Event() if self._device.type == "cuda" else None

    def guesses(
        self, rows: Levels, order: RowOrder, positions: Sequence[int], width: int
    ) -> tuple[IntArray, np.ndarray]:
        """Run levels of new nodes. Returns the tokens and the scores of each row's best guesses, [rows, width] each;
        writes the nodes' slots.

        order: the order of all rows, with any position   positions: position of the token to be guessed, by level
        width: guesses of each row, more than any of `rows.ranks`
        """
        from tree_kernels.ranking.triton import ranked_of

        layers, first = self._levels.layers, rows.first
        table = self._table(rows, width)
        memory = table.memory
        own = layers.numbers(rows.nodes.slots, first.texts[0], self._levels.scratch)
        numbers = table.numbers
        tokens = token_read(first.tokens, self._levels.model).tolist()
        of_tree = [*own, *tokens, *order, *positions]
        numbers[: len(of_tree)] = of_tree
        np.take(numbers, table.pattern, out=memory.given.flat, mode="clip")
        for level in memory.levels:  # the first one begins while the others are launched
            self.recordings.run(level, partial(self._run, memory, level.number))
        if self._done is not None:
            self._done.record()
        if table.taps is not None:  # work of the host while the device runs
            layers.record(np.array(rows.nodes.slots[-rows.count :]), numbers[table.taps])
        if self._done is not None:
            self._done.synchronize()
        return ranked_of(memory.found.numpy()[table.rows])

    def _run(self, memory: TreeMemory, number: int) -> Tensor:
        """Run a level. The first one uploads the arrays of all, the last one downloads the guesses of all."""
        from tree_kernels.ranking.triton import embed_guesses, embed_tokens

        if number == 0:
            memory.given.copy()
        levels, model, suffix = self._levels, self._levels.model, f" {number}"
        given = memory.given.device
        its = {name.removesuffix(suffix): array for name, array in given.items() if name.endswith(suffix)}
        if number:
            hidden = embed_guesses(memory.best, its["places"], model.embedding, FOREIGN, model.residual)
        else:
            hidden = embed_tokens(its["tokens"], model.embedding, model.residual)
        level, start = memory.size.levels[number], memory.size.starts[number]
        made = memory.best[start : start + level.rows]
        levels.ranked(levels.layers.run(its, hidden), its["orders"], level.width, made)
        if number == len(memory.levels) - 1:
            memory.found.copy_(memory.best, non_blocking=True)
        return memory.best

    def _table(self, rows: Levels, width: int) -> TreeTable:
        form = rows.nodes.above, rows.counts, rows.ranks
        key = *(tuple(each) for each in form), width
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= MOST_FORMS:
                self._tables.clear()
            found = self._tables[key] = self._made(rows, width)
        return found

    def _made(self, rows: Levels, width: int) -> TreeTable:
        """The table of trees of this form, and the memory of its size."""
        layers, above, count = self._levels.layers, rows.nodes.above, len(rows.nodes.above)
        ends = list(accumulate(rows.counts, initial=count - rows.count))
        levels = [
            Level(np.zeros(new, np.int64), [new], [1], [0], [depth], [Nodes(range(1, end + 1), above[:end])])
            for depth, (new, end) in enumerate(zip(rows.counts, ends[1:], strict=True), rows.first.depths[0])
        ]
        size = DeviceTreeSize(tuple(layers.size_of(level, width) for level in levels))
        tokens = len(layers.numbers(range(count), 0, 0))
        orders = tokens + rows.counts[0]
        first_place = orders + len(RowOrder._fields) + len(levels)
        arrays, taps, ranks = dict[str, IntArray](), [], np.array(rows.ranks)
        for number, (level, its) in enumerate(zip(levels, size.levels, strict=True)):
            pattern = layers.pattern(level, its, count)
            fields = orders + np.arange(len(RowOrder._fields))
            fields[RowOrder._fields.index("position")] = orders + len(fields) + number
            pattern["orders"] = np.repeat(fields[:, None], its.rows, 1)
            if number == 0:
                pattern["tokens"] = np.resize(tokens + np.arange(level.count), its.rows)
            else:
                new = slice(ends[number], ends[number + 1])
                parents = np.array(above[new]) - ends[number - 1]
                chosen = ranks[new.start - ends[0] : new.stop - ends[0]]
                guesses = first_place + (size.starts[number - 1] + parents) * width + chosen
                pattern["places"] = np.resize(guesses, its.rows)
            if "taps" in pattern:
                taps.append(pattern["taps"][: level.count])
            arrays |= {f"{name} {number}": array for name, array in pattern.items()}
        memory = self._memory_of(size, {name: array.shape for name, array in arrays.items()}, width)
        memory.given.clear()
        for name, array in arrays.items():
            memory.given.host[name][:] = array
        real = [start + np.arange(level.count) for start, level in zip(size.starts, levels, strict=True)]
        return TreeTable(
            memory,
            memory.given.flat.copy(),
            np.concatenate([np.zeros(first_place, np.int64), np.arange(size.rows * width)]),
            np.concatenate(real),
            np.concatenate(taps) if taps else None,
        )

    def _memory_of(self, size: DeviceTreeSize, shapes: dict[str, tuple[int, ...]], width: int) -> TreeMemory:
        if size not in self._memory:
            if len(self._memory) >= MOST_SIZES:
                oldest = self._memory.pop(next(iter(self._memory)))
                self._tables = {form: each for form, each in self._tables.items() if each.memory is not oldest}
                for level in oldest.levels:
                    self.recordings.made.pop(level, None)
            device = self._device
            self._memory[size] = TreeMemory(
                size,
                [DeviceTreeLevel(number, level.rows) for number, level in enumerate(size.levels)],
                StepBuffers(shapes, torch.int64, device, apart=ALIGNED),
                torch.zeros(size.rows, width, dtype=torch.int64, device=device),
                torch.zeros(size.rows, width, dtype=torch.int64, pin_memory=device.type == "cuda"),
            )
        return self._memory[size]
