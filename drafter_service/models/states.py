"""The memory of Mamba-1 layers: each node slot holds a state, which is as small as the inputs of eight tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from dendro.state import Arrays
from torch import Tensor
from tree_kernels.state_step import Slots
from tree_layers.mixers import Mamba1Mixer, Stop
from tree_layers.states import States, StateShape, as_slots

from drafter_service.models.backbone import Backbone
from drafter_service.plan import NO_NODE, Chains, Level, TextFold
from drafter_service.recorded_levels import LevelSize, PaddedLevel


class SavedTexts:
    """Base of memories of recurrent models: texts are saved and loaded as slots of `States`."""

    def __init__(self, saved: States, text_bytes: int, node_bytes: int) -> None:
        """saved: states, text slots first   text_bytes, node_bytes: bytes of one slot"""
        self._saved = saved
        self._text_bytes = text_bytes
        self.node_bytes = node_bytes

    @property
    def layout(self) -> str:
        return self._saved.layout

    def text_bytes(self, longest: int) -> int:
        return self._text_bytes

    def save(self, text: int, tokens: int) -> Arrays:
        return self._saved.save(text)

    def check(self, arrays: Arrays, tokens: int) -> None:
        self._saved.check(arrays)

    def load(self, text: int, arrays: Arrays) -> None:
        self._saved.load(text, arrays)


class StateSlots(SavedTexts):
    """Slots with a state each: text slots, then node slots."""

    def __init__(self, states: States, texts: int) -> None:
        """texts: number of text slots"""
        held = sum(shape.bytes_of(states.dtype) for shape in states.shapes)
        super().__init__(states, held, held)
        self.states = states
        self.first_node = texts

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Copy the state of each path's last node to the text slot."""
        for fold in folds:
            self._saved.copy(self.first_node + fold.path[-1], fold.target)

    def fold_numbers(self, folds: Sequence[TextFold], longest: int) -> dict[str, list[Any]]:
        ends = [self.first_node + fold.path[-1] for fold in folds]
        return {"source": ends, "target": [fold.target for fold in folds]}

    def run_folds(self, given: Mapping[str, Tensor]) -> Tensor:
        for memory in (*self.states.recurrent, *self.states.conv):
            memory.index_copy_(0, given["target"], memory.index_select(0, given["source"]))
        return given["target"]


class StepMixer(Protocol):
    """A layer's Mamba-1 mixer, with the projections around it. Called once per layer in each forward; `Mamba1Mixer` has
    the contracts of its methods."""

    @property
    def shape(self) -> StateShape: ...

    def step(self, u: Tensor, recurrent: Tensor, conv: Tensor, source: Tensor, target: Slots) -> Tensor: ...

    def chain(self, u: Tensor, recurrent: Tensor, conv: Tensor, source: Tensor, stops: Sequence[Stop]) -> Tensor: ...


Mix = Callable[[int, StepMixer, Tensor], Tensor]
"""Runs the mixer of the layer with this number on its input u: [rows, T, d] of chains, [rows, d] of a level."""


class MixedStates(StateSlots):
    """Slots with a state each, and the runs of mixers that read and write them."""

    def __init__(
        self, mixers: Sequence[StepMixer], texts: int, nodes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: type of the activations"""
        super().__init__(States([mixer.shape for mixer in mixers], texts + nodes, dtype, device), texts)
        self._device = device

    def of_chain(self, rows: Chains) -> Mix:
        """Prepare a plan's chains. The returned function runs a layer, which writes its part of the text slots and root
        nodes."""
        states, device = self._saved, self._device
        source = torch.from_numpy(rows.source).to(device)
        stops = [(torch.from_numpy(rows.kept).to(device), as_slots(rows.target, device))]
        if len(rows.roots):
            stops.append((torch.from_numpy(rows.lengths).to(device), as_slots(self.first_node + rows.roots, device)))

        def mix(layer: int, mixer: StepMixer, u: Tensor) -> Tensor:
            return mixer.chain(u, states.recurrent[layer], states.conv[layer], source, stops)

        return mix

    def of_level(self, rows: Level) -> Mix:
        """Prepare a level. The returned function runs a layer, which writes its part of the new nodes' slots."""
        above = np.where(rows.parents == NO_NODE, rows.text_of_rows, self.first_node + rows.parents)
        target = as_slots(self.first_node + rows.slots, self._device)
        return self._of_level(torch.from_numpy(above).to(self._device), target)

    def _of_level(self, source: Tensor, target: Slots) -> Mix:
        """source, target: slots of the states that each row reads and writes"""
        states = self._saved

        def mix(layer: int, mixer: StepMixer, u: Tensor) -> Tensor:
            return mixer.step(u, states.recurrent[layer], states.conv[layer], source, target)

        return mix


class StateMemory(MixedStates):
    """Memory of a Mamba-1 drafter."""

    def __init__(self, model: Backbone[Mamba1Mixer], texts: int, nodes: int) -> None:
        super().__init__([mixer for _, mixer in model.layers], texts, nodes, model.dtype, model.device)
        self._model = model

    def chain(self, rows: Chains) -> Tensor:
        return self._model.through(torch.from_numpy(rows.tokens).to(self._device), self.of_chain(rows))

    def level(self, rows: Level) -> Tensor:
        return self._model.through(torch.from_numpy(rows.tokens).to(self._device), self.of_level(rows))

    def size_of(self, rows: Level) -> LevelSize:
        return LevelSize.of_rows(rows)

    def padded(self, rows: Level, size: LevelSize, scratch: int) -> PaddedLevel:
        tokens, source = np.zeros((2, size.rows), np.int64)
        target = np.full(size.rows, self.first_node + scratch)
        tokens[: rows.count], target[: rows.count] = rows.tokens, self.first_node + rows.slots
        source[: rows.count] = np.where(rows.parents == NO_NODE, rows.text_of_rows, self.first_node + rows.parents)
        return PaddedLevel({"tokens": tokens, "source": source, "target": target}, {}, np.arange(rows.count))

    def run(self, given: Mapping[str, Tensor], size: LevelSize) -> Tensor:
        return self._model.through(given["tokens"], self._of_level(given["source"], given["target"]))
