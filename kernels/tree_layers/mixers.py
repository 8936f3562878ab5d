"""The Mamba-1 and Mamba-2 mixers: tensors and arithmetic, without modules.

`chain` consumes several tokens per row, in order; it reads one text's memory and writes another's or the same.
Mamba-1's `step` and Mamba-2's `level` consume one token per row, each row a node of a tree: `step` writes the node's
state, `level` only its inputs. Activations have the weights' dtype; dt, states and decays are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.level_scan import level_scan
from tree_kernels.state_step import (
    Slots,
    conv_chain,
    conv_step,
    conv_tail,
    mamba1_chain,
    mamba1_step,
    mamba2_chain,
    mamba2_drive,
    mamba2_fold,
)
from tree_kernels.tree_conv import tree_conv

from tree_layers.nodes import LayerNodes, LevelStep, NodeLayout
from tree_layers.states import StateShape

Stop = tuple[Tensor, Slots]
"""A number of tokens for each row of a chain [rows], and the slots that store the memory after these tokens."""


Select = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Mamba-1's dt after softplus [rows, I], B and C [rows, N], float32, from the convolution's output x [rows, I]."""


@dataclass(frozen=True, slots=True, eq=False)
class Mamba1Scan:
    """Mamba-1's convolution and recurrence. I channels, N state width, W taps."""

    conv_weight: Tensor  # [W, I]
    conv_bias: Tensor  # [I]
    A: Tensor  # [I, N] float32, negative
    D: Tensor  # [I] float32

    @property
    def shape(self) -> StateShape:
        return StateShape(tuple(self.A.shape), (self.conv_weight.shape[0] - 1, self.A.shape[0]))

    def step(self, x: Tensor, select: Select, recurrent: Tensor, conv: Tensor, source: Tensor, target: Slots) -> Tensor:
        """Run a token per row. x [rows, I]: inputs of the convolution. Returns y [rows, I] float32, before the gate"""
        x = conv_step(conv, source, target, x, self.conv_weight, self.conv_bias)
        dt, B, C = select(x)
        y: Tensor = mamba1_step(recurrent, source, target, x.float(), dt, self.A, B, C, self.D)
        return y

    def chain(
        self, x: Tensor, select: Select, recurrent: Tensor, conv: Tensor, source: Tensor, stops: Sequence[Stop]
    ) -> Tensor:
        """x [rows, T, I] -> y [rows, T, I] float32; the token counts of `stops` are at least 1."""
        rows = x.shape[:2]
        before = conv.index_select(0, source)
        x, history = conv_chain(before, x, self.conv_weight, self.conv_bias)
        dt, B, C = (part.unflatten(0, rows) for part in select(x.flatten(0, 1)))
        y, every = mamba1_chain(recurrent.index_select(0, source), x.float(), dt, self.A, B, C, self.D)
        each = torch.arange(rows[0], device=x.device)
        for counted, target in stops:
            recurrent[target] = every[each, counted - 1]
            conv[target] = conv_tail(history, counted, len(self.conv_weight))
        out: Tensor = y
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Mamba1Mixer:
    """d model width, I channels, N state width, R rank of dt."""

    in_proj: Tensor  # [d, 2 I] x, then the gate
    in_bias: Tensor | None
    scan: Mamba1Scan
    x_proj: Tensor  # [I, R + 2 N] dt, B, C
    dt_proj: Tensor  # [R, I] float32
    dt_bias: Tensor  # [I] float32
    out_proj: Tensor  # [I, d]
    out_bias: Tensor | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mamba1Mixer:
        """Make a mixer from a layer's tensors, by their names in transformers, `in_proj.weight` and so on."""
        conv = _turned(tensors["conv1d.weight"][:, 0], dtype)
        return cls(
            in_proj=turned(tensors["in_proj.weight"], dtype),
            in_bias=_bias(tensors, "in_proj.bias", dtype),
            scan=Mamba1Scan(
                conv_weight=conv,
                conv_bias=tensors["conv1d.bias"].to(dtype)
                if "conv1d.bias" in tensors
                else conv.new_zeros(conv.shape[1]),
                A=-torch.exp(tensors["A_log"].float()),
                D=tensors["D"].float(),
            ),
            x_proj=_turned(tensors["x_proj.weight"], dtype),
            dt_proj=_turned(tensors["dt_proj.weight"], torch.float32),
            dt_bias=tensors["dt_proj.bias"].float(),
            out_proj=turned(tensors["out_proj.weight"], dtype),
            out_bias=_bias(tensors, "out_proj.bias", dtype),
        )

    @property
    def shape(self) -> StateShape:
        return self.scan.shape

    def step(self, u: Tensor, recurrent: Tensor, conv: Tensor, source: Tensor, target: Slots) -> Tensor:
        """One token per row, each a new node. u [rows, d] -> [rows, d]"""
        x, gate = _linear(u, self.in_proj, self.in_bias).chunk(2, 1)
        y = self.scan.step(x, self._select, recurrent, conv, source, target)
        return self._gated(y, gate)

    def chain(self, u: Tensor, recurrent: Tensor, conv: Tensor, source: Tensor, stops: Sequence[Stop]) -> Tensor:
        """u [rows, T, d] -> [rows, T, d]; the token counts of `stops` are at least 1."""
        rows = u.shape[:2]
        x, gate = _linear(u.flatten(0, 1), self.in_proj, self.in_bias).chunk(2, 1)
        y = self.scan.chain(x.unflatten(0, rows), self._select, recurrent, conv, source, stops)
        out: Tensor = self._gated(y.flatten(0, 1), gate).unflatten(0, rows)
        return out

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [rows, I] -> dt after softplus [rows, I], B and C [rows, N], float32."""
        rank = self.dt_proj.shape[0]
        size = (self.x_proj.shape[1] - rank) // 2
        dt, B, C = torch.mm(x, self.x_proj).float().split((rank, size, size), 1)
        return F.softplus(torch.addmm(self.dt_bias, dt, self.dt_proj)), B, C

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return _linear(y.to(gate.dtype).mul_(F.silu(gate)), self.out_proj, self.out_bias)


class Root(NamedTuple):
    """Root nodes that a chain's last tokens become. All layers share it."""

    rows: Tensor  # [rows] 0, 1, 2, ...
    slots: Slots  # [rows] node slots
    raw: Slots  # [rows] the nodes' slots among the raw inputs


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Scan:
    """Mamba-2's convolution and recurrence. I = H P channels in H heads, N state width, G groups of heads, W taps."""

    conv_weight: Tensor  # [W, I + 2 G N] float32
    conv_bias: Tensor  # [I + 2 G N] float32
    dt_bias: Tensor  # [H] float32
    A: Tensor  # [H] float32, negative
    D: Tensor  # [H] float32
    groups: int
    size: int  # N
    dt_limit: tuple[float, float]

    @property
    def heads(self) -> int:
        return self.A.shape[0]

    @property
    def channels(self) -> int:
        """I"""
        return self.conv_weight.shape[1] - 2 * self.groups * self.size

    @property
    def shape(self) -> NodeLayout:
        taps, mixed = self.conv_weight.shape
        recurrent = self.heads, self.channels // self.heads, self.size
        return NodeLayout(StateShape(recurrent, (taps - 1, mixed)), self.groups)

    def level(self, inputs: Tensor, dt: Tensor, memory: LayerNodes, step: LevelStep) -> Tensor:
        """One token per row, each a new node; writes the nodes' inputs.

        inputs [rows, I + 2 G N] of the convolution   dt [rows, H] before softplus
        returns y [rows, H, P] float32, before gate and norm
        """
        memory.raw[step.raw] = inputs.float()
        mixed = tree_conv(memory.raw, step.taps, self.conv_weight, self.conv_bias)
        x, B, C = self._split(mixed)
        memory.x[step.slots], memory.B[step.slots], memory.dt[step.slots] = x, B, self._dt(dt)
        y = step.unpad(level_scan(step.of(memory), step.lines, step.states(memory), step.pad(C), self.A))
        out: Tensor = y.addcmul_(x, self.D[:, None])
        return out

    def chain(
        self,
        inputs: Tensor,
        dt: Tensor,
        memory: LayerNodes,
        source: Tensor,
        kept: Tensor,
        target: Slots,
        root: Root | None,
    ) -> Tensor:
        """Several tokens per row. The first `kept` [rows] tokens of each row, at least one, advance the text from slot
        `source` to slot `target`. With `root`, the inputs of the next token are written to its node.

        inputs [rows, T, I + 2 G N]   dt [rows, T, H] before softplus
        returns y [rows, T, H, P] float32, before gate and norm
        """
        before = memory.conv.index_select(0, source)
        mixed, history = conv_chain(before, inputs.float(), self.conv_weight, self.conv_bias)
        dt = self._dt(dt)
        x, B, C = self._split(mixed)
        y: Tensor = mamba2_chain(memory.recurrent.index_select(0, source), x, dt, self.A, B, C, self.D)
        if root is not None:
            last = root.rows, kept
            memory.raw[root.raw] = inputs[last].float()
            memory.x[root.slots], memory.B[root.slots], memory.dt[root.slots] = x[last], B[last], dt[last]
        mamba2_fold(memory.recurrent, source, target, *mamba2_drive(x, dt * _counting(kept, dt), self.A), B)
        memory.conv[target] = conv_tail(history, kept, len(self.conv_weight))
        return y

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., I + 2 G N] -> x [..., H, P], B and C [..., G, N]"""
        shared = self.groups * self.size
        x, B, C = mixed.split((self.channels, shared, shared), -1)
        cells = (self.groups, self.size)
        return x.unflatten(-1, (self.heads, -1)), B.unflatten(-1, cells), C.unflatten(-1, cells)

    def _dt(self, dt: Tensor) -> Tensor:
        dt = F.softplus(dt.float() + self.dt_bias)
        return dt if self.dt_limit == (0.0, math.inf) else dt.clamp(*self.dt_limit)


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Mixer:
    """d model width, I channels, N state width, G groups of heads."""

    in_proj: Tensor  # [d, I + (I + 2 G N) + H] gate, inputs of the convolution (x, B, C), dt
    in_bias: Tensor | None
    scan: Mamba2Scan
    norm: Tensor  # [I] weight of the gated norm
    out_proj: Tensor  # [I, d]
    out_bias: Tensor | None
    eps: float

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        groups: int,
        size: int,
        eps: float,
        dt_limit: tuple[float, float],
    ) -> Mamba2Mixer:
        """Make a mixer from a layer's tensors, by their names in transformers, `in_proj.weight` and so on."""
        conv = _turned(tensors["conv1d.weight"][:, 0], torch.float32)
        return cls(
            in_proj=turned(tensors["in_proj.weight"], dtype),
            in_bias=_bias(tensors, "in_proj.bias", dtype),
            scan=Mamba2Scan(
                conv_weight=conv,
                conv_bias=tensors["conv1d.bias"].float() if "conv1d.bias" in tensors else conv.new_zeros(conv.shape[1]),
                dt_bias=tensors["dt_bias"].float(),
                A=-torch.exp(tensors["A_log"].float()),
                D=tensors["D"].float(),
                groups=groups,
                size=size,
                dt_limit=dt_limit,
            ),
            norm=tensors["norm.weight"].to(dtype),
            out_proj=turned(tensors["out_proj.weight"], dtype),
            out_bias=_bias(tensors, "out_proj.bias", dtype),
            eps=eps,
        )

    @property
    def A(self) -> Tensor:
        return self.scan.A

    @property
    def shape(self) -> NodeLayout:
        return self.scan.shape

    def level(self, u: Tensor, memory: LayerNodes, step: LevelStep) -> Tensor:
        """One token per row, each a new node. u [rows, d] -> [rows, d]; writes the nodes' inputs."""
        gate, inputs, dt = self._project(u)
        y = self.scan.level(inputs, dt, memory, step)
        return _linear(self._gated_norm(y.flatten(1), gate), self.out_proj, self.out_bias)

    def chain(
        self, u: Tensor, memory: LayerNodes, source: Tensor, kept: Tensor, target: Slots, root: Root | None
    ) -> Tensor:
        """u [rows, T, d] -> [rows, T, d]; the rest as in `Mamba2Scan.chain`."""
        rows = u.shape[:2]
        gate, inputs, dt = self._project(u.flatten(0, 1))
        y = self.scan.chain(inputs.unflatten(0, rows), dt.unflatten(0, rows), memory, source, kept, target, root)
        y = self._gated_norm(y.flatten(2).flatten(0, 1), gate)
        out: Tensor = _linear(y, self.out_proj, self.out_bias).unflatten(0, rows)
        return out

    def _project(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = (self.norm.shape[0], self.scan.conv_weight.shape[1], self.scan.heads)
        gate, inputs, dt = _linear(u, self.in_proj, self.in_bias).split(sizes, 1)
        return gate, inputs, dt

    def _gated_norm(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gate first, then RMS over each group's channels, then the weight. y, gate [rows, I]"""
        gated, groups = y * F.silu(gate.float()), self.scan.groups
        if groups > 1:
            return unit_rms(gated.unflatten(1, (groups, -1)), self.eps).flatten(1).to(gate.dtype) * self.norm
        return unit_rms(gated, self.eps).to(gate.dtype) * self.norm


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Divide x [..., n] float32 by the root of its mean square. Faster than F.rms_norm, which has more operations."""
    norm: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
    return x * norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def turned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, in] -> [in, out] for rows' products. On an accelerator the inputs of an output stay adjacent in memory: its
    kernels load them at once (`tree_kernels.rows_product`)."""
    return _turned(weight, dtype) if weight.device.type == "cpu" else weight.to(dtype).t()


def _turned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, in] -> [in, out], in memory too: products of few rows are then faster, most of all with the head."""
    return weight.t().to(dtype).contiguous()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in], weight [in, out]"""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _bias(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor | None:
    return tensors[name].to(dtype) if name in tensors else None


def _counting(lengths: Tensor, dt: Tensor) -> Tensor:
    """Mask [rows, T, 1] float32: one for a row's first `lengths` tokens, zero for the rest. dt [rows, T, H]"""
    return (torch.arange(dt.shape[1], device=dt.device) < lengths[:, None])[..., None].float()
