"""Mamba drafters whose forwards are one compiled call each, on a CPU; the models of `mamba.py` are the reference.

Weights are packed and activations are float32 for any dtype of the checkpoint. Saved memories are those of the
reference's, so either form continues what the other saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from dendro.shelf import Arrays
from torch import Tensor
from tree_kernels.mamba_level import shapes
from tree_kernels.mamba_level.cpu import Ints, Product, Scratch, Table, kernels, kind_number
from tree_layers.states import States

from drafter_service.models.backbone import Backbone, Mixer
from drafter_service.models.mamba import Mamba1Model, Mamba2Model
from drafter_service.plan import NO_NODE, Chains, Level, TextFold

CPU = torch.device("cpu")
NONE = -1
"""The end of a sequence that is written to no slot."""
STEPS = {
    shapes.INNER: shapes.INNER_STEP,
    shapes.MIXED: shapes.MIXED_STEP,
    shapes.PICKED: shapes.PICKED_STEP,
    shapes.STEPS: shapes.STEPS_STEP,
}
"""The word with the bytes of a row, by the word with a part of the scratch memory."""
SPARE_ROWS = 4
"""Rows of channels in the spare part."""
SCRATCH = (shapes.NORMED, shapes.READ, *STEPS)
"""The parts of the scratch memory that have rows."""


class FusedEnds:
    """Embedding, final norm and head of a model."""

    form = "fused"

    def __init__(self, model: Backbone[Mixer], kind: str) -> None:
        self.vocabulary = model.vocabulary
        self.dtype = model.dtype
        self.eps = model.eps
        self.width = model.embedding.shape[1]
        self.kernels = kernels(kind)
        self.table = Table(1, shapes.CALL_WORDS)
        self.table.put(0, shapes.EMBEDDING, model.embedding)
        self.table.put(0, shapes.FINAL_NORM, model.norm.float())
        self._head = Product(model.head)
        self.table.put_product(0, shapes.HEAD, self._head)
        words = self.table.words[0]
        words[shapes.EMBEDDING_KIND] = kind_number(model.dtype)
        words[shapes.KNOWN], words[shapes.WIDTH] = model.embedding.shape
        self.scratch = Scratch()

    def set_steps(self, hidden: int, steps: Mapping[int, int]) -> None:
        """Set the bytes of a row of the result, and of each part of the scratch memory by its word."""
        words = self.table.words[0]
        self.hidden_step = words[shapes.HIDDEN_STEP] = hidden
        channels = int(words[shapes.CHANNELS])
        self.steps = {shapes.NORMED: 4 * self.width, shapes.READ: 4 * channels, **steps}
        for word, step in STEPS.items():
            words[step] = self.steps[word]

    def begin(self, call: Ints, tokens: Ints, sequences: Ints) -> Tensor:
        """Set a call's rows, sequences and scratch memory; returns its result [rows, d], which the call writes.

        The caller keeps `tokens` and `sequences` alive until the call has ended.
        """
        count = len(tokens)
        hidden = torch.empty(count, self.hidden_step // 4)
        sizes = tuple(count * self.steps[word] for word in SCRATCH)
        found = self.scratch.parts((*sizes, SPARE_ROWS * self.steps[shapes.MIXED]), count)
        for word, place in zip((*SCRATCH, shapes.SPARE), found, strict=True):
            call[word] = place
        call[shapes.ROWS], call[shapes.TOKENS] = count, tokens.ctypes.data
        call[shapes.SEQUENCES], call[shapes.SEQUENCE_TABLE] = len(sequences), sequences.ctypes.data
        call[shapes.HIDDEN] = hidden.data_ptr()
        return hidden[:, : self.width]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, d] float32 -> [rows, V] float32."""
        rows = len(hidden)
        (normed,) = self.scratch.parts((4 * rows * self.width,), rows)
        made = torch.empty(rows, self._head.step // 4)
        call = self.table.words[0].copy()
        call[shapes.ROWS], call[shapes.NORMED] = rows, normed
        call[shapes.HIDDEN], call[shapes.HIDDEN_STEP] = hidden.data_ptr(), 4 * hidden.stride(0)
        call[shapes.LOGITS], call[shapes.LOGITS_STEP] = made.data_ptr(), self._head.step
        assert hidden.stride(1) == 1 and hidden.dtype == torch.float32
        self.kernels["logits"](call.ctypes.data, self.eps)
        return made[:, : self.vocabulary]


class FusedMamba2Model(FusedEnds):
    """A Mamba-2; its node slots hold inputs."""

    max_length = Mamba2Model.max_length

    def __init__(self, model: Mamba2Model) -> None:
        super().__init__(model, "mamba2")
        first = model.layers[0][1]
        self.shape = first.shape
        self.gate_eps, self.dt_limit = first.eps, first.dt_limit
        heads, width, size = self.shape.state.recurrent
        words = self.table.words[0]
        words[shapes.LAYERS] = len(model.layers)
        words[shapes.CHANNELS], words[shapes.HEADS], words[shapes.SIZE] = heads * width, heads, size
        words[shapes.GROUPS], words[shapes.TAPS] = first.groups, first.conv_weight.shape[0]
        words[shapes.ROUNDED_KIND], words[shapes.STORED_KIND] = kind_number(model.dtype), kind_number(torch.float32)
        self.layers = Table(len(model.layers), shapes.LAYER_WORDS)
        for number, (norm, mixer) in enumerate(model.layers):
            inner, outer = Product(mixer.in_proj, mixer.in_bias), Product(mixer.out_proj, mixer.out_bias)
            self.layers.put_product(number, shapes.IN_PROJ, inner)
            self.layers.put_product(number, shapes.OUT_PROJ, outer)
            for word, tensor in (
                (shapes.NORM, norm.float()),
                (shapes.CONV_WEIGHT, mixer.conv_weight),
                (shapes.CONV_BIAS, mixer.conv_bias),
                (shapes.DT_BIAS, mixer.dt_bias),
                (shapes.A, mixer.A),
                (shapes.D, mixer.D.repeat_interleave(width)),
                (shapes.GATE_NORM, mixer.norm.float()),
            ):
                self.layers.put(number, word, tensor)
        mixed = 4 * first.conv_weight.shape[1]
        steps = {shapes.INNER: inner.step, shapes.MIXED: mixed, shapes.STEPS: 4 * heads, shapes.PICKED: 0}
        self.set_steps(outer.step, steps)

    def memory(self, texts: int, nodes: int) -> FusedInputMemory:
        return FusedInputMemory(self, texts, nodes)


class FusedInputMemory:
    """Text slots with states, node slots with inputs; the reference is `InputMemory`."""

    def __init__(self, model: FusedMamba2Model, texts: int, nodes: int) -> None:
        self._model = model
        shape, layers = model.shape.state, len(model.layers.words)
        heads, width, size = shape.recurrent
        back, channels = shape.conv
        # Empty instead of zeroed: memory is then allocated only when it is first written.
        states = torch.empty(layers, texts, size, heads * width)
        tails = torch.empty(layers, texts, back, channels)
        self._nodes = [
            torch.empty(layers, nodes, numbers)
            for numbers in (channels, heads * width, model.shape.groups * size, heads)
        ]
        recurrent = states.view(layers, texts, size, heads, width).permute(0, 1, 3, 4, 2)
        self._texts = States([shape] * layers, texts, model.dtype, CPU, list(tails), list(recurrent))
        self._tree = np.zeros((nodes, shapes.NODE_WORDS), np.int64)
        self._layers = Table(layers, shapes.LAYER_WORDS)
        self._layers.words[:] = model.layers.words
        stores = dict(zip((shapes.NODE_INPUTS, shapes.NODE_X, shapes.NODE_B, shapes.NODE_DT), self._nodes, strict=True))
        for layer in range(layers):
            for word, store in ({shapes.STATES: states, shapes.TAILS: tails} | stores).items():
                self._layers.put(layer, word, store[layer])
        self._call = model.table.words[0].copy()
        self._call[shapes.LAYER_TABLE] = self._layers.address
        self._call[shapes.NODE_TABLE] = self._tree.ctypes.data
        self._address = int(self._call.ctypes.data)

    @property
    def layout(self) -> str:
        return self._texts.layout

    def text_bytes(self, longest: int) -> int:
        return len(self._layers.words) * self._model.shape.state.bytes_of(torch.float32)

    @property
    def node_bytes(self) -> int:
        return len(self._layers.words) * self._model.shape.node_bytes

    def save(self, text: int, tokens: int) -> Arrays:
        return self._texts.save(text)

    def check(self, arrays: Arrays, tokens: int) -> None:
        self._texts.check(arrays)

    def load(self, text: int, arrays: Arrays) -> None:
        self._texts.load(text, arrays)

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
        hidden = self._forward(rows.tokens.ravel()[places], sequences, new)
        return _placed(hidden, places, texts, time)

    def level(self, rows: Level) -> Tensor:
        new = np.empty((len(rows.tokens), shapes.NEW_WORDS), np.int64)
        new[:, 0], new[:, 1], new[:, 2] = rows.slots, rows.parents, rows.texts.repeat(rows.counts)
        return self._forward(rows.tokens, np.empty((0, shapes.SEQUENCE_WORDS), np.int64), new)

    def fold(self, folds: Sequence[TextFold]) -> None:
        paths = np.array([node for fold in folds for node in fold.path], np.int64)
        table, first = np.empty((len(folds), shapes.FOLD_WORDS), np.int64), 0
        for row, fold in enumerate(folds):
            table[row] = fold.source, fold.target, first, len(fold.path)
            first += len(fold.path)
        call = self._call
        (spare,) = self._model.scratch.parts((SPARE_ROWS * self._model.steps[shapes.MIXED],), 1)
        call[shapes.SPARE], call[shapes.FOLDS] = spare, len(folds)
        call[shapes.FOLD_TABLE], call[shapes.PATHS] = table.ctypes.data, paths.ctypes.data
        self._model.kernels["fold"](self._address)

    def _forward(self, tokens: Ints, sequences: Ints, new: Ints) -> Tensor:
        """Hidden [rows, d] of the sequences' rows, then of the new nodes. new [nodes, NEW_WORDS]"""
        model, call = self._model, self._call
        call[shapes.NEW_NODES], call[shapes.NEW_TABLE] = len(new), new.ctypes.data
        hidden = model.begin(call, tokens, sequences)
        model.kernels["forward"](self._address, model.eps, model.gate_eps, *model.dt_limit)
        return hidden


def _placed(hidden: Tensor, places: Ints, texts: int, time: int) -> Tensor:
    """Rows of chains [rows, d] as [texts, time, d]; zero where a text has no token. places: ids of the rows in it"""
    if texts == 1:
        return hidden[None]
    made = hidden.new_zeros(texts * time, hidden.shape[1])
    made[torch.from_numpy(places)] = hidden
    return made.view(texts, time, -1)


class FusedMamba1Model(FusedEnds):
    """A Mamba-1; its node slots hold states."""

    max_length = Mamba1Model.max_length

    def __init__(self, model: Mamba1Model) -> None:
        super().__init__(model, "mamba")
        first = model.layers[0][1]
        self.shape = first.shape
        channels, size = self.shape.recurrent
        words = self.table.words[0]
        words[shapes.LAYERS] = len(model.layers)
        words[shapes.CHANNELS], words[shapes.SIZE], words[shapes.RANK] = channels, size, first.dt_proj.shape[0]
        words[shapes.TAPS] = first.conv_weight.shape[0]
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
            self.layers.put(number, shapes.CONV_WEIGHT, mixer.conv_weight.float())
            self.layers.put(number, shapes.CONV_BIAS, mixer.conv_bias.float())
            self.layers.put(number, shapes.A, mixer.A.t().contiguous())
            self.layers.put(number, shapes.D, mixer.D)
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


class FusedStateMemory:
    """Text slots and after them node slots, each with a state; the reference is `StateMemory`."""

    def __init__(self, model: FusedMamba1Model, texts: int, nodes: int) -> None:
        self._model = model
        self._first = texts  # the first node's slot
        layers, slots = len(model.layers.words), texts + nodes
        channels, size = model.shape.recurrent
        states = torch.empty(layers, slots, size, channels)
        self._states = States([model.shape] * layers, slots, model.dtype, CPU, recurrent=list(states.transpose(2, 3)))
        self._layers = Table(layers, shapes.LAYER_WORDS)
        self._layers.words[:] = model.layers.words
        for layer in range(layers):
            self._layers.put(layer, shapes.STATES, states[layer])
            self._layers.put(layer, shapes.TAILS, self._states.conv[layer])
        self._call = model.table.words[0].copy()
        self._call[shapes.LAYER_TABLE] = self._layers.address
        self._address = int(self._call.ctypes.data)

    @property
    def layout(self) -> str:
        return self._states.layout

    def text_bytes(self, longest: int) -> int:
        return self.node_bytes

    @property
    def node_bytes(self) -> int:
        return sum(shape.bytes_of(self._states.dtype) for shape in self._states.shapes)

    def save(self, text: int, tokens: int) -> Arrays:
        return self._states.save(text)

    def check(self, arrays: Arrays, tokens: int) -> None:
        self._states.check(arrays)

    def load(self, text: int, arrays: Arrays) -> None:
        self._states.load(text, arrays)

    def chain(self, rows: Chains) -> Tensor:
        texts, time = rows.tokens.shape
        places = np.flatnonzero(np.arange(time) < rows.lengths[:, None])
        sequences = np.empty((texts, shapes.SEQUENCE_WORDS), np.int64)
        sequences[:, shapes.SOURCE], sequences[:, shapes.TARGET] = rows.source, rows.target
        sequences[:, shapes.FIRST] = np.cumsum(rows.lengths) - rows.lengths
        sequences[:, shapes.KEPT], sequences[:, shapes.COUNT] = rows.kept, rows.lengths
        sequences[:, shapes.END] = self._first + rows.roots if len(rows.roots) else NONE
        return _placed(self._forward(rows.tokens.ravel()[places], sequences), places, texts, time)

    def level(self, rows: Level) -> Tensor:
        sequences = np.ones((len(rows.tokens), shapes.SEQUENCE_WORDS), np.int64)
        texts = rows.texts.repeat(rows.counts)
        sequences[:, shapes.SOURCE] = np.where(rows.parents == NO_NODE, texts, self._first + rows.parents)
        sequences[:, shapes.TARGET] = self._first + rows.slots
        sequences[:, shapes.FIRST] = np.arange(len(sequences))
        sequences[:, shapes.END] = NONE
        return self._forward(rows.tokens, sequences)

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Copy the last node's state to the text."""
        for fold in folds:
            self._states.copy(self._first + fold.path[-1], fold.target)

    def _forward(self, tokens: Ints, sequences: Ints) -> Tensor:
        """Hidden [rows, d] of the sequences' rows."""
        hidden = self._model.begin(self._call, tokens, sequences)
        self._model.kernels["forward"](self._address, self._model.eps)
        return hidden


FUSED: Mapping[str, Callable[[Any], Any]] = {"mamba": FusedMamba1Model, "mamba2": FusedMamba2Model}
"""The fused form of a loaded model, by its `model_type`."""
