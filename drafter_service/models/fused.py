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
from drafter_service.models.mamba import Mamba2Model
from drafter_service.plan import NO_NODE, Chains, Level, TextFold

NONE = -1
"""The end of a sequence that is written to no slot."""


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

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, d] float32 -> [rows, V] float32."""
        rows = len(hidden)
        (normed,), _held = self.scratch.parts([4 * rows * self.width], rows)
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
        self.inner_step, self.hidden_step = inner.step, outer.step

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
        self._texts = States([shape] * layers, texts, model.dtype, torch.device("cpu"), list(tails), list(recurrent))
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
        self._mixed = channels

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
        (spare,), _held = self._model.scratch.parts([4 * 4 * self._mixed], 1)
        call[shapes.SPARE], call[shapes.FOLDS] = spare, len(folds)
        call[shapes.FOLD_TABLE], call[shapes.PATHS] = table.ctypes.data, paths.ctypes.data
        self._model.kernels["fold"](self._address)

    def _forward(self, tokens: Ints, sequences: Ints, new: Ints) -> Tensor:
        """Hidden [rows, d] of the sequences' rows, then of the new nodes. new [nodes, NEW_WORDS]"""
        model, call, count = self._model, self._call, len(tokens)
        tokens = np.ascontiguousarray(tokens)
        channels, heads = int(call[shapes.CHANNELS]), int(call[shapes.HEADS])
        hidden = torch.empty(count, model.hidden_step // 4)
        lines = (4 * model.width, model.inner_step, 4 * self._mixed, 4 * heads, 4 * channels)
        sizes = [count * line for line in lines]
        found, _held = model.scratch.parts([*sizes, 4 * 4 * self._mixed], count)
        normed, inner, mixed, steps, read, spare = found
        for word, value in (
            (shapes.ROWS, count),
            (shapes.TOKENS, tokens.ctypes.data),
            (shapes.SEQUENCES, len(sequences)),
            (shapes.SEQUENCE_TABLE, sequences.ctypes.data),
            (shapes.NEW_NODES, len(new)),
            (shapes.NEW_TABLE, new.ctypes.data),
            (shapes.HIDDEN, hidden.data_ptr()),
            (shapes.HIDDEN_STEP, model.hidden_step),
            (shapes.NORMED, normed),
            (shapes.INNER, inner),
            (shapes.INNER_STEP, model.inner_step),
            (shapes.MIXED, mixed),
            (shapes.MIXED_STEP, 4 * self._mixed),
            (shapes.STEPS, steps),
            (shapes.STEPS_STEP, 4 * heads),
            (shapes.READ, read),
            (shapes.SPARE, spare),
        ):
            call[word] = value
        model.kernels["forward"](self._address, model.eps, model.gate_eps, *model.dt_limit)
        return hidden[:, : model.width]


def _placed(hidden: Tensor, places: Ints, texts: int, time: int) -> Tensor:
    """Rows of chains [rows, d] as [texts, time, d]; zero where a text has no token. places: ids of the rows in it"""
    if texts == 1:
        return hidden[None]
    made = hidden.new_zeros(texts * time, hidden.shape[1])
    made[torch.from_numpy(places)] = hidden
    return made.view(texts, time, -1)


FUSED: Mapping[str, Callable[[Any], Any]] = {"mamba2": FusedMamba2Model}
"""The fused form of a loaded model, by its `model_type`."""
