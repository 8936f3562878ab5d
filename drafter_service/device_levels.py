"""Levels of a Mamba drafter by kernels of an accelerator: three launches a layer for Mamba-2, four for Mamba-1, and
three from the last layer to ranked guesses. A level is one upload, one replay of a graph and one download.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from dendro.tree import IntArray
from torch import Tensor
from tree_layers.graphs import Graphs, Recordings
from tree_layers.mixers import Mamba1Mixer, Mamba2Mixer
from tree_layers.nodes import taps_of
from tree_layers.step_buffers import StepBuffers

from drafter_service.models.backbone import FOREIGN, Backbone
from drafter_service.models.inputs import InputMemory
from drafter_service.models.states import StateMemory
from drafter_service.plan import NO_NODE, Chains, Level, Nodes, TextFold
from drafter_service.recorded_levels import at_least

if TYPE_CHECKING:
    from tree_kernels.rows_product.triton import RowsWeight

log = logging.getLogger("dendro.drafter")

FEWEST_ABOVE = 4
"""Least number of ancestors to which a row's are padded: each smaller number would need a recording of its own."""


LONGEST_CHAIN = 8
"""Most tokens of a chain that runs as levels of one token. A level takes a small part of the time of a chain by
PyTorch's operations, which takes about as long for 2 tokens as for 100."""
CHAIN_NODES = 32
"""Node slots for the tokens of chains that run as levels."""
ALIGNED = 2
"""Multiple, in numbers of 8 bytes, at which uploaded arrays begin: a kernel is compiled once for aligned arrays."""


@dataclass(frozen=True, slots=True)
class DeviceLevelSize:
    """The sizes to which a level is padded. Levels of equal sizes share a recording."""

    trees: int
    new: int  # new nodes of each tree
    above: int  # ancestors of each new node; 0 where a node's state is read from its parent's slot
    width: int  # guesses of each row; 0: the level ends with hidden rows

    @property
    def rows(self) -> int:
        return self.trees * self.new


class RowOrder(NamedTuple):
    """The order of a row's tokens: by logits / temperature plus the noise of a position, at temperature 0 by logits."""

    temperature: int  # the bits of a float32
    seed: int  # 64 bits, read as a signed number
    position: int
    sample_index: int
    vocabulary: int


class LevelLayers(Protocol):
    """Runs a drafter's layers on a level, and makes the arrays by which the kernels find a level's slots in memory."""

    def size_of(self, rows: Level, width: int) -> DeviceLevelSize:
        """The size to which a level is padded."""
        ...

    def arrays(self, rows: Level, size: DeviceLevelSize, scratch: int) -> tuple[dict[str, IntArray], IntArray]:
        """Called once for each level. Returns its arrays, of the same shapes for all levels of a size, and the places
        of its rows among the padded ones. scratch: node slot that padded rows write"""
        ...

    def pattern(self, rows: Level, size: DeviceLevelSize, count: int) -> dict[str, IntArray]:
        """Called once for each level of a tree's form of `count` nodes, with a tree whose node slots are 1, 2, ... and
        whose text slot is 0 or 1, the first or the second one of `numbers`. Returns arrays of the level's shapes, whose
        entries are indices of the list that `numbers` returns for a tree."""
        ...

    def numbers(self, slots: Sequence[int], texts: Sequence[int], scratch: int) -> list[int]:
        """Called once for each tree, with the slots of its nodes and its two text slots. Returns the numbers of which
        the arrays of its levels consist (`pattern`)."""
        ...

    def run(self, given: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Called with the embedded tokens [rows, d], which may be overwritten. Returns hidden rows [rows, d]."""
        ...


class Mamba2Layers:
    """The layers of a Mamba-2 drafter."""

    def __init__(self, model: Backbone[Mamba2Mixer], memory: InputMemory) -> None:
        from tree_kernels.level_scan.triton import LevelSlots, LevelWeights
        from tree_kernels.rows_product.triton import RowsWeight

        self._nodes = memory.nodes
        self._layers = []
        for (norm, mixer), kept in zip(model.layers, memory.nodes.layers, strict=True):
            scan = mixer.scan
            self._layers.append(
                (
                    RowsWeight.of(mixer.in_proj, mixer.in_bias, norm, model.eps),
                    LevelSlots(kept.recurrent, kept.raw, kept.x, kept.B, kept.dt),
                    LevelWeights(scan.conv_weight, scan.conv_bias, scan.dt_bias, scan.A, scan.D, scan.dt_limit),
                    RowsWeight.of(mixer.out_proj, mixer.out_bias, mixer.norm, mixer.eps, scan.groups),
                )
            )

    def size_of(self, rows: Level, width: int) -> DeviceLevelSize:
        above = max(FEWEST_ABOVE, at_least(max(rows.depths)))
        return DeviceLevelSize(at_least(len(rows.counts)), at_least(max(rows.counts)), above, width)

    def arrays(self, rows: Level, size: DeviceLevelSize, scratch: int) -> tuple[dict[str, IntArray], IntArray]:
        places = np.concatenate([tree * size.new + np.arange(count) for tree, count in enumerate(rows.counts)])
        slots, texts = np.full(size.rows, scratch), np.zeros(size.trees, np.int64)
        slots[places], texts[: len(rows.texts)] = rows.slots, rows.texts
        taps = np.zeros((size.rows, self._nodes.back + 1), np.int64)
        taps[:, -1] = self._nodes.first + slots
        taps[places] = self._nodes.taps(rows.slots, rows.text_of_rows, rows.ancestors(self._nodes.back))
        above = np.zeros((size.rows, size.above), np.int64)
        above[places] = rows.ancestors(size.above)
        return {"slots": slots, "taps": taps, "above": above, "texts": texts}, places

    def pattern(self, rows: Level, size: DeviceLevelSize, count: int) -> dict[str, IntArray]:
        scratch, texts, back, (text,) = 2 * count + 1, 2 * count + 3, self._nodes.back, rows.texts
        slots, above = np.full(size.rows, scratch), np.zeros((size.rows, size.above), np.int64)
        taps = np.zeros((size.rows, back + 1), np.int64)
        slots[: rows.count], above[: rows.count] = rows.slots, rows.ancestors(size.above)
        taps[:, -1] = scratch + 1
        tails = np.full(rows.count, texts + 2 + back * text)
        taps[: rows.count] = taps_of(count + rows.slots, tails, rows.ancestors(back), first=count)
        return {"slots": slots, "taps": taps, "above": above, "texts": np.array([texts + text])}

    def numbers(self, slots: Sequence[int], texts: Sequence[int], scratch: int) -> list[int]:
        first = self._nodes.first
        tails = [place for text in texts for place in self._nodes.tail(text)]
        return [NO_NODE, *slots, *[first + slot for slot in slots], scratch, first + scratch, *texts, *tails]

    def run(self, given: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        from tree_kernels.level_scan.triton import LevelTable, mix_level
        from tree_kernels.rows_product.triton import rows_product

        table = LevelTable(given["slots"], given["taps"], given["above"], given["texts"])
        for inner, memory, weights, outer in self._layers:
            y, squares = mix_level(rows_product(hidden, inner), memory, table, weights)
            hidden = rows_product(y, outer, hidden, squares)
        return hidden


class Mamba1Layers:
    """The layers of a Mamba-1 drafter."""

    def __init__(self, model: Backbone[Mamba1Mixer], memory: StateMemory) -> None:
        from tree_kernels.rows_product.triton import RowsWeight
        from tree_kernels.state_step.triton import StepWeights

        self._first_node = memory.first_node
        self._layers = []
        for number, (norm, mixer) in enumerate(model.layers):
            scan = mixer.scan
            parts = scan.conv_weight, scan.conv_bias, mixer.x_proj, mixer.dt_proj, mixer.dt_bias, scan.A, scan.D
            self._layers.append(
                (
                    RowsWeight.of(mixer.in_proj, mixer.in_bias, norm, model.eps),
                    (memory.states.recurrent[number], memory.states.conv[number]),
                    StepWeights(*parts),
                    RowsWeight.of(mixer.out_proj, mixer.out_bias),
                )
            )

    def size_of(self, rows: Level, width: int) -> DeviceLevelSize:
        return DeviceLevelSize(1, at_least(rows.count), 0, width)

    def arrays(self, rows: Level, size: DeviceLevelSize, scratch: int) -> tuple[dict[str, IntArray], IntArray]:
        source, target = np.zeros(size.rows, np.int64), np.full(size.rows, self._first_node + scratch)
        target[: rows.count] = self._first_node + rows.slots
        source[: rows.count] = np.where(rows.parents == NO_NODE, rows.text_of_rows, self._first_node + rows.parents)
        return {"source": source, "target": target}, np.arange(rows.count)

    def pattern(self, rows: Level, size: DeviceLevelSize, count: int) -> dict[str, IntArray]:
        source, target = np.zeros(size.rows, np.int64), np.full(size.rows, count + 1)
        source[: rows.count] = np.where(rows.parents == NO_NODE, count + 2 + rows.texts[0], rows.parents)
        target[: rows.count] = rows.slots
        return {"source": source, "target": target}

    def numbers(self, slots: Sequence[int], texts: Sequence[int], scratch: int) -> list[int]:
        first = self._first_node
        return [0, *[first + slot for slot in slots], first + scratch, *texts]

    def run(self, given: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        from tree_kernels.rows_product.triton import rows_product
        from tree_kernels.state_step.triton import step_level

        for inner, (recurrent, conv), weights, outer in self._layers:
            y = step_level(rows_product(hidden, inner), recurrent, conv, given["source"], given["target"], weights)
            hidden = rows_product(y, outer, hidden)
        return hidden


def layers_of(model: object, memory: object) -> LevelLayers | None:
    """The layers of a drafter that the kernels run; None for another drafter."""
    from tree_kernels.rows_product.triton import block_of

    if not isinstance(model, Backbone) or model.dtype not in (torch.float32, torch.bfloat16):
        return None  # squares of float16 may be infinite
    if isinstance(memory, StateMemory):
        return Mamba1Layers(model, memory)
    if isinstance(memory, InputMemory) and block_of(len(model.layers[0][1].norm), model.layers[0][1].scan.groups):
        return Mamba2Layers(model, memory)
    return None


Fold = Callable[[Sequence[TextFold]], None]
"""Writes paths of nodes into their texts."""


class DeviceLevels:
    """Runs levels of one drafter, with a recording for each size, and ranks hidden rows."""

    def __init__(
        self, model: Backbone[Mamba1Mixer] | Backbone[Mamba2Mixer], layers: LevelLayers, scratch: int, graphs: Graphs
    ) -> None:
        """scratch: the first of 1 + CHAIN_NODES node slots of the memory that no tree has"""
        from tree_kernels.rows_product.triton import RowsWeight

        self.model = model
        self.layers = layers
        self.scratch = scratch
        self.chain_nodes = range(scratch + 1, scratch + 1 + CHAIN_NODES)
        self._head: RowsWeight = RowsWeight.of(model.head, None, model.norm, model.eps)
        ids = model.draft_ids
        self._ids = None if ids is None else torch.from_numpy(ids.guessed).to(model.device)
        self._buffers: dict[DeviceLevelSize, StepBuffers] = {}
        self.recordings = Recordings[DeviceLevelSize, Tensor](graphs, "drafter: levels", log)

    def hidden(self, rows: Level) -> Tensor:
        """Run a level of new nodes. Returns hidden rows [rows, d]; writes the nodes' slots."""
        found, places = self._run(rows, (), 0)
        return found.index_select(0, torch.from_numpy(places).to(self.model.device))

    def guesses(self, rows: Level, orders: Sequence[RowOrder], width: int) -> tuple[IntArray, np.ndarray]:
        """Run a level of new nodes. Returns the tokens and the scores of each row's best guesses, [rows, width] each;
        writes the nodes' slots."""
        from tree_kernels.ranking.triton import ranked_of

        found, places = self._run(rows, orders, width)
        return ranked_of(found.cpu().numpy()[places])

    def chain(self, rows: Chains, orders: Sequence[RowOrder], width: int, fold: Fold) -> tuple[IntArray, np.ndarray]:
        """Put the tokens of chains without roots into their texts: as paths of nodes, level after level, then folded.
        Returns the best guesses after each token, chain after chain. orders: one per token"""
        lengths, starts = rows.lengths.tolist(), rows.starts.tolist()
        source, target = rows.source.tolist(), rows.target.tolist()
        first = list(accumulate(lengths, initial=0))
        ids = np.empty((len(orders), width), np.int64)
        scores = np.empty((len(orders), width), np.float32)
        longest = max(lengths)
        together = max(CHAIN_NODES // longest, 1)
        for begin in range(0, len(lengths), together):
            chains = range(begin, min(begin + together, len(lengths)))
            own = {row: self.chain_nodes[longest * (row - begin) :][:longest] for row in chains}
            for depth in range(max(lengths[row] for row in chains)):
                going = [row for row in chains if lengths[row] > depth]
                paths = [Nodes(own[row][: depth + 1], range(-1, depth)) for row in going]
                of_texts = [source[row] for row in going], [starts[row] for row in going]
                ones, depths = [1] * len(going), [depth] * len(going)
                level = Level(rows.tokens[going, depth], ones, *of_texts, depths, paths)
                places = [first[row] + depth for row in going]
                ids[places], scores[places] = self.guesses(level, [orders[place] for place in places], width)
            fold([TextFold(starts[row], source[row], target[row], tuple(own[row][: lengths[row]])) for row in chains])
        return ids, scores

    def rank(self, hidden: Tensor, orders: Sequence[RowOrder], width: int) -> tuple[IntArray, np.ndarray]:
        """The best guesses of hidden rows [rows, d]."""
        from tree_kernels.ranking.triton import ranked_of

        its_orders = torch.from_numpy(numbers_of(orders)).to(hidden.device)
        return ranked_of(self.ranked(hidden, its_orders, width).cpu().numpy())

    def _run(self, rows: Level, orders: Sequence[RowOrder], width: int) -> tuple[Tensor, IntArray]:
        size = self.layers.size_of(rows, width)
        arrays, places = self.layers.arrays(rows, size, self.scratch)
        tokens = np.zeros(size.rows, np.int64)
        tokens[places] = np.where(rows.tokens < len(self.model.embedding), rows.tokens, FOREIGN)
        arrays["tokens"] = tokens
        if width:
            arrays["orders"] = np.zeros((5, size.rows), np.int64)
            arrays["orders"][4] = width  # padded rows need any vocabulary that gives guesses
            arrays["orders"][:, places] = numbers_of(orders)
        given = self._uploaded(size, arrays)
        return self.recordings.run(size, lambda: self._level(given, width)), places

    def _level(self, given: Mapping[str, Tensor], width: int) -> Tensor:
        from tree_kernels.ranking.triton import embed_tokens

        hidden = embed_tokens(given["tokens"], self.model.embedding, self.model.residual)
        hidden = self.layers.run(given, hidden)
        return self.ranked(hidden, given["orders"], width) if width else hidden

    def ranked(self, hidden: Tensor, orders: Tensor, width: int, made: Tensor | None = None) -> Tensor:
        """The best guesses of hidden rows [rows, d], of orders [5, rows] on the device (`rank_rows`)."""
        from tree_kernels.ranking.triton import RowOrders, rank_rows
        from tree_kernels.rows_product.triton import rows_product

        return rank_rows(rows_product(hidden, self._head), RowOrders(*orders), width, self._ids, made)

    def _uploaded(self, size: DeviceLevelSize, arrays: Mapping[str, IntArray]) -> dict[str, Tensor]:
        if size not in self._buffers:
            shapes = {name: array.shape for name, array in arrays.items()}
            self._buffers[size] = StepBuffers(shapes, torch.int64, self.model.device, apart=ALIGNED)
        buffers = self._buffers[size]
        buffers.clear()
        for name, array in arrays.items():
            buffers.host[name][:] = array
        buffers.upload()
        return buffers.device


def numbers_of(orders: Sequence[RowOrder]) -> IntArray:
    """The fields of the rows' orders as an array [5, rows], as `RowOrders` takes them."""
    return np.array(list(zip(*orders, strict=True)), np.int64)
