"""Activation modules whose results do not depend on where a row lies in its buffer (`tree_kernels.elementwise`)."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.activations import ACT2CLS
from tree_kernels.elementwise import elementwise

_TRANSFORMERS: Any = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *_TRANSFORMERS,
    *(nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Mish, nn.ELU, nn.LogSigmoid),
)


def make_activations_safe(model: nn.Module) -> None:
    """Wrap the forward of every activation module of the model, transformers' or torch's, in `elementwise`."""
    for module in model.modules():
        if isinstance(module, ACTIVATIONS) and "forward" not in module.__dict__:
            module.forward = elementwise(module.forward)
