"""Gives every product of a model a form in which a row's bits do not depend on other rows (`tree_layers.linear`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tree_layers.linear import RowForms


def make_rows_independent(model: nn.Module, forms: RowForms) -> None:
    """Replace the product of every `nn.Linear` of the model, and of every other weight that multiplies rows, by its
    form."""
    layers: dict[tuple[int, int], list[nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if type(module).forward is nn.Linear.forward and "forward" not in module.__dict__:
                layers.setdefault((id(module.weight), id(module.bias)), []).append(module)
        elif not isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and _multiplies_rows(parameter):
                    module._parameters[name] = RowWeight.of(parameter, forms)
    for sharing in layers.values():
        form = forms.of_layers(sharing)
        for module in sharing:
            module.forward = form  # type: ignore[method-assign, assignment]  # called as the method is


def _multiplies_rows(parameter: Tensor) -> bool:
    """True if a module may multiply rows by it: a matrix (a router's) or, on a CPU, a stack of matrices (experts')."""
    return parameter.is_floating_point() and (
        parameter.dim() == 2 or (parameter.dim() == 3 and parameter.device.type == "cpu")
    )


class RowWeight(nn.Parameter):
    """A weight that is not an `nn.Linear`'s, or a stack of experts' weights; its products with rows use their forms."""

    forms: RowForms

    @classmethod
    def of(cls, weight: Tensor, forms: RowForms) -> RowWeight:
        made: RowWeight = torch.Tensor._make_subclass(cls, weight.detach(), False)
        made.forms = forms
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            second = args[1] if len(args) > 1 else None
            if function in _LINEAR and isinstance(second, cls) and second.dim() == 2:
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return second.forms.product(_plain_tensor(args[0]), _plain_tensor(second), bias)
            if function in _MATMUL and isinstance(second, cls) and args[0].dim() > 1:
                rows, weight, forms = _plain_tensor(args[0]), _plain_tensor(second), second.forms
                if weight.dim() == 2:
                    return forms.product(rows, weight.t())
                if rows.dim() == 3 and len(rows) == len(weight):
                    each = zip(rows.unbind(0), weight.unbind(0), strict=True)
                    return torch.stack([forms.product(its_rows, own.t()) for its_rows, own in each])
            made = function(*args, **kwargs)
            if function in _KEEPING and isinstance(args[0], cls):
                return _each_weight(made, args[0].forms)
            return made


def _plain_tensor(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor) if type(x) is RowWeight else x


def _each_weight(made: Any, forms: RowForms) -> Any:
    if isinstance(made, Tensor):
        return RowWeight.of(made, forms) if made.dim() in (2, 3) and made.is_floating_point() else made
    if isinstance(made, tuple | list):
        return type(made)([_each_weight(each, forms) for each in made])
    return made


_LINEAR = {F.linear}
_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}
_KEEPING = {
    *(Tensor.to, Tensor.type, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.contiguous, Tensor.detach),
    *(Tensor.t, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]  # a property of C
    *(Tensor.transpose, torch.transpose, Tensor.permute),
    *(Tensor.__getitem__, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unbind, Tensor.select, Tensor.squeeze),
    *(torch.chunk, Tensor.chunk, torch.split, Tensor.split, Tensor.data.__get__),  # type: ignore[attr-defined]  # a property of C
}
