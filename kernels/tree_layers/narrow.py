"""Rows too narrow for ATen's vector loops: the logits of six experts, a gate of one number.

Their number times their width is no multiple of a vector, so which of them are in a tail would depend on how many rows
there are (`tree_kernels.elementwise`). The library's code applies its functions to them without a module that could be
wrapped, so the tensor itself sees to it.
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
    for name in _NAMES
    if (function := getattr(owner, name, None)) is not None
}


class NarrowRows(Tensor):
    """Rows that leave a tail. Functions of single numbers are applied by `elementwise`; what is made of such rows is
    again such, as long as its width leaves a tail."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _TAILED and isinstance(args[0], Tensor):
                made = elementwise(function)(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            else:
                made = function(*args, **kwargs)
            return _each_narrow(made)


def narrow(rows: Tensor) -> Tensor:
    """The same numbers, as NarrowRows where their width leaves a tail on a CPU."""
    if rows.device.type == "cpu" and rows.dim() and rows.is_floating_point() and is_narrow(rows.shape[-1]):
        return rows.as_subclass(NarrowRows)
    return rows.as_subclass(Tensor) if isinstance(rows, NarrowRows) else rows


def _each_narrow(made: Any) -> Any:
    if isinstance(made, Tensor):
        return narrow(made)
    if isinstance(made, tuple | list):  # torch.topk's kind of tuple takes one sequence, as tuple and list do
        return type(made)([_each_narrow(each) for each in made])
    return made
