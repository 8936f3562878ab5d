"""Gives norms and gated MLPs of a target on a CPU our own row functions (`tree_kernels.row_functions`).

A module qualifies by what it computes: its results for a few random rows must be ours up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from tree_kernels.row_functions import gated_silu, rms_norm, why_not_compiled

ROWS = 3
"""Random rows that a module's results are compared for."""
STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}
"""The largest difference of a row's results, relative to its largest."""


def use_row_functions(model: nn.Module) -> int:
    """Replace the forwards of RMS norms and gated MLPs that compute ours; returns their number.

    Called when the model's products have their forms: a gated MLP keeps its three layers.
    """
    if why_not_compiled():
        return 0
    count = 0
    for module in model.modules():
        width, ours = _norm(module) or _gated_mlp(module) or (0, None)
        if ours is not None and _agrees(module, ours, width):
            module.forward = ours
            count += 1
    return count


def _norm(module: Any) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """The width and the function of a norm with a weight and an epsilon."""
    if not type(module).__name__.endswith("RMSNorm") or len(signature(module.forward).parameters) != 1:
        return None
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.dim() != 1 or not _served(weight):
        return None
    own = weight.detach().contiguous()

    def run(x: Tensor) -> Tensor:
        return rms_norm(x if x.dtype == own.dtype else x.to(own.dtype), own, eps)

    return len(own), run


def _gated_mlp(module: Any) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """The width and the function of an MLP of three linear layers."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    if len(signature(module.forward).parameters) != 1:
        return None
    if not _served(gate.weight):
        return None
    return gate.in_features, lambda x: down(gated_silu(gate(x), up(x)))


def _served(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in STEPS


def _agrees(module: nn.Module, ours: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether our function's results for random rows are the module's."""
    dtype = next(module.parameters()).dtype
    x = torch.randn(1, ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        expected = module(x)
        found = ours(x)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    largest = expected.float().abs().amax(-1, keepdim=True)
    return bool(((found.float() - expected.float()).abs() <= STEPS[dtype] * largest).all())
