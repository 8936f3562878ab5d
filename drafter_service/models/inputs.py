"""The memory of Mamba-2 layers: a node slot holds the node's inputs, a text slot a state
(docs/design/scan.md#levels)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from dendro.tree import IntArray
from torch import Tensor
from tree_kernels.level_scan import Lines
from tree_kernels.state_step import Slots
from tree_layers.mixers import Mamba2Mixer, Root
from tree_layers.nodes import LayerNodes, LevelStep, NodeFolds, NodeLayout, NodeStates
from tree_layers.states import as_slots

from drafter_service.models.backbone import Backbone
from drafter_service.models.states import SavedTexts
from drafter_service.plan import NO_NODE, Chains, Level, TextFold
from drafter_service.recorded_levels import LevelSize, PaddedLevel


class NodeMixer(Protocol):
    """A layer's Mamba-2 mixer, with the projections around it. Called once per layer in each forward; `Mamba2Mixer` has
    the contracts of its methods."""

    @property
    def A(self) -> Tensor: ...

    @property
    def shape(self) -> NodeLayout: ...

    def level(self, u: Tensor, memory: LayerNodes, step: LevelStep) -> Tensor: ...

    def chain(
        self, u: Tensor, memory: LayerNodes, source: Tensor, kept: Tensor, target: Slots, root: Root | None
    ) -> Tensor: ...


Mix = Callable[[int, NodeMixer, Tensor], Tensor]
"""Runs the mixer of the layer with this number on its input u: [rows, T, d] of chains, [rows, d] of a level."""


class InputSlots(SavedTexts):
    """Text slots with states, node slots with inputs. All mixers have equal shapes."""

    def __init__(
        self, mixers: Sequence[NodeMixer], texts: int, nodes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: type of the activations"""
        shape, count = mixers[0].shape, len(mixers)
        self._memory = self.nodes = NodeStates(shape, count, texts, nodes, dtype, device)
        super().__init__(self._memory.texts, count * shape.state.bytes_of(torch.float32), count * shape.node_bytes)
        self._device = device
        self._factors = torch.stack([mixer.A for mixer in mixers])[:, None, None]  # [layers, 1, 1, H]

    def of_chain(self, rows: Chains) -> Mix:
        """Prepare a plan's chains. The returned function runs a layer, which writes its part of the text slots and root
        nodes."""
        memory, device = self._memory, self._device
        source, kept = torch.from_numpy(rows.source).to(device), torch.from_numpy(rows.kept).to(device)
        target, root = as_slots(rows.target, device), None
        if len(rows.roots):
            root = Root(torch.arange(len(rows.roots), device=device), *memory.slots(rows.roots))

        def mix(layer: int, mixer: NodeMixer, u: Tensor) -> Tensor:
            return mixer.chain(u, memory.layers[layer], source, kept, target, root)

        return mix

    def of_level(self, rows: Level) -> Mix:
        """Prepare a level. The returned function runs a layer, which writes its part of the new nodes' slots."""
        memory, device = self._memory, self._device
        written = rows.slots
        taps = memory.taps(written, rows.text_of_rows, rows.ancestors(memory.back))
        trees, new = len(rows.counts), max(rows.counts)
        places = None
        if len(written) < trees * new:
            padding = new * np.arange(1, trees + 1) - np.cumsum(rows.counts)  # [trees] padded rows so far
            places = torch.from_numpy(np.arange(len(written)) + np.repeat(padding, rows.counts)).to(device)
        slots, raw = memory.slots(written)
        step = LevelStep(
            slots=slots,
            raw=raw,
            taps=torch.from_numpy(taps).to(device),
            nodes=as_slots(rows.nodes.ravel(), device),
            trees=trees,
            lines=Lines.of(rows.lines, new, device),
            texts=list(rows.texts),
            places=places,
            new=new,
        )
        return self._of_level(step)

    def _of_level(self, step: LevelStep) -> Mix:
        memory = self._memory

        def mix(layer: int, mixer: NodeMixer, u: Tensor) -> Tensor:
            return mixer.level(u, memory.layers[layer], step)

        return mix

    def fold(self, folds: Sequence[TextFold]) -> None:
        numbers = self.fold_numbers(folds, max(len(fold.path) for fold in folds))
        target = as_slots(np.array(numbers.pop("target")), self._device)
        given = {name: torch.tensor(each, dtype=torch.int64, device=self._device) for name, each in numbers.items()}
        self._memory.fold(NodeFolds(target=target, **given), self._factors)

    def fold_numbers(self, folds: Sequence[TextFold], longest: int) -> dict[str, list[Any]]:
        first, tail = self._memory.first, self._memory.tail
        return {
            "source": [fold.source for fold in folds],
            "target": [fold.target for fold in folds],
            "paths": [[*fold.path, *[NO_NODE] * (longest - len(fold.path))] for fold in folds],
            "tails": [[*tail(fold.source), *[first + node for node in fold.path]][len(fold.path) :] for fold in folds],
            "into": [tail(fold.target) for fold in folds],
        }

    def run_folds(self, given: Mapping[str, Tensor]) -> Tensor:
        self._memory.fold(NodeFolds(**given), self._factors)
        return given["target"]


class InputMemory(InputSlots):
    """Memory of a Mamba-2 drafter."""

    def __init__(self, model: Backbone[Mamba2Mixer], texts: int, nodes: int) -> None:
        super().__init__([mixer for _, mixer in model.layers], texts, nodes, model.dtype, model.device)
        self._model = model

    def chain(self, rows: Chains) -> Tensor:
        return self._model.through(torch.from_numpy(rows.tokens).to(self._device), self.of_chain(rows))

    def level(self, rows: Level) -> Tensor:
        return self._model.through(torch.from_numpy(rows.tokens).to(self._device), self.of_level(rows))

    def size_of(self, rows: Level) -> LevelSize:
        return LevelSize.of(rows)

    def padded(self, rows: Level, size: LevelSize, scratch: int) -> PaddedLevel:
        """Lay out each tree as padding, the nodes before the level, the level's nodes, and their padding."""
        memory, near = self._memory, rows.ancestors(self._memory.back)
        taps = memory.taps(rows.slots, rows.text_of_rows, near)
        first_new = size.nodes - size.new
        places = np.concatenate([tree * size.new + np.arange(count) for tree, count in enumerate(rows.counts)])
        nodes = np.full((size.trees, size.nodes), NO_NODE)
        lines = np.tile(np.eye(size.nodes, dtype=np.bool_), (size.trees, 1, 1))
        nodes[:, first_new:] = scratch
        for tree, (its, count) in enumerate(zip(rows.trees, rows.counts, strict=True)):
            held = np.arange(first_new + count - len(its.slots), first_new + count)
            nodes[tree, held] = its.slots
            lines[tree][np.ix_(held, held)] = rows.lines[tree, -len(its.slots) :, -len(its.slots) :]
        whole = {
            "tokens": _placed(rows.tokens, places, np.zeros(size.rows, np.int64)),
            "slots": _placed(rows.slots, places, np.full(size.rows, scratch)),
            "taps": _placed(taps, places, np.zeros((size.rows, taps.shape[1]), np.int64)),
            "nodes": nodes.ravel(),
            "texts": _placed(np.array(rows.texts), np.arange(len(rows.texts)), np.zeros(size.trees, np.int64)),
        }
        whole["raw"] = memory.first + whole["slots"]
        bars = np.where(lines[:, None, first_new:], np.float32(0), np.float32(-np.inf))
        return PaddedLevel(whole, {"sums": lines.transpose(0, 2, 1).astype(np.float32), "bars": bars}, places)

    def run(self, given: Mapping[str, Tensor], size: LevelSize) -> Tensor:
        step = LevelStep(
            slots=given["slots"],
            raw=given["raw"],
            taps=given["taps"],
            nodes=given["nodes"],
            trees=size.trees,
            lines=Lines(given["sums"], given["bars"]),
            texts=given["texts"],
            places=None,
            new=size.new,
        )
        return self._model.through(given["tokens"], self._of_level(step))


def _placed(rows: IntArray, places: IntArray, padding: IntArray) -> IntArray:
    """The padding with these rows in their places."""
    padding[places] = rows
    return padding
