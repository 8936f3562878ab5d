"""The memory of Mamba-2 drafters: a node slot holds the node's inputs, a text slot a state (ALGORITHMS 1.5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from tree_kernels.level_scan import Lines
from tree_layers.mixers import Mamba2Mixer, Root
from tree_layers.nodes import LevelStep, NodeStates
from tree_layers.states import as_slots

from drafter_service.models.backbone import Backbone
from drafter_service.models.states import SavedTexts
from drafter_service.plan import NO_NODE, Chains, Level, TextFold


class InputMemory(SavedTexts):
    """Text slots with states, node slots with inputs."""

    def __init__(self, model: Backbone[Mamba2Mixer], texts: int, nodes: int) -> None:
        shape, count = model.layers[0][1].shape, len(model.layers)
        self._memory = NodeStates(shape, count, texts, nodes, model.dtype, model.device)
        super().__init__(self._memory.texts, count * shape.state.bytes_of(torch.float32), count * shape.node_bytes)
        self._model = model
        self._factors = torch.stack([mixer.A for _, mixer in model.layers])[:, None, None]  # [layers, 1, 1, H]

    def chain(self, rows: Chains) -> Tensor:
        memory, device = self._memory, self._model.device
        source, kept = torch.from_numpy(rows.source).to(device), torch.from_numpy(rows.kept).to(device)
        target, root = as_slots(rows.target, device), None
        if len(rows.roots):
            # The roots' taps point to the inputs at the ends of their texts, which this chain writes.
            memory.hang(rows.roots, rows.target, np.full_like(rows.roots, NO_NODE))
            root = Root(torch.arange(len(rows.roots), device=device), *memory.slots(rows.roots))

        def mix(layer: int, mixer: Mamba2Mixer, u: Tensor) -> Tensor:
            return mixer.chain(u, memory.layers[layer], source, kept, target, root)

        return self._model.through(torch.from_numpy(rows.tokens).to(device), mix)

    def level(self, rows: Level) -> Tensor:
        memory, device = self._memory, self._model.device
        written = rows.slots
        taps = memory.hang(written, rows.text_of_rows, rows.parents)
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

        def mix(layer: int, mixer: Mamba2Mixer, u: Tensor) -> Tensor:
            return mixer.level(u, memory.layers[layer], step)

        return self._model.through(torch.from_numpy(rows.tokens).to(device), mix)

    def fold(self, folds: Sequence[TextFold]) -> None:
        paths = np.full((len(folds), max(len(fold.path) for fold in folds)), NO_NODE, np.int64)
        for row, fold in enumerate(folds):
            paths[row, : len(fold.path)] = fold.path
        source = np.array([fold.source for fold in folds], np.int64)
        target = np.array([fold.target for fold in folds], np.int64)
        self._memory.fold(source, target, paths, self._factors)
