"""Mixers of transformers with a drafter's memory: the library's projections and norms, our convolution and
recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tree_kernels.state_step import Slots
from tree_layers.library_mixers import convolution, gated_norm, project_mamba2, select_mamba1
from tree_layers.mixers import Mamba1Scan, Mamba2Scan, Root, Stop
from tree_layers.nodes import LayerNodes, LevelStep, NodeLayout
from tree_layers.states import StateShape
from tree_layers.tree_mixers import silu


@dataclass(frozen=True, slots=True, eq=False)
class LibraryMamba2:
    """A Mamba-2 mixer of transformers; a `NodeMixer`."""

    module: Any
    scan: Mamba2Scan

    @classmethod
    def of(cls, module: Any) -> LibraryMamba2:
        weight, bias = convolution(module.conv1d)
        low, high = module.time_step_limit
        scan = Mamba2Scan(
            conv_weight=weight,
            conv_bias=bias,
            dt_bias=module.dt_bias.float(),
            A=-torch.exp(module.A_log.float()),
            D=module.D.float(),
            groups=module.n_groups,
            size=module.ssm_state_size,
            dt_limit=(float(low), float(high)),
        )
        return cls(module, scan)

    @property
    def A(self) -> Tensor:
        return self.scan.A

    @property
    def shape(self) -> NodeLayout:
        return self.scan.shape

    def level(self, u: Tensor, memory: LayerNodes, step: LevelStep) -> Tensor:
        gate, inputs, dt = project_mamba2(self.module, u)
        return self._out(self.scan.level(inputs, dt, memory, step), gate)

    def chain(
        self, u: Tensor, memory: LayerNodes, source: Tensor, kept: Tensor, target: Slots, root: Root | None
    ) -> Tensor:
        gate, inputs, dt = project_mamba2(self.module, u)
        return self._out(self.scan.chain(inputs, dt, memory, source, kept, target, root), gate)

    def _out(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gated norm and output projection. y [..., H, P] float32, gate [..., I]; returns [..., d]"""
        out: Tensor = self.module.out_proj(gated_norm(self.module.norm, y.flatten(-2), gate, gate.dtype))
        return out


@dataclass(frozen=True, slots=True, eq=False)
class LibraryMamba1:
    """A Mamba-1 mixer of transformers, with or without norms of dt, B and C; a `StepMixer`."""

    module: Any
    scan: Mamba1Scan
    dt_bias: Tensor  # [I] float32

    @classmethod
    def of(cls, module: Any) -> LibraryMamba1:
        """Wrap a module, whose dt_proj loses its bias, since we add it in float32."""
        weight, bias = convolution(module.conv1d)
        dtype = module.conv1d.weight.dtype
        scan = Mamba1Scan(weight.to(dtype), bias.to(dtype), A=-torch.exp(module.A_log.float()), D=module.D.float())
        dt_bias = module.dt_proj.bias.float()
        module.dt_proj.bias = None
        return cls(module, scan, dt_bias)

    @property
    def shape(self) -> StateShape:
        return self.scan.shape

    def step(self, u: Tensor, recurrent: Tensor, conv: Tensor, source: Tensor, target: Slots) -> Tensor:
        x, gate = self.module.in_proj(u).chunk(2, -1)
        return self._out(self.scan.step(x, self._select, recurrent, conv, source, target), gate)

    def chain(self, u: Tensor, recurrent: Tensor, conv: Tensor, source: Tensor, stops: Sequence[Stop]) -> Tensor:
        x, gate = self.module.in_proj(u).chunk(2, -1)
        return self._out(self.scan.chain(x, self._select, recurrent, conv, source, stops), gate)

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt, B, C = select_mamba1(self.module, x, self.module.x_proj, self.dt_bias)
        return dt, B.float(), C.float()

    def _out(self, y: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = self.module.out_proj((y * silu(gate.float())).to(gate.dtype))
        return out
