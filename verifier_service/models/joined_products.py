"""One product for several linear layers that multiply the same rows: a GPU reads one large weight faster than several
small ones.

The weights lie one after another in one tensor, which the layers' own weights are views of: nothing is held twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tree_layers.linear import Form, RowForms

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that multiply the same rows."""


class _Together(NamedTuple):
    weight: Tensor  # [outputs of all, inputs]
    bias: Tensor | None


def join_weights(model: nn.Module) -> None:
    """Put the weights of layers that multiply the same rows (JOINED) into one tensor. Called before products get their
    forms."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for module in model.modules():
        for names in JOINED:
            layers = [getattr(module, name, None) for name in names]
            if not all(type(layer) is nn.Linear and uses[id(layer.weight)] == 1 for layer in layers):
                continue
            together = _joined(layers)  # type: ignore[arg-type]  # they were asked for their type
            if together is not None:
                vars(module)[_place(names[0])] = together
                if together.weight.device.type == "cuda":
                    torch.cuda.empty_cache()  # else torch keeps every weight's former memory


def _joined(layers: Sequence[nn.Linear]) -> _Together | None:
    if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        return None
    rows = [len(layer.weight) for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    for layer, part in zip(layers, weight.split(rows), strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    if bias is not None:
        for layer, part in zip(layers, bias.split(rows), strict=True):
            layer.bias = nn.Parameter(part, requires_grad=False)
    return _Together(weight, bias)


def joined_product(module: Any, first: str, forms: RowForms) -> Form | None:
    """The one product for a module's joined layers, of which `first` is the first; None where they are not joined, or
    where the joined product fails the check of rows that the single products passed."""
    together = vars(module).get(_place(first))
    if together is None:
        return None
    names = next(names for names in JOINED if names[0] == first)
    return forms.joined(together.weight, together.bias, [getattr(module, name) for name in names])


def _place(first: str) -> str:
    return f"dendro_joined_{first}"
