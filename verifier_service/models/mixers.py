"""Replaces the mixers of a state-space or hybrid model by our tree-aware ones.

Only `forward` of a mixer is replaced; its linear layers and norms, and everything around it, stay the library's. (A
norm without groups in a mixer of several groups is replaced before, by `group_norms`.)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_layers.library_mixers import (
    check_activation,
    convolution,
    gated_norm,
    is_mamba1,
    is_mixer,
    project_mamba2,
    select_mamba1,
)
from tree_layers.tree_mixers import MixerLayout, RecurrentStep, TreeMamba1, TreeMamba2, silu

from verifier_service.collectives import Collectives
from verifier_service.models.heads import SpreadNorm, TensorRanges, repeats_of
from verifier_service.models.seats import ForwardContext

MIXER_FAMILIES = {
    *("mamba", "falcon_mamba", "mamba2"),
    *("bamba", "falcon_h1", "zamba2", "nemotron_h", "granitemoehybrid", "jamba", "mamba_in_llama"),
}


def run_from_tables(mixers: Sequence[MixerLayout]) -> bool:
    """True if an accelerator has kernels for all of these mixers: for Mamba-2's, whose heads are wider than 1."""
    return all(layout.width > 1 for layout in mixers)


def seat_mixers(
    folder: Path, model: PreTrainedModel, run: ForwardContext, group: Collectives | None = None
) -> tuple[MixerLayout, ...]:
    """Replace every mixer's forward by ours. Returns the layouts of the mixers' memory, in order.

    Called before linear layers get their forms, since it takes biases from them: Mamba-1 adds the bias of dt in
    float32, and with a group, out_proj's bias is added once, after the sum over workers.
    """
    layouts: list[MixerLayout] = []
    for module in model.modules():
        if is_mixer(module):
            check_activation(folder, module)
            seat = _seat_mamba1 if is_mamba1(module) else _seat_mamba2
            layouts.append(seat(module, run, len(layouts), group))
    return tuple(layouts)


def _seat_mamba2(module: Any, run: ForwardContext, index: int, group: Collectives | None) -> MixerLayout:
    inner, channels, heads = module.intermediate_size, module.conv_dim, module.num_heads
    layout = MixerLayout(
        channels=channels,
        heads=heads,
        width=inner // heads,
        groups=module.n_groups,
        size=module.ssm_state_size,
        dtype=module.conv1d.weight.dtype,
        repeats=repeats_of(module),
    )
    weight, bias = convolution(module.conv1d)
    low, high = module.time_step_limit
    mixer = TreeMamba2(
        layout=layout,
        conv_weight=weight,
        conv_bias=bias,
        dt_bias=module.dt_bias.float(),
        A=-torch.exp(module.A_log.float()),
        D=module.D.float(),
        dt_limit=(float(low), float(high)),
    )

    out_proj = _joined(module.out_proj, group)
    if isinstance(module.norm, SpreadNorm):
        assert group is not None
        module.norm.group = group
    if group is not None and hasattr(module, "mup_vector"):
        module.mup_vector = TensorRanges(2, module.dealt_rows.ranges).of(module.mup_vector)

    def forward(self: Any, hidden_states: Tensor, *_: Any, **ignored: Any) -> Tensor:
        if run.recurrent is None:  # a probe
            return torch.zeros_like(hidden_states)
        assert run.recurrent_step is not None
        gate, raw, dt = project_mamba2(self, hidden_states)
        with run.threads_for(raw.shape[1]):
            y = mixer(raw[0], dt[0], run.recurrent.layers[index], run.recurrent_step)
        return out_proj(gated_norm(self.norm, y[None], gate, hidden_states.dtype))

    module.forward = types.MethodType(forward, module)
    return layout


def _seat_mamba1(module: Any, run: ForwardContext, index: int, group: Collectives | None) -> MixerLayout:
    inner, size = module.intermediate_size, module.ssm_state_size
    layout = MixerLayout(inner, heads=inner, width=1, groups=1, size=size, dtype=module.conv1d.weight.dtype)
    weight, bias = convolution(module.conv1d)
    mixer = TreeMamba1(layout, weight, bias, A=-torch.exp(module.A_log.float()), D=module.D.float())
    dt_bias = module.dt_proj.bias.float()
    module.dt_proj.bias = None
    x_proj, out_proj = _joined(module.x_proj, group), _joined(module.out_proj, group)

    def forward(self: Any, hidden_states: Tensor, *_: Any, **ignored: Any) -> Tensor:
        if run.recurrent is None:  # a probe
            return torch.zeros_like(hidden_states)

        def select(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            dt, B, C = select_mamba1(self, x[None], x_proj, dt_bias)
            return dt[0], B[0], C[0]

        assert isinstance(run.recurrent_step, RecurrentStep)
        raw, gate = self.in_proj(hidden_states).chunk(2, -1)
        with run.threads_for(raw.shape[1]):
            y = mixer(raw[0], select, run.recurrent.layers[index], run.recurrent_step)
        return out_proj((y[None] * silu(gate.float())).to(hidden_states.dtype))

    module.forward = types.MethodType(forward, module)
    return layout


def _joined(layer: nn.Linear, group: Collectives | None) -> Callable[[Tensor], Tensor]:
    """The product of a layer whose inputs are divided among a group's workers: the workers' results are summed."""
    if group is None:
        return layer
    bias = layer.bias
    layer.register_parameter("bias", None)  # added once, after the sum

    def run(x: Tensor) -> Tensor:
        total = group.sum(layer(x))
        return total if bias is None else total + bias

    return run
