"""Tree-aware mixers: a layer's convolution and recurrence for rows with separate paths.

The model has the linear layers around them. A row depends only on its path: on its checkpoint by the rule of
docs/design/scan.md#checkpoints and on the inputs since, in order of position. So prompts, plain decoding and trees have
the same bits. Inputs are stored in slots, one per token; those of accepted tokens are kept in a ring per text and
folded into checkpoints when a row first needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.commit import commit
from tree_kernels.elementwise import elementwise
from tree_kernels.tree_conv import tree_conv
from tree_kernels.tree_scan import Paths, TokenInputs, fold, fold_in_order, tree_scan, tree_scan_in_order

from tree_layers.device_mixers import TabledStep
from tree_layers.states import as_array, as_tensor, check_arrays

Array = npt.NDArray[Any]

softplus = elementwise(F.softplus)
silu = elementwise(F.silu)


@dataclass(frozen=True, slots=True)
class MixerLayout:
    """The shapes of one layer's memory: inputs per token, checkpoints per text."""

    channels: int  # inputs of the convolution
    heads: int  # H; Mamba-1: its channels
    width: int  # P; Mamba-1: 1
    groups: int  # G, groups of B; Mamba-1: 1
    size: int  # N
    dtype: torch.dtype  # type of the inputs except dt
    repeats: int = 1  # r: consecutive heads that share an x, and groups of C that share a B; above 1 in Mamba-in-Llama

    @property
    def own(self) -> int:
        """X: the number of distinct x."""
        return self.heads // self.repeats

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's inputs."""
        numbers = self.channels + self.own * self.width + self.groups * self.size
        return numbers * self.dtype.itemsize + self.heads * 4

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self.heads * self.width * self.size * 4


class LayerMemory(NamedTuple):
    """Slots of one layer."""

    raw: Tensor  # [token slots, channels] before the convolution
    inputs: TokenInputs  # [token slots, ...] after the convolution
    states: Tensor  # [state slots, H, P, N] float32


class RecurrentMemory:
    """The slots of every layer's mixer. Token slot 0 and state slot 0 hold zeros and are never written."""

    def __init__(self, layouts: Sequence[MixerLayout], tokens: int, states: int, device: torch.device) -> None:
        """tokens, states: numbers of slots, slot 0 included."""
        self.layouts = tuple(layouts)
        self.stores: list[tuple[Tensor, ...]] = []  # arrays [layers, slots, ...] of each layout, one tuple per layout
        layers: dict[MixerLayout, list[LayerMemory]] = {}
        for layout in dict.fromkeys(layouts):
            count = self.layouts.count(layout)
            raw = torch.zeros(count, tokens, layout.channels, dtype=layout.dtype, device=device)
            x = torch.zeros(count, tokens, layout.own, layout.width, dtype=layout.dtype, device=device)
            B = torch.zeros(count, tokens, layout.groups, layout.size, dtype=layout.dtype, device=device)
            dt = torch.zeros(count, tokens, layout.heads, device=device)
            kept = torch.zeros(count, states, layout.heads, layout.width, layout.size, device=device)
            self.stores.append((raw, x, B, dt))
            layers[layout] = [LayerMemory(raw[i], TokenInputs(x[i], B[i], dt[i]), kept[i]) for i in range(count)]
        rest = {layout: iter(each) for layout, each in layers.items()}
        self.layers = [next(rest[layout]) for layout in layouts]

    def layout(self, block: int) -> str:
        """Shapes and dtypes of the arrays of `save` as one word; part of a saved state's name."""
        words = [
            f"{each.channels}+{each.heads}x{each.width}x{each.size}+{each.groups}"
            f"{'' if each.repeats == 1 else f'*{each.repeats}'}+{str(each.dtype).split('.')[-1]}"
            for each in self.layouts
        ]
        return f"checkpoint-v1/{block}/{len(words)}/{','.join(sorted(set(words)))}"

    def save(self, tokens: Tensor, state: int) -> dict[str, Array]:
        """A checkpoint and the inputs in these token slots as plain arrays."""
        arrays: dict[str, Array] = {}
        for index, layer in enumerate(self.layers):
            arrays[f"state.{index}"] = layer.states[state].cpu().numpy().copy()
            for name, store in _named(layer):
                arrays[f"{name}.{index}"] = as_array(store.index_select(0, tokens))
        return arrays

    def saved_bytes(self, tokens: int) -> int:
        """Bytes of the arrays that `save` returns for `tokens` tokens."""
        return sum(layout.state_bytes + tokens * layout.token_bytes for layout in self.layouts)

    def check(self, arrays: Mapping[str, Array], most: int) -> None:
        """Raise ValueError unless the arrays have the form of `save` for 1 to `most` tokens, and finite numbers."""
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        count = len(arrays["dt.0"]) if "dt.0" in arrays and arrays["dt.0"].ndim else 0
        if not 1 <= count <= most:
            raise ValueError(f"the arrays are of {count} tokens, not of 1 to {most}")
        for index, layer in enumerate(self.layers):
            wanted[f"state.{index}"] = (tuple(layer.states.shape[1:]), torch.float32)
            for name, store in _named(layer):
                wanted[f"{name}.{index}"] = ((count, *store.shape[1:]), store.dtype)
        check_arrays(arrays, wanted)

    def load(self, arrays: Mapping[str, Array], tokens: Tensor, state: int) -> None:
        """Write the arrays of `save` into these slots. State 0 is not written: it stays zero."""
        for index, layer in enumerate(self.layers):
            if state:
                layer.states[state] = torch.from_numpy(arrays[f"state.{index}"])
            for name, store in _named(layer):
                values = as_tensor(arrays[f"{name}.{index}"], store.dtype)
                store.index_copy_(0, tokens, values.to(store.device))

    def keep(self, source: Tensor, target: Tensor) -> None:
        """Copy the inputs of tokens from slots [n] to slots [n], in every layer."""
        for stores in self.stores:
            for store in stores:
                commit(store, source, target)


def _named(layer: LayerMemory) -> tuple[tuple[str, Tensor], ...]:
    return ("raw", layer.raw), ("x", layer.inputs.x), ("B", layer.inputs.B), ("dt", layer.inputs.dt)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStep:
    """The rows of a step for mixers. All layers share it."""

    slots: Tensor  # [rows] int64 slots where the rows' inputs are written
    own: Tensor  # [rows] int64 the column of `paths` that is the row's own, or past it; at least W - 1
    paths: Paths
    _taps: dict[int, Tensor] = field(default_factory=dict)

    def taps(self, width: int) -> Tensor:
        """Slots of each row's last inputs, [rows, width], its own last."""
        if width not in self._taps:
            back = torch.arange(1 - width, 1, device=self.own.device)
            self._taps[width] = self.paths.columns.gather(1, self.own[:, None] + back)
        return self._taps[width]

    def write(self, store: Tensor, rows: Tensor) -> None:
        """Write every row to its slot."""
        store.index_copy_(0, self.slots, rows.to(store.dtype))


Scan = Callable[[TokenInputs, Tensor, Sequence[Tensor], Paths, Tensor, Tensor, Tensor, Tensor], Tensor]


def _scan(run: Scan, memory: LayerMemory, step: RecurrentStep, done: Sequence[Tensor], *rows: Tensor) -> Tensor:
    y = run(memory.inputs, memory.states, done, step.paths, *rows)
    for each, state in zip(step.paths.folds, done, strict=True):
        if each.target >= 0:  # written after the scan: a row may have started from the slot's old checkpoint
            memory.states[each.target] = state
    return y


@dataclass(frozen=True, slots=True, eq=False)
class TreeMamba2:
    """Mamba-2's convolution and recurrence."""

    layout: MixerLayout
    conv_weight: Tensor  # [W, channels] float32
    conv_bias: Tensor  # [channels] float32
    dt_bias: Tensor  # [H] float32
    A: Tensor  # [H] float32, negative
    D: Tensor  # [H] float32
    dt_limit: tuple[float, float]

    def __call__(self, raw: Tensor, dt: Tensor, memory: LayerMemory, step: RecurrentStep | TabledStep) -> Tensor:
        """raw [rows, X P + G N + r G N] inputs of the convolution (x, B, C)   dt [rows, H] before softplus

        Returns y [rows, H P] float32, before gate and norm. Writes the rows' inputs and the step's checkpoints.
        """
        if isinstance(step, TabledStep):
            convolution = self.conv_weight, self.conv_bias, self.dt_bias, self.dt_limit
            return step.run((raw, dt), memory, convolution, self.A, self.D)
        layout = self.layout
        step.write(memory.raw, raw)
        mixed = tree_conv(memory.raw, step.taps(len(self.conv_weight)), self.conv_weight, self.conv_bias)
        shared = layout.groups * layout.size
        x, B, C = mixed.split((layout.own * layout.width, shared, shared * layout.repeats), 1)
        x = x.unflatten(1, (layout.own, layout.width))
        dt = softplus(dt.float() + self.dt_bias)
        if self.dt_limit != (0.0, math.inf):
            dt = dt.clamp(*self.dt_limit)
        step.write(memory.inputs.x, x)
        step.write(memory.inputs.B, B.unflatten(1, (layout.groups, layout.size)))
        step.write(memory.inputs.dt, dt)
        done = fold(memory.inputs, memory.states, step.paths.folds, self.A)
        C = C.unflatten(1, (-1, layout.size))
        return _scan(tree_scan, memory, step, done, x, C, self.A, self.D).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class TreeMamba1:
    """Mamba-1's convolution and recurrence, in token order everywhere."""

    layout: MixerLayout
    conv_weight: Tensor  # [W, I] float32
    conv_bias: Tensor  # [I] float32
    A: Tensor  # [I, N] float32, negative
    D: Tensor  # [I] float32

    def __call__(
        self,
        raw: Tensor,
        select: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
        memory: LayerMemory,
        step: RecurrentStep,
    ) -> Tensor:
        """raw [rows, I] inputs of the convolution   select: computes dt [rows, I] after softplus, B and C [rows, N]
        from the convolution's output

        Returns y [rows, I] float32, before the gate. Writes the rows' inputs and the step's checkpoints.
        """
        step.write(memory.raw, raw)
        x = tree_conv(memory.raw, step.taps(len(self.conv_weight)), self.conv_weight, self.conv_bias)
        dt, B, C = select(x)
        step.write(memory.inputs.x, x[..., None])
        step.write(memory.inputs.B, B[:, None])
        step.write(memory.inputs.dt, dt)
        done = fold_in_order(memory.inputs, memory.states, step.paths.folds, self.A)
        return _scan(tree_scan_in_order, memory, step, done, x[..., None], C[:, None], self.A, self.D).flatten(1)
