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


class StateMemory:
    """Text slots and after them node slots, each with a state."""

    def __init__(self, model: Backbone[Mamba1Mixer], texts: int, nodes: int) -> None:
        self._model = model
        self._texts = texts
        self._states = States([mixer.shape for _, mixer in model.layers], texts + nodes, model.dtype, model.device)

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
        states, device = self._states, self._model.device
        source = torch.from_numpy(rows.source).to(device)
        stops = [(torch.from_numpy(rows.kept).to(device), as_slots(rows.target, device))]
        if len(rows.roots):
            stops.append((torch.from_numpy(rows.lengths).to(device), as_slots(self._texts + rows.roots, device)))

        def mix(layer: int, mixer: Mamba1Mixer, u: Tensor) -> Tensor:
            return mixer.chain(u, states.recurrent[layer], states.conv[layer], source, stops)

        return self._model.through(torch.from_numpy(rows.tokens).to(device), mix)

    def level(self, rows: Level) -> Tensor:
        states, device = self._states, self._model.device
        texts = rows.texts.repeat(rows.counts)
        above = np.where(rows.parents == NO_NODE, texts, self._texts + rows.parents)
        source, target = torch.from_numpy(above).to(device), as_slots(self._texts + rows.slots, device)

        def mix(layer: int, mixer: Mamba1Mixer, u: Tensor) -> Tensor:
            return mixer.step(u, states.recurrent[layer], states.conv[layer], source, target)

        return self._model.through(torch.from_numpy(rows.tokens).to(device), mix)

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Copy the last node's state to the text."""
        for fold in folds:
            self._states.copy(self._texts + fold.path[-1], fold.target)
