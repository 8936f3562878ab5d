"""Gives the norms of a target on an accelerator our kernel (`tree_kernels.norm`): with the library's norms, a row's
bits depend on the number of rows in the step.

The kernel has several formulas, which round at different places. A module gets the formula whose results for a few
random rows are nearest to its own; a module that no formula comes near keeps its forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from tree_kernels.norm import GATE_FIRST, GATE_LAST, NO_GATE, WIDEST, RowNorm, norm

from verifier_service.models.heads import SpreadNorm
from verifier_service.models.row_functions import ROWS, STEPS
from verifier_service.models.scaled_rows import SCALES, SMALL, near

log = logging.getLogger("dendro.verifier")

EPSILONS = ("variance_epsilon", "eps")
"""Attributes with a norm's epsilon."""
UNNAMED_EPSILON = 1e-5
"""The epsilon of norms without such an attribute, as OLMo's."""
ANY_WIDTH = 96
"""Width of the rows on which a norm without weights is compared."""


Forward = Callable[..., Tensor]


def use_norm_kernel(model: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Replace the forwards of norms by the kernel, where a formula agrees. Returns how many were replaced.

    dtype: type of the model's rows
    """
    count, left = 0, set()
    module: Any
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        found = _kernel_of(module, dtype, device)
        if found is None:
            left.add(type(module).__name__)
        else:
            module.forward, module.dendro_norm = found
            count += 1
    beside = f"; the library's: {', '.join(sorted(left))}" if left else ""
    log.info("verifier: norms: %d by the kernel%s", count, beside)
    return count


def _may_be_norm(module: Any) -> bool:
    """True if a module is called a norm and has no modules in it. `SpreadNorm` sums over several workers."""
    named = "norm" in type(module).__name__.lower() and not isinstance(module, SpreadNorm)
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return named and own <= {"weight", "bias"} and "forward" not in vars(module) and not list(module.children())


def norm_of(module: Any) -> RowNorm | None:
    """The formula of a norm without a gate that has our kernel and norms whole rows; None for other modules."""
    form = getattr(module, "dendro_norm", None)
    return form if isinstance(form, RowNorm) and form.groups == 1 and form.gate == NO_GATE else None


def _kernel_of(module: Any, dtype: torch.dtype, device: torch.device) -> tuple[Forward, RowNorm] | None:
    """The kernel with the formula that is nearest to a module, and the formula; None where none agrees with it."""
    from tree_kernels.norm.triton import norm_rows  # a CPU may have no triton

    try:
        gated = len(signature(module.forward).parameters) == 2
        by_heads = getattr(module, "weight", None) is not None and module.weight.dim() == 2
        given = _given(module, gated, dtype, device)
        with torch.inference_mode():
            expected = [module(*each) for each in given]

            def differing(run: Forward) -> int | None:
                return _differing([run(*each) for each in given], expected, dtype)

            best, fewest = None, 1 << 60
            for form in _forms(module, gated):
                count = differing(_over(norm, form, by_heads))
                if count is not None and count < fewest:
                    best, fewest = form, count
            if best is None or given[0][0].shape[-1] // (1 if by_heads else best.groups) > WIDEST:
                return None
            run = _over(norm_rows, best, by_heads)
            return (run, best) if differing(run) is not None else None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a module of this name may take other arguments
        return None


def _forms(module: Any, gated: bool) -> Iterator[RowNorm]:
    """The formulas that a module with these attributes may have."""
    eps = next((float(getattr(module, name)) for name in EPSILONS if hasattr(module, name)), UNNAMED_EPSILON)
    weight, bias = (_flat(getattr(module, name, None)) for name in ("weight", "bias"))
    # None comes first: FalconMamba's norms of rows of several widths have a weight of ones that they do not use.
    weights: list[tuple[Tensor | None, bool]] = [(None, False)]
    if weight is not None:
        # Llama's, gpt-oss's, Gemma's, and Nemotron's, whose 1 + weight is rounded.
        weights += [(weight, True), (weight, False), (1.0 + weight.float(), False), (weight + 1.0, False)]
    for (own, rounded), gate, centred in product(
        weights, (GATE_FIRST, GATE_LAST) if gated else (NO_GATE,), (False, True)
    ):
        yield RowNorm(eps, own, bias, 1 if own is None else _groups(module), centred, rounded, gate)


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().flatten()


def _groups(module: Any) -> int:
    """Number of groups of a row that are normed separately: the groups of a gated norm, or heads with weights of their
    own."""
    if module.weight.dim() == 2:
        return len(module.weight)
    if hasattr(module, "group_size"):
        return len(module.weight) // int(module.group_size)
    return int(getattr(module, "n_groups", 1))


def _given(module: Any, gated: bool, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Arguments with which a module is compared: rows at several scales, with gates if it takes gates."""
    weight = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", (ANY_WIDTH,)) if weight is None else weight.shape
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(1, ROWS, *shape, generator=generator).to(device, dtype) for _ in range(2))
    return [(x * scale, *((gate,) if gated else ())) for scale in (SMALL, *SCALES)]


def _over(function: Callable[..., Tensor], form: RowNorm, by_heads: bool) -> Forward:
    """Make a norm's forward from the kernel. by_heads: True if a row's last two dimensions are heads and their
    numbers"""

    def run(x: Tensor, *gate: Tensor, **named: Any) -> Tensor:
        if not by_heads:
            return function(x, form, *gate, **named)
        return function(x.flatten(-2), form).view(x.shape)

    return run


def _differing(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> int | None:
    """Number of results that are not equal; None if some are not near, or of another type."""
    count = 0
    for ours, library in zip(found, expected, strict=True):
        if ours.dtype != library.dtype or ours.shape != library.shape or not near(ours, library, STEPS[dtype]):
            return None
        count += int((ours != library).sum())
    return count
