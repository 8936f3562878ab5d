"""The memory of Mamba-1 drafters: each node slot holds a state, which is as small as the inputs of eight tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from dendro.shelf import Arrays
from torch import Tensor
from tree_layers.mixers import Mamba1Mixer
from tree_layers.states import States, as_slots

from drafter_service.models.backbone import Backbone
from drafter_service.plan import NO_NODE, Chains, Level, TextFold


class SavedTexts:
    """What memories of recurrent models have in common: texts are saved and loaded as slots of `States`."""

    def __init__(self, saved: States, text_bytes: int, node_bytes: int) -> None:
        """saved: its first slots are those of texts   text_bytes, node_bytes: of one slot"""
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
    """Text slots and after them node slots, each with a state."""

    def __init__(self, states: States, texts: int) -> None:
        """texts: number of text slots"""
        held = sum(shape.bytes_of(states.dtype) for shape in states.shapes)
        super().__init__(states, held, held)
        self._first_node = texts

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Copy the last node's state to the text."""
        for fold in folds:
            self._saved.copy(self._first_node + fold.path[-1], fold.target)


class StateMemory(StateSlots):
    """A state in every slot."""

    def __init__(self, model: Backbone[Mamba1Mixer], texts: int, nodes: int) -> None:
        shapes = [mixer.shape for _, mixer in model.layers]
        super().__init__(States(shapes, texts + nodes, model.dtype, model.device), texts)
        self._model = model

    def chain(self, rows: Chains) -> Tensor:
        states, device = self._saved, self._model.device
        source = torch.from_numpy(rows.source).to(device)
        stops = [(torch.from_numpy(rows.kept).to(device), as_slots(rows.target, device))]
        if len(rows.roots):
            stops.append((torch.from_numpy(rows.lengths).to(device), as_slots(self._first_node + rows.roots, device)))

        def mix(layer: int, mixer: Mamba1Mixer, u: Tensor) -> Tensor:
            return mixer.chain(u, states.recurrent[layer], states.conv[layer], source, stops)

        return self._model.through(torch.from_numpy(rows.tokens).to(device), mix)

    def level(self, rows: Level) -> Tensor:
        states, device = self._saved, self._model.device
        above = np.where(rows.parents == NO_NODE, rows.text_of_rows, self._first_node + rows.parents)
        source, target = torch.from_numpy(above).to(device), as_slots(self._first_node + rows.slots, device)

        def mix(layer: int, mixer: Mamba1Mixer, u: Tensor) -> Tensor:
            return mixer.step(u, states.recurrent[layer], states.conv[layer], source, target)

        return self._model.through(torch.from_numpy(rows.tokens).to(device), mix)
