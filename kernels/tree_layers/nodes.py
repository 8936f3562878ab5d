"""Mamba-2's memory: inputs for a tree's nodes, states for texts (docs/design/scan.md#levels).

A node has the inputs of a layer's convolution and recurrence, and no state. A level of a tree reads the text's state
once; accepted nodes are folded into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tree_kernels.level_scan import Lines, NodeInputs
from tree_kernels.state_step import Slots, mamba2_drive, mamba2_fold

from tree_layers.states import States, StateShape, as_slots

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The shapes of one layer's memory."""

    state: StateShape  # a text's state: recurrent [H, P, N], conv [W - 1, channels]
    groups: int  # G, groups of B

    @property
    def node_bytes(self) -> int:
        """Bytes of a node."""
        heads, width, size = self.state.recurrent
        return 4 * (self.state.conv[1] + heads * width + self.groups * size + heads)


class LayerNodes(NamedTuple):
    """One layer's texts and nodes. All float32 for any dtype of the activations, so that inputs read at every level are
    converted once."""

    recurrent: Tensor  # [texts, H, P, N]
    conv: Tensor  # [texts, W - 1, channels]
    raw: Tensor  # [texts * (W - 1) + nodes, channels] before the convolution: the texts' last inputs, then the nodes'
    x: Tensor  # [nodes, H, P] after the convolution
    B: Tensor  # [nodes, G, N]
    dt: Tensor  # [nodes, H] after softplus and clamp


@dataclass(frozen=True, slots=True, eq=False)
class LevelStep:
    """New nodes of several trees. All layers share it."""

    slots: Slots  # [rows] node slots that are written
    raw: Slots  # [rows] the nodes' slots among the raw inputs
    taps: Tensor  # [rows, W] slots of each row's last W raw inputs, the row's own input last
    nodes: Slots  # [trees * most] node slots of the trees so far
    trees: int
    lines: Lines
    texts: Sequence[int] | Tensor  # [trees] text slots; on the device where a step is recorded
    places: Tensor | None  # [rows] index of each row among trees * R padded rows; None: all trees have R new nodes
    new: int  # R

    def of(self, memory: LayerNodes) -> NodeInputs:
        """The recurrence's inputs of the trees' nodes."""
        return NodeInputs(*(self._of(store) for store in (memory.x, memory.B, memory.dt)))

    def states(self, memory: LayerNodes) -> Sequence[Tensor]:
        """The state of each tree's text."""
        if isinstance(self.texts, Tensor):
            return memory.recurrent.index_select(0, self.texts).unbind(0)
        return [memory.recurrent[text] for text in self.texts]

    def _of(self, store: Tensor) -> Tensor:
        """[nodes, ...] -> [trees, most, ...]"""
        found = store[self.nodes] if isinstance(self.nodes, slice) else store.index_select(0, self.nodes)
        return found.unflatten(0, (self.trees, -1)) if self.trees > 1 else found.unsqueeze(0)

    def pad(self, rows: Tensor) -> Tensor:
        """[rows, ...] -> [trees, R, ...]"""
        if self.places is not None:
            blank = rows.new_zeros(self.trees * self.new, *rows.shape[1:])
            rows = blank.index_copy_(0, self.places, rows)
        return rows.view(self.trees, self.new, *rows.shape[1:])

    def unpad(self, rows: Tensor) -> Tensor:
        """[trees, R, ...] -> [rows, ...]"""
        flat = rows.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)


class NodeFolds(NamedTuple):
    """Paths of nodes that are folded into texts. All layers share it."""

    source: Tensor  # [folds] text slots
    target: Slots  # [folds] text slots that are written
    paths: Tensor  # [folds, T] node slots from the root on, 0 past a path's end
    tails: Tensor  # [folds, W - 1] slots of the last raw inputs of each path
    into: Tensor  # [folds, W - 1] slots of the last raw inputs of each target


class NodeStates:
    """The texts and nodes of all layers, which have equal shapes. Text slot 0 is the empty text; node slot 0 is
    padding: its inputs are zero."""

    def __init__(
        self, shape: NodeLayout, layers: int, texts: int, nodes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self._device = device
        self.back, channels = shape.state.conv  # W - 1
        # Empty instead of zeroed: memory is then allocated only when it is first written.
        raw = torch.empty(layers, texts * self.back + nodes, channels, device=device)
        tails = raw[:, : texts * self.back].view(layers, texts, self.back, channels)
        self.texts = States([shape.state] * layers, texts, dtype, device, list(tails))
        self._raw = raw
        heads, width, size = shape.state.recurrent
        self._x = torch.empty(layers, nodes, heads, width, device=device)
        self._B = torch.empty(layers, nodes, shape.groups, size, device=device)
        self._dt = torch.empty(layers, nodes, heads, device=device)
        for store in (self._x, self._B, self._dt):
            store[:, 0] = 0
        self.first = texts * self.back  # slot of node slot 0 among the raw inputs
        stores = zip(self.texts.recurrent, self.texts.conv, raw, self._x, self._B, self._dt, strict=True)
        self.layers = [LayerNodes(*each) for each in stores]

    def tail(self, text: int) -> range:
        """Slots of a text's last W - 1 raw inputs."""
        return range(self.back * text, self.back * (text + 1))

    def taps(self, slots: Ints, texts: Ints, near: Ints) -> Ints:
        """Taps [rows, W] of nodes (`taps_of`). texts: slots of their texts"""
        return taps_of(self.first + slots, self.back * texts, near, self.first)

    def slots(self, slots: Ints) -> tuple[Slots, Slots]:
        """Node slots to write to, and their slots among the raw inputs."""
        found = as_slots(slots, self._device)
        if isinstance(found, slice):
            return found, slice(self.first + found.start, self.first + found.stop)
        return found, self.first + found

    def fold(self, folds: NodeFolds, factors: Tensor) -> None:
        """Advance texts by accepted nodes, in all layers.

        factors [layers, 1, 1, H] A of each layer
        """
        index = folds.paths.view(-1)
        x, B, dt = (
            store.index_select(1, index).unflatten(1, folds.paths.shape) for store in (self._x, self._B, self._dt)
        )
        self._raw.index_copy_(1, folds.into.view(-1), self._raw.index_select(1, folds.tails.view(-1)))
        left, driven = mamba2_drive(x, dt, factors)
        for layer, states in enumerate(self.texts.recurrent):
            mamba2_fold(states, folds.source, folds.target, left[layer], driven[layer], B[layer])


def taps_of(own: Ints, tails: Ints, near: Ints, first: int) -> Ints:
    """Slots [rows, W] of the last W raw inputs of nodes.

    own [rows]: slots of their own inputs   tails [rows]: first slots of their texts' last W - 1 inputs
    near [rows, W - 1]: node slots of their nearest ancestors, the parent last; 0 where tokens of the text come before
    the root   first: slot of node slot 0 among the raw inputs

    The inputs of a root's child, in node slot 7: the text's last two of three, the root's in node slot 6, its own:

    >>> taps_of(np.array([107]), np.array([30]), np.array([[0, 0, 6]]), first=100).tolist()
    [[31, 32, 106, 107]]
    """
    of_text = tails[:, None] + np.arange(near.shape[1]) + (near != 0).sum(1)[:, None]
    return np.concatenate([np.where(near == 0, of_text, first + near), own[:, None]], 1)
