"""Initialises a larger Mamba-2 so that it has the logits of a smaller one.

The second target has the drafter's layers, wider and with new ones in between. From random weights, half of its
training would be spent to reach the drafter's loss.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer


@torch.no_grad()
def grow(small: Mamba2ForCausalLM, large: Mamba2ForCausalLM) -> None:
    """Copy the weights of `small` into `large`, which has random weights, so that both have the same logits.

    Both have one group, the same head width and the same state width; `large` has a multiple of the layers. New parts
    get output weights of zero and keep their random input weights, so that they have a gradient.
    """
    _widen(large.backbone.embeddings.weight.zero_(), small.backbone.embeddings.weight)
    _widen_norm(large.backbone.norm_f.weight, small.backbone.norm_f.weight)
    blocks: Any = large.backbone.layers  # a ModuleList hides the types
    sources: Any = small.backbone.layers
    apart = len(blocks) // len(sources)
    for place, block in enumerate(blocks):
        if place % apart:
            block.mixer.out_proj.weight.zero_()
            continue
        source = sources[place // apart]
        _widen_norm(block.norm.weight, source.norm.weight)
        _widen_mixer(block.mixer, source.mixer)


def _widen_mixer(large: Mamba2Mixer, small: Mamba2Mixer) -> None:
    # A new head's x is zero, and so is its output.
    inner, bias = large.intermediate_size, large.conv1d.bias
    assert bias is not None
    large.in_proj.weight[inner : 2 * inner].zero_()
    bias[:inner].zero_()
    for of_large, of_small in zip(_parts(large), _parts(small), strict=True):
        for weight, source in zip(of_large, of_small, strict=True):
            _widen(weight, source)
    _widen_norm(large.norm.weight, small.norm.weight)
    large.out_proj.weight[small.out_proj.weight.shape[0] :].zero_()
    _widen(large.out_proj.weight, small.out_proj.weight)


def _parts(mixer: Mamba2Mixer) -> list[list[Tensor]]:
    """The mixer's weights as views that each have the heads, the states or the model's width as their first axis."""
    inner, states, bias = mixer.intermediate_size, mixer.ssm_state_size, mixer.conv1d.bias
    assert bias is not None
    return [
        _cut(mixer.in_proj.weight, [inner, inner, states, states, mixer.num_heads]),
        _cut(mixer.conv1d.weight, [inner, states, states]),
        _cut(bias, [inner, states, states]),
        [mixer.dt_bias, mixer.A_log, mixer.D],
    ]


def _cut(weight: Tensor, sizes: list[int]) -> list[Tensor]:
    return [weight[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _widen(large: Tensor, small: Tensor) -> None:
    """Copy `small` into the first entries of `large` along every axis."""
    large[tuple(slice(size) for size in small.shape)] = small


def _widen_norm(large: Tensor, small: Tensor) -> None:
    """Copy a norm's weight, scaled: its mean square is over more channels, and new channels are zero at first."""
    large[: len(small)] = small * (len(small) / len(large)) ** 0.5
