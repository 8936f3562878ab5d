"""Mamba drafters that run a forward in one compiled call on a CPU. The models of `mamba.py` are the reference.

Weights are packed, and activations are float32 for any dtype of the checkpoint. Memories are saved in the reference's
format, so each form continues texts that the other saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tree_kernels.acceptance_head.cpu import HeadCalls
from tree_kernels.mamba_level import shapes
from tree_kernels.mamba_level.cpu import Ints, Product, Scratch, Table, Team, kernels, kind_number, scan_table
from tree_kernels.ranking import Orders
from tree_kernels.ranking.cpu import ranking_of
from tree_kernels.tree_levels import LevelCalls
from tree_layers.states import States

from drafter_service.models.backbone import Backbone, Mixer
from drafter_service.models.mamba import Mamba1Model, Mamba2Model
from drafter_service.models.states import SavedTexts, StateSlots
from drafter_service.plan import NO_NODE, Chains, DraftOutcome, Level, Levels, TextFold

CPU = torch.device("cpu")
NONE = -1
"""Slot number for the end of a sequence that is written to no slot."""
STEPS = {
    shapes.INNER: shapes.INNER_STEP,
    shapes.MIXED: shapes.MIXED_STEP,
    shapes.PICKED: shapes.PICKED_STEP,
    shapes.STEPS: shapes.STEPS_STEP,
}
"""Words of a call by name: key: word with the address of a part of the scratch memory; value: word with the bytes of a
row of that part."""
SPARE_ROWS = 2 * shapes.SCAN_TOKENS
"""Number of rows of channels in the scratch memory's spare part."""
SCRATCH = (shapes.NORMED, shapes.READ, *STEPS)
"""Words of the parts of the scratch memory that have rows."""
SCRATCH_WORDS = [*SCRATCH, shapes.SPARE]


class FusedEnds:
    """Embedding, final norm and head of a model."""

    form = "fused"

    def __init__(self, model: Backbone[Mixer], kind: str, threads: int) -> None:
        """threads: number of threads that share the products of a call"""
        self.vocabulary = model.vocabulary
        self.draft_ids = model.draft_ids
        self.dtype = model.dtype
        self.width = self.hidden_size = model.hidden_size
        self.kernels = kernels(kind)
        self.team = Team(self.kernels, threads)
        self.forward, self._logits = (self.kernels.address(name) for name in ("forward", "logits"))
        self.embed, self.normed = model.embed, model.normed
        self.table = Table(1, shapes.CALL_WORDS)
        self.table.put(0, shapes.EMBEDDING, model.embedding)
        self.table.put(0, shapes.FINAL_NORM, model.norm.float())
        self.head = Product(model.head)
        self.table.put_product(0, shapes.HEAD, self.head)
        words = self.table.words[0]
        words[shapes.EMBEDDING_KIND] = kind_number(model.dtype)
        words[shapes.KNOWN], words[shapes.WIDTH] = model.embedding.shape
        self.set_number(shapes.EPS, model.eps)
        self.scratch = Scratch()

    def set_number(self, word: int, value: float) -> None:
        """Set a word that is a float32."""
        self.table.words[0, word : word + 1].view(np.float32)[0] = value

    def set_steps(self, hidden: int, steps: Mapping[int, int]) -> None:
        """Set the bytes of a row of the result, and of a row of each part of the scratch memory. steps: by word"""
        words = self.table.words[0]
        self.hidden_step = words[shapes.HIDDEN_STEP] = hidden
        channels = int(words[shapes.CHANNELS])
        self.steps = {shapes.NORMED: 4 * self.width, shapes.READ: 4 * channels, **steps}
        for word, step in STEPS.items():
            words[step] = self.steps[word]

    def lend_scratch(self, call: Ints, rows: int, *more: int) -> list[int]:
        """Set a call's scratch memory for `rows` rows. Returns the addresses of further parts of `more` bytes a row.
        The memory may be used until the next call."""
        spare = max(SPARE_ROWS * self.steps[shapes.MIXED], 4 * self.width)  # also a row of a layer's inputs
        sizes = [rows * self.steps[word] for word in SCRATCH] + [spare]
        found = self.scratch.parts((*sizes, *(rows * step for step in more)), rows)
        call[SCRATCH_WORDS] = found[: len(SCRATCH_WORDS)]
        return found[len(SCRATCH_WORDS) :]

    def begin(self, call: Ints, tokens: Ints) -> Tensor:
        """Set a call's rows and scratch memory. Returns the tensor [rows, d] into which the call writes its result.

        The caller keeps `tokens` alive until the call has ended.
        """
        hidden = torch.empty(len(tokens), self.hidden_step // 4)
        self.lend_scratch(call, len(tokens))
        call[shapes.ROWS], call[shapes.TOKENS] = len(tokens), tokens.ctypes.data
        call[shapes.HIDDEN] = hidden.data_ptr()
        return hidden[:, : self.width]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, V] float32 of hidden [rows, d] float32."""
        return self.scored(hidden)[0]

    def scored(self, hidden: Tensor) -> tuple[Tensor, Ints]:
        """Logits [rows, V] of hidden [rows, d] float32, and the words of the call, whose NORMED and LOGITS hold its
        results until the next call."""
        rows = len(hidden)
        (normed,) = self.scratch.parts((4 * rows * self.width,), rows)
        made = torch.empty(rows, self.head.step // 4)
        call = self.table.words[0].copy()
        call[shapes.ROWS], call[shapes.NORMED] = rows, normed
        call[shapes.HIDDEN], call[shapes.HIDDEN_STEP] = hidden.data_ptr(), 4 * hidden.stride(0)
        call[shapes.LOGITS], call[shapes.LOGITS_STEP] = made.data_ptr(), self.head.step
        assert hidden.stride(1) == 1 and hidden.dtype == torch.float32
        self.team.run(self._logits, call.ctypes.data, call)
        return made[:, : self.vocabulary], call


class FusedMamba2Model(FusedEnds):
    """A Mamba-2 in its fused form; its node slots hold inputs."""

    max_length = Mamba2Model.max_length

    def __init__(self, model: Mamba2Model, threads: int = 1) -> None:
        super().__init__(model, "mamba2", threads)
        first = model.layers[0][1]
        self.shape = first.shape
        self.set_number(shapes.GATE_EPS, first.eps)
        self.set_number(shapes.LEAST_DT, first.scan.dt_limit[0])
        self.set_number(shapes.MOST_DT, first.scan.dt_limit[1])
        heads, width, size = self.shape.state.recurrent
        words = self.table.words[0]
        words[shapes.LAYERS] = len(model.layers)
        words[shapes.CHANNELS], words[shapes.HEADS], words[shapes.SIZE] = heads * width, heads, size
        words[shapes.GROUPS], words[shapes.TAPS] = first.scan.groups, first.scan.conv_weight.shape[0]
        words[shapes.ROUNDED_KIND], words[shapes.STORED_KIND] = kind_number(model.dtype), kind_number(torch.float32)
        words[shapes.SCANS] = scan_table().ctypes.data  # kept for ever by the cache
        self.layers = Table(len(model.layers), shapes.LAYER_WORDS)
        for number, (norm, mixer) in enumerate(model.layers):
            inner, outer = Product(mixer.in_proj, mixer.in_bias), Product(mixer.out_proj, mixer.out_bias)
            self.layers.put_product(number, shapes.IN_PROJ, inner)
            self.layers.put_product(number, shapes.OUT_PROJ, outer)
            for word, tensor in (
                (shapes.NORM, norm.float()),
                (shapes.CONV_WEIGHT, mixer.scan.conv_weight),
                (shapes.CONV_BIAS, mixer.scan.conv_bias),
                (shapes.DT_BIAS, mixer.scan.dt_bias),
                (shapes.A, mixer.scan.A),
                (shapes.D, mixer.scan.D.repeat_interleave(width)),
                (shapes.GATE_NORM, mixer.norm.float()),
            ):
                self.layers.put(number, word, tensor)
        mixed = 4 * first.scan.conv_weight.shape[1]
        steps = {shapes.INNER: inner.step, shapes.MIXED: mixed, shapes.STEPS: 4 * heads, shapes.PICKED: 0}
        self.set_steps(outer.step, steps)

    def memory(self, texts: int, nodes: int) -> FusedInputMemory:
        return FusedInputMemory(self, texts, nodes)


class OneCallLevels(ABC):
    """Runs the levels of a `FusedMemory`, one or more in a call."""

    def __init__(self, model: FusedEnds, layers: Table, count: int, table: int, entry: int) -> None:
        """layers: table of the layers with this memory's stores   count, table: words of a call with the number and the
        address of the rows' entries   entry: words of an entry"""
        self._ends = model
        self._layers = layers
        self._call = model.table.words[0].copy()
        self._call[shapes.LAYER_TABLE] = layers.address
        self._address = int(self._call.ctypes.data)
        self._count, self._table = count, table
        places = shapes.ROWS, shapes.TOKENS, count, table, shapes.SEQUENCES
        self._levels = LevelCalls(model.kernels, self._call, places, entry, model.team.run)
        self._head: HeadCalls | None = None

    def use_head(self, head: HeadCalls) -> None:
        self._head = head
        self._levels.use_head(head)

    @abstractmethod
    def _enter(self, table: Ints, places: Ints, slots: Ints, parents: Ints, texts: Ints | int) -> None:
        """Called before each call for a level. Fills the table [rows, entry] of new nodes.

        places: number of each row in its level   slots, parents: node slots of the rows and of their parents
        texts: slots of the rows' texts
        """

    @abstractmethod
    def _enter_text(self, root: Ints, rows: Levels) -> None:
        """Called after `_enter` where a text's tokens come before the root of its tree. root: the root's entry"""
        ...

    def level(self, rows: Level) -> Tensor:
        self._levels.reserve(rows.count, 0)
        table = self._levels.table[: rows.count]
        self._enter(table, np.arange(rows.count), rows.slots, rows.parents, rows.text_of_rows)
        self._call[self._count], self._call[self._table] = rows.count, table.ctypes.data
        return self._forward(rows.tokens)

    def guesses(
        self, rows: Level | Levels, groups: Sequence[int], depths: Sequence[int], orders: Orders, width: int
    ) -> DraftOutcome:
        ends, step = self._ends, self._ends.head.step
        assert max(orders.vocabularies) <= ends.vocabulary, "the head has fewer tokens"
        self._levels.reserve(rows.count, width)
        self._levels.tokens[: len(rows.tokens)] = rows.tokens
        counts, entries = self._set_levels(rows) if isinstance(rows, Levels) else self._set_level(rows)
        self._call[shapes.HIDDEN], logits = ends.lend_scratch(self._call, max(counts), ends.hidden_step, step)
        self._call[shapes.LOGITS], self._call[shapes.LOGITS_STEP] = logits, step
        return DraftOutcome(*self._levels.run(counts, groups, depths, orders, width, logits, step, entries))

    def _set_level(self, rows: Level) -> tuple[Sequence[int], int]:
        """Prepare `_levels` for a level. Returns the rows of each level, and the entries of the first one."""
        count, texts = rows.count, rows.texts[0] if len(rows.texts) == 1 else rows.text_of_rows
        self._enter(self._levels.table[:count], np.arange(count), rows.slots, rows.parents, texts)
        return [count], count

    def _set_levels(self, rows: Levels) -> tuple[Sequence[int], int]:
        """Prepare `_levels` for levels of one tree. Returns what `_set_level` does."""
        levels, count, first = self._levels, rows.count, rows.text_rows
        nodes = count - first
        slots, before = np.array(rows.nodes.slots, np.int64), len(rows.nodes.slots) - nodes
        above = np.array(rows.nodes.above[before:], np.int64)
        levels.above[first:count], levels.ranks[first:count] = above + (first - before), rows.ranks
        places = np.array([place for each in rows.counts for place in range(each)], np.int64)
        parents = np.where(above < 0, NO_NODE, slots[above])
        self._enter(levels.table[:nodes], places, slots[before:], parents, rows.text)
        if first:
            self._enter_text(levels.table[0], rows)
        return [first + rows.counts[0], *rows.counts[1:]], rows.counts[0]

    def guesses_of_hidden(
        self, hidden: Tensor, groups: Sequence[int], depths: Sequence[int], orders: Orders, width: int
    ) -> DraftOutcome:
        (logits, words), head, rows = self._ends.scored(hidden), self._head, len(hidden)
        ranking = ranking_of(logits, groups, orders, width)
        if head is None:
            return DraftOutcome(*ranking.results(rows, width))
        head.reserve(rows, width)
        head.set(words.ctypes.data, ranking.words.ctypes.data, groups, depths)
        head.run()
        return DraftOutcome(*ranking.results(rows, width), head.results(rows, width))

    def _forward(self, tokens: Ints, rounds: bool = False) -> Tensor:
        """Hidden rows [rows, d] of the rows that the call's tables describe. rounds: the layers' products may round
        their inputs to the checkpoint's dtype"""
        hidden = self._ends.begin(self._call, tokens)
        self._call[shapes.ROUNDS] = rounds and self._ends.dtype == torch.bfloat16
        self._ends.team.run(self._ends.forward, self._address, self._call)
        self._call[shapes.ROUNDS] = 0
        return hidden


class FusedInputMemory(OneCallLevels, SavedTexts):
    """Text slots with states, node slots with inputs; the reference is `InputMemory`."""

    def __init__(self, model: FusedMamba2Model, texts: int, nodes: int) -> None:
        self._model = model
        shape, layers = model.shape.state, len(model.layers.words)
        heads, width, size = shape.recurrent
        back, channels = shape.conv
        # Memory that is empty instead of zeroed is allocated only when it is first written.
        states = torch.empty(layers, texts, size, heads * width)
        tails = torch.empty(layers, texts, back, channels)
        self._nodes = [
            torch.empty(layers, nodes, numbers)
            for numbers in (channels, heads * width, model.shape.groups * size, heads)
        ]
        recurrent = states.view(layers, texts, size, heads, width).permute(0, 1, 3, 4, 2)
        saved = States([shape] * layers, texts, model.dtype, CPU, list(tails), list(recurrent))
        SavedTexts.__init__(self, saved, layers * shape.bytes_of(torch.float32), layers * model.shape.node_bytes)
        self._tree = np.zeros((nodes, shapes.NODE_WORDS), np.int64)
        table = Table(layers, shapes.LAYER_WORDS)
        table.words[:] = model.layers.words
        stores = dict(zip((shapes.NODE_INPUTS, shapes.NODE_X, shapes.NODE_B, shapes.NODE_DT), self._nodes, strict=True))
        for layer in range(layers):
            for word, store in ({shapes.STATES: states, shapes.TAILS: tails} | stores).items():
                table.put(layer, word, store[layer])
        OneCallLevels.__init__(self, model, table, shapes.NEW_NODES, shapes.NEW_TABLE, shapes.NEW_WORDS)
        self._call[shapes.NODE_TABLE] = self._tree.ctypes.data
        self._levels.fold_first(model.kernels.address("fold"), shapes.FOLDS)
        self._folding: tuple[Ints, ...] = ()  # arrays to which the call's addresses of folds point
        self._text = np.zeros((1, shapes.SEQUENCE_WORDS), np.int64)  # tokens of a text before the root of its tree

    def _enter(self, table: Ints, places: Ints, slots: Ints, parents: Ints, texts: Ints | int) -> None:
        table[:, 0], table[:, 1], table[:, 2] = slots, parents, texts
        self._call[shapes.SEQUENCES] = 0

    def _enter_text(self, root: Ints, rows: Levels) -> None:
        row, count = self._text[0], rows.text_rows
        row[shapes.SOURCE], row[shapes.TARGET] = rows.source, rows.text
        row[shapes.FIRST], row[shapes.KEPT], row[shapes.COUNT], row[shapes.END] = 0, count, count, NONE
        self._call[shapes.SEQUENCES], self._call[shapes.SEQUENCE_TABLE] = 1, self._text.ctypes.data

    def chain(self, rows: Chains) -> Tensor:
        texts, time = rows.tokens.shape
        kept = rows.kept
        counted = np.arange(time) < kept[:, None]
        places = np.flatnonzero(counted)
        if len(rows.roots):
            places = np.append(places, np.arange(texts) * time + kept)
        sequences = np.empty((texts, shapes.SEQUENCE_WORDS), np.int64)
        sequences[:, shapes.SOURCE], sequences[:, shapes.TARGET] = rows.source, rows.target
        sequences[:, shapes.FIRST], sequences[:, shapes.KEPT] = np.cumsum(kept) - kept, kept
        sequences[:, shapes.COUNT], sequences[:, shapes.END] = kept, NONE
        new = np.empty((len(rows.roots), shapes.NEW_WORDS), np.int64)
        new[:, 0], new[:, 1], new[:, 2] = rows.roots, NO_NODE, rows.target[: len(rows.roots)]
        call = self._call
        call[shapes.SEQUENCES], call[shapes.SEQUENCE_TABLE] = texts, sequences.ctypes.data
        call[shapes.NEW_NODES], call[shapes.NEW_TABLE] = len(new), new.ctypes.data
        return _placed(self._forward(rows.tokens.ravel()[places], not len(rows.roots)), places, texts, time)

    def fold(self, folds: Sequence[TextFold]) -> None:
        self.fold_first(folds)
        self.fold_rest()

    def fold_first(self, folds: Sequence[TextFold]) -> None:
        paths = np.array([node for fold in folds for node in fold.path], np.int64)
        table, first = np.empty((len(folds), shapes.FOLD_WORDS), np.int64), 0
        for row, fold in enumerate(folds):
            table[row] = fold.source, fold.target, first, len(fold.path)
            first += len(fold.path)
        call, self._folding = self._call, (table, paths)
        call[shapes.FOLDS], call[shapes.FOLD_TABLE], call[shapes.PATHS] = (
            len(folds),
            table.ctypes.data,
            paths.ctypes.data,
        )

    def fold_rest(self) -> None:
        if self._call[shapes.FOLDS]:
            sizes = (SPARE_ROWS * self._model.steps[shapes.MIXED],)
            (self._call[shapes.SPARE],) = self._model.scratch.parts(sizes, 1)
            self._model.kernels.functions["fold"](self._address)
            self._call[shapes.FOLDS] = 0


def _placed(hidden: Tensor, places: Ints, texts: int, time: int) -> Tensor:
    """Arrange rows of chains [rows, d] as [texts, time, d], zero where a text has no token.

    places [rows]: text * time + t of each row
    """
    if texts == 1:
        return hidden[None]
    made = hidden.new_zeros(texts * time, hidden.shape[1])
    made[torch.from_numpy(places)] = hidden
    return made.view(texts, time, -1)


class FusedMamba1Model(FusedEnds):
    """A Mamba-1 in its fused form; its node slots hold states."""

    max_length = Mamba1Model.max_length

    def __init__(self, model: Mamba1Model, threads: int = 1) -> None:
        super().__init__(model, "mamba", threads)
        first = model.layers[0][1]
        self.shape = first.shape
        channels, size = self.shape.recurrent
        words = self.table.words[0]
        words[shapes.LAYERS] = len(model.layers)
        words[shapes.CHANNELS], words[shapes.SIZE], words[shapes.RANK] = channels, size, first.dt_proj.shape[0]
        words[shapes.TAPS] = first.scan.conv_weight.shape[0]
        words[shapes.ROUNDED_KIND] = words[shapes.STORED_KIND] = kind_number(model.dtype)
        self.layers = Table(len(model.layers), shapes.LAYER_WORDS)
        for number, (norm, mixer) in enumerate(model.layers):
            inner, outer = Product(mixer.in_proj, mixer.in_bias), Product(mixer.out_proj, mixer.out_bias)
            picked, steps = Product(mixer.x_proj), Product(mixer.dt_proj, mixer.dt_bias)
            self.layers.put_product(number, shapes.IN_PROJ, inner)
            self.layers.put_product(number, shapes.OUT_PROJ, outer)
            self.layers.put_product(number, shapes.PICK, picked)
            self.layers.put_product(number, shapes.DT_PROJ, steps)
            self.layers.put(number, shapes.NORM, norm.float())
            self.layers.put(number, shapes.CONV_WEIGHT, mixer.scan.conv_weight.float())
            self.layers.put(number, shapes.CONV_BIAS, mixer.scan.conv_bias.float())
            self.layers.put(number, shapes.A, mixer.scan.A.t().contiguous())
            self.layers.put(number, shapes.D, mixer.scan.D)
        self.set_steps(
            outer.step,
            {
                shapes.INNER: inner.step,
                shapes.MIXED: 4 * channels,
                shapes.STEPS: steps.step,
                shapes.PICKED: picked.step,
            },
        )

    def memory(self, texts: int, nodes: int) -> FusedStateMemory:
        return FusedStateMemory(self, texts, nodes)


class FusedStateMemory(OneCallLevels, StateSlots):
    """Text slots and node slots with states; the reference is `StateMemory`."""

    def __init__(self, model: FusedMamba1Model, texts: int, nodes: int) -> None:
        layers, slots = len(model.layers.words), texts + nodes
        channels, size = model.shape.recurrent
        states = torch.empty(layers, slots, size, channels)
        saved = States([model.shape] * layers, slots, model.dtype, CPU, recurrent=list(states.transpose(2, 3)))
        StateSlots.__init__(self, saved, texts)
        table = Table(layers, shapes.LAYER_WORDS)
        table.words[:] = model.layers.words
        for layer in range(layers):
            table.put(layer, shapes.STATES, states[layer])
            table.put(layer, shapes.TAILS, saved.conv[layer])
        OneCallLevels.__init__(self, model, table, shapes.SEQUENCES, shapes.SEQUENCE_TABLE, shapes.SEQUENCE_WORDS)

    def fold_first(self, folds: Sequence[TextFold]) -> None:
        self.fold(folds)

    def fold_rest(self) -> None:
        pass  # `fold_first` has folded all texts

    def _enter(self, table: Ints, places: Ints, slots: Ints, parents: Ints, texts: Ints | int) -> None:
        table[:, shapes.SOURCE] = np.where(parents == NO_NODE, texts, self.first_node + parents)
        table[:, shapes.TARGET] = self.first_node + slots
        table[:, shapes.FIRST] = places
        table[:, shapes.KEPT] = table[:, shapes.COUNT] = 1
        table[:, shapes.END] = NONE

    def _enter_text(self, root: Ints, rows: Levels) -> None:
        root[shapes.END] = root[shapes.TARGET]
        root[shapes.SOURCE], root[shapes.TARGET] = rows.source, rows.text
        root[shapes.KEPT], root[shapes.COUNT] = rows.text_rows, rows.text_rows + 1

    def chain(self, rows: Chains) -> Tensor:
        texts, time = rows.tokens.shape
        places = rows.places
        sequences = np.empty((texts, shapes.SEQUENCE_WORDS), np.int64)
        sequences[:, shapes.SOURCE], sequences[:, shapes.TARGET] = rows.source, rows.target
        sequences[:, shapes.FIRST] = np.cumsum(rows.lengths) - rows.lengths
        sequences[:, shapes.KEPT], sequences[:, shapes.COUNT] = rows.kept, rows.lengths
        sequences[:, shapes.END] = self.first_node + rows.roots if len(rows.roots) else NONE
        self._call[shapes.SEQUENCES], self._call[shapes.SEQUENCE_TABLE] = texts, sequences.ctypes.data
        return _placed(self._forward(rows.tokens.ravel()[places], not len(rows.roots)), places, texts, time)


FUSED: Mapping[str, Callable[[Any, int], Any]] = {"mamba": FusedMamba1Model, "mamba2": FusedMamba2Model}
"""Makes the fused form of a loaded model, for a number of threads, by `model_type`."""
