"""Trees of a known form by kernels of an accelerator: one upload, one replay of a graph for each level, one download.

A row's token is its parent's guess of the row's rank, which the device looks up. All else that the levels read is known
before the first one runs: each entry of their arrays is one of a tree's few numbers (slots, positions, order), and the
form alone decides which one. Tokens of the text that come before the root are levels of one node, which are folded into
the text before the root's level.
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

from drafter_service.device_levels import ALIGNED, DeviceLevels, DeviceLevelSize, Fold, RowOrder
from drafter_service.models.backbone import FOREIGN
from drafter_service.plan import Level, Levels, Nodes, TextFold

log = logging.getLogger("dendro.drafter")

MOST_SIZES = 256
"""Most sizes of trees whose recordings are kept. Before another is recorded, the oldest is dropped."""
MOST_FORMS = 1024
"""Most forms whose tables are kept. Before another is made, all are dropped."""


@dataclass(frozen=True, slots=True)
class DeviceTreeSize:
    """The sizes to which levels are padded: a level for each token before the root, then the tree's levels."""

    levels: tuple[DeviceLevelSize, ...]
    before: int  # tokens before the root

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


class DeviceTrees:
    """The trees of one drafter, recorded by the sizes of their levels."""

    def __init__(self, levels: DeviceLevels, graphs: Graphs, fold: Fold) -> None:
        self._levels = levels
        self._fold = fold
        self._device = levels.model.device
        self._embedded = len(levels.model.embedding)
        self._tables: dict[tuple[object, ...], TreeTable] = {}
        self._memory: dict[DeviceTreeSize, TreeMemory] = {}
        self.recordings = Recordings[DeviceTreeLevel, Tensor](graphs, "drafter: levels of trees", log)
        self._done = torch.cuda.Event() if self._device.type == "cuda" else None

    def guesses(
        self, rows: Levels, order: RowOrder, positions: Sequence[int], width: int
    ) -> tuple[IntArray, np.ndarray]:
        """Put the tokens before a root into their text, and run levels of new nodes. Returns the tokens and the scores
        of the best guesses after each token and row, [rows.count, width] each; writes the nodes' slots.

        order: the order of all rows, with any position   positions: position of the token to be guessed, by token and
        level   width: guesses of each row, more than any of `rows.ranks`
        """
        from tree_kernels.ranking.triton import ranked_of

        levels, table = self._levels, self._table(rows, width)
        memory, numbers = table.memory, table.numbers
        path = tuple(levels.chain_nodes[: rows.text_rows])
        own = levels.layers.numbers([*path, *rows.nodes.slots], (rows.source, rows.text), levels.scratch)
        tokens = [token if token < self._embedded else FOREIGN for token in rows.tokens]
        of_tree = [*own, *tokens, *order, *positions]
        numbers[: len(of_tree)] = of_tree
        numbers.take(table.pattern, out=memory.given.flat, mode="clip")
        for level in memory.levels:  # the first one begins while the others are launched
            if path and level.number == len(path):
                self._fold([TextFold(rows.start, rows.source, rows.text, path)])
            self.recordings.run(level, partial(self._run, memory, level.number))
        if self._done is not None:
            self._done.record()
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
        if "tokens" in its:
            hidden = embed_tokens(its["tokens"], model.embedding, model.residual)
        else:
            hidden = embed_guesses(memory.best, its["places"], model.embedding, FOREIGN, model.residual)
        level, start = memory.size.levels[number], memory.size.starts[number]
        made = memory.best[start : start + level.rows]
        levels.ranked(levels.layers.run(its, hidden), its["orders"], level.width, made)
        if number == len(memory.levels) - 1:
            memory.found.copy_(memory.best, non_blocking=True)
        return memory.best

    def _table(self, rows: Levels, width: int) -> TreeTable:
        key = rows.text_rows, tuple(rows.nodes.above), tuple(rows.counts), tuple(rows.ranks), width
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= MOST_FORMS:
                self._tables.clear()
            found = self._tables[key] = self._made(rows, width)
        return found

    def _made(self, rows: Levels, width: int) -> TreeTable:
        """The table of trees of this form, and the memory of its size."""
        layers, above, before = self._levels.layers, rows.nodes.above, rows.text_rows
        count, ends = before + len(above), list(accumulate(rows.counts, initial=len(above) - len(rows.ranks)))
        of_text = [(0, 1, depth, Nodes(range(1, depth + 2), range(-1, depth))) for depth in range(before)]
        of_tree = [
            (1, new, depth, Nodes(range(1 + before, 1 + before + end), above[:end]))
            for depth, (new, end) in enumerate(zip(rows.counts, ends[1:], strict=True), rows.depth)
        ]
        levels = [
            Level(np.zeros(new, np.int64), [new], [text], [0], [depth], [nodes])
            for text, new, depth, nodes in of_text + of_tree
        ]
        size = DeviceTreeSize(tuple(layers.size_of(level, width) for level in levels), before)
        tokens = len(layers.numbers(range(count), (0, 0), 0))
        orders = tokens + len(rows.tokens)
        first_place = orders + len(RowOrder._fields) + len(levels)
        arrays, ranks = dict[str, IntArray](), np.array(rows.ranks)
        for number, (level, its) in enumerate(zip(levels, size.levels, strict=True)):
            pattern = layers.pattern(level, its, count)
            fields = orders + np.arange(len(RowOrder._fields))
            fields[RowOrder._fields.index("position")] = orders + len(fields) + number
            pattern["orders"] = np.repeat(fields[:, None], its.rows, 1)
            if number <= before:
                pattern["tokens"] = np.resize(tokens + number + np.arange(level.count), its.rows)
            else:
                new = slice(ends[number - before], ends[number - before + 1])
                parents = np.array(above[new]) - ends[number - before - 1]
                chosen = ranks[new.start - ends[0] : new.stop - ends[0]]
                guesses = first_place + (size.starts[number - 1] + parents) * width + chosen
                pattern["places"] = np.resize(guesses, its.rows)
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
