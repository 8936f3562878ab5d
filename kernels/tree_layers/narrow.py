"""A tensor subclass for rows too narrow for ATen's vector loops, such as six experts' logits or a gate of one number.

The length of their buffer is not a multiple of a vector, so it depends on the number of rows which of them are in its
tail and round differently (`tree_kernels.elementwise`). Model code applies functions to them outside any module, so
the subclass pads these calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.elementwise import elementwise, is_narrow

_NAMES = (
    *("sigmoid", "silu", "softplus", "gelu", "exp2", "rsqrt", "pow", "elu", "mish", "logsigmoid", "tanh", "erf", "exp"),
    *("log", "log1p", "expm1", "hardswish", "hardsigmoid", "selu", "celu", "sqrt", "sin", "cos"),
)
_TAILED = {
    function
    for owner in (torch, F, Tensor, torch.special)
    for name in (*_NAMES, "expit", "__pow__", "__rpow__")
    if (function := getattr(owner, name, None)) is not None
}


class NarrowRows(Tensor):
    """Rows that leave a tail. Elementwise functions (`_TAILED`) of one tensor are wrapped in `elementwise`. Results
    whose width leaves a tail are NarrowRows too."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if function not in _TAILED or not _takes_one_tensor(args, kwargs):
                return _each_narrow(function(*args, **kwargs))
            x, *others = args
            in_place = kwargs.pop("inplace", False)
            made = elementwise(function)(x.as_subclass(Tensor), *others, **kwargs)
            return narrow(x.copy_(made) if in_place else made)


def _takes_one_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the first argument is the call's only tensor. `elementwise` pads only the first argument."""
    tensors = [isinstance(given, Tensor) for given in (*args, *kwargs.values())]
    return bool(args) and tensors[0] and sum(tensors) == 1


def narrow(rows: Tensor) -> Tensor:
    """The rows as NarrowRows if they are on a CPU and their width leaves a tail, else as a plain tensor."""
    if rows.device.type == "cpu" and rows.dim() and rows.is_floating_point() and is_narrow(rows.shape[-1]):
        return rows.as_subclass(NarrowRows)
    return rows.as_subclass(Tensor) if isinstance(rows, NarrowRows) else rows


def _each_narrow(made: Any) -> Any:
    if isinstance(made, Tensor):
        return narrow(made)
    if isinstance(made, tuple | list):  # a result type such as torch.topk's also takes one sequence
        return type(made)([_each_narrow(each) for each in made])
    return made
