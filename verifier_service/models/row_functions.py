"""Gives norms and gated MLPs of a target on a CPU our own row functions (`tree_kernels.row_functions`).

A module qualifies if its results for a few random rows, at several scales, are those of the row function up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tree_kernels.row_functions import CompiledNorm, gated_silu, why_not_compiled

from verifier_service.models.scaled_rows import SCALES, SMALL, near, scaled_results

ROWS = 3
"""Random rows that a module's results are compared for."""
STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}
"""The largest difference between a module's and our result of a row, over the row's largest number, by dtype."""


def use_row_functions(model: nn.Module) -> int:
    """Replace the forwards of the RMS norms and gated MLPs that qualify. Returns how many do.

    Called after the model's products have got their forms: a gated MLP keeps its three layers.
    """
    if why_not_compiled():
        return 0
    count = 0
    module: Any
    for module in model.modules():
        width, ours = _norm(module) or _gated_mlp(module) or (0, None)
        if ours is not None and agrees(module, ours, width):
            module.forward = module.dendro_row_function = ours
            count += 1
    return count


def has_row_function(module: Any) -> bool:
    """True if a module's forward is our function."""
    function = getattr(module, "dendro_row_function", None)
    return function is not None and module.forward is function


def _norm(module: Any) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """The width and the function of a norm with a weight and an epsilon."""
    if not type(module).__name__.endswith("RMSNorm") or len(signature(module.forward).parameters) != 1:
        return None
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.dim() != 1 or not _served(weight):
        return None
    own, library = CompiledNorm(weight.detach().contiguous(), eps), module.forward

    def run(x: Tensor) -> Tensor:
        # Some Mambas norm float32 residuals with a bfloat16 weight, without rounding in between.
        made: Tensor = own(x) if x.dtype == own.weight.dtype else library(x)
        return made

    return len(weight), run


def _gated_mlp(module: Any) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """The width and the function of an MLP of three linear layers."""
    parts = gated_parts(module)
    if parts is None or not _served(parts[0].weight):
        return None
    gate, up, down = parts
    return gate.in_features, lambda x: down(gated_silu(gate(x), up(x)))


def gated_parts(module: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """The layers of an MLP that may be gated by SiLU: those for gates, for the numbers, and for the result."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    if len(signature(module.forward).parameters) != 1 or not _is_silu(getattr(module, "act_fn", None)):
        return None
    return gate, up, down


def _served(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in STEPS


def _is_silu(function: Any) -> bool:
    """True if an activation is SiLU, at small and at large numbers."""
    x = torch.linspace(-24, 24, 1024)
    try:
        return torch.allclose(function(x), F.silu(x), rtol=1e-5, atol=1e-6)
    except Exception:  # a module's call may raise anything
        return False


def agrees(module: nn.Module, ours: Callable[[Tensor], Tensor], width: int, device: torch.device | None = None) -> bool:
    """True if `ours` gives the module's results, up to rounding, for random rows [1, ROWS, width] at several scales."""
    dtype = next(module.parameters()).dtype
    x = torch.randn(1, ROWS, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    parts = _linears(module)
    for scale in SCALES if parts else (SMALL, *SCALES):
        inside: AbstractContextManager[None] = scaled_results(parts, scale) if parts else nullcontext()
        rows = x if parts else x * scale
        with torch.inference_mode(), inside:
            try:
                expected = module(rows)
            except Exception:  # the module takes rows of another number of dimensions
                return False
            found = ours(rows)
        if found.dtype != expected.dtype or found.shape != expected.shape or not near(found, expected, STEPS[dtype]):
            return False
    return True


def _linears(module: nn.Module) -> Sequence[nn.Module]:
    """The linear layers of a gated MLP, whose results `agrees` scales; empty for a norm, whose input rows it scales."""
    return [getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj") if hasattr(module, name)]
