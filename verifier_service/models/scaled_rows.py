"""Rows at several scales, for comparing a module with the function that replaces it: a clamp acts on large numbers
alone, perhaps only for few tokens.

A scale of a model's inputs is undone by the next norm. So the results of modules that both forms call, such as the
projections of an attention, are scaled instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SCALES = (1.0, 100.0, 10_000.0)
"""Factors on ordinary results. No family was seen to clamp only numbers above the largest."""
SMALL = 0.01
"""A factor on a norm's rows, at which the place of its epsilon shows."""


@contextmanager
def scaled_results(modules: Iterable[nn.Module], scale: float) -> Iterator[None]:
    """Context in which the results of these modules, tensors or tuples with one first, are multiplied."""

    def multiply(module: nn.Module, given: Any, made: Any) -> Any:
        return (made[0] * scale, *made[1:]) if isinstance(made, tuple) else made * scale

    hooks = [module.register_forward_hook(multiply) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def noisy_results(modules: Iterable[nn.Module], share: float) -> Iterator[None]:
    """Context in which the results of these modules have relative noise."""

    def disturb(module: nn.Module, given: Any, made: Tensor) -> Tensor:
        noise = torch.randn(made.shape, generator=torch.Generator().manual_seed(made.shape[-1])).to(made)
        return made * (1 + share * noise)

    hooks = [module.register_forward_hook(disturb) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """True if two tensors are equal, NaN to NaN: large float16 numbers overflow in both forms."""
    alike = found.shape == expected.shape and found.dtype == expected.dtype
    return alike and torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def near(found: Tensor, expected: Tensor, step: float) -> bool:
    """True if results differ by at most a share of their row's largest, and are infinite or NaN in the same places."""
    found, expected = found.float(), expected.float()
    largest = expected.where(expected.isfinite(), 0.0).abs().amax(-1, keepdim=True)
    equal = (found == expected) | (found.isnan() & expected.isnan())
    return bool((equal | ((found - expected).abs() <= step * largest)).all())
