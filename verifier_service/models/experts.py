"""Experts whose results for a row do not depend on the number of rows that each expert gets.

transformers multiplies all rows that chose an expert at once, one row or hundreds, and matrix libraries round products
of few rows differently from those of many. Here each expert's rows are padded to a number of rows that its product was
checked for, a multiple of 1, 4 or 8. A row's experts are added up in the order of their ranks, in float32, and rounded
once, as in transformers' `grouped_mm`.

This is for the classes that transformers decorates with `use_experts_implementation`. Their attributes state whether
they have gates and biases, and whether their weights are transposed. Other experts keep the library's forward; their
products get row-independent forms like those of all weights (`tree_layers.row_weights`).
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tree_kernels.runs import places_in_runs
from tree_layers.linear import Form, RowForms

SAFE_ROWS = 64
"""The rows of all experts together are padded to a multiple of this, so that their buffer has no tail at any width
(`tree_kernels.elementwise`)."""


def seat_experts(model: nn.Module, forms: RowForms) -> None:
    """Replace the forward of all experts on a CPU. On an accelerator they keep the library's: ours reads on the host
    which experts were chosen, and would have to wait for the device."""
    module: Any
    for module in model.modules():
        if is_experts(module) and module.down_proj.device.type == "cpu":
            first = "gate_up_proj" if module.has_gate else "up_proj"
            unit = max(_unit_of(module, name, forms) for name in (first, "down_proj"))
            products, down = (_forms_of(module, name, forms, unit) for name in (first, "down_proj"))
            module.dendro_experts = _Experts(products, down, unit)
            module.forward = types.MethodType(_forward, module)


def is_experts(module: Any) -> bool:
    """True if transformers decorates the module's class with `use_experts_implementation`."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


@dataclass(frozen=True, slots=True)
class _Experts:
    """The products of each expert: into its inner width, and back."""

    first: tuple[Form, ...]
    down: tuple[Form, ...]
    unit: int  # each expert's rows are padded to a multiple of this number


def _weights_of(module: Any, name: str) -> tuple[Tensor, list[Tensor | None]]:
    """Weights [experts, outputs, inputs], and each expert's bias, if any."""
    weights: Tensor = getattr(module, name).detach()
    biases = [*getattr(module, f"{name}_bias").detach()] if module.has_bias else [None] * len(weights)
    return weights.transpose(1, 2) if module.is_transposed else weights, biases


def _unit_of(module: Any, name: str, forms: RowForms) -> int:
    weights, biases = _weights_of(module, name)
    return forms.unit(weights[0], biases[0], may_pack=True)


def _forms_of(module: Any, name: str, forms: RowForms, unit: int) -> tuple[Form, ...]:
    weights, biases = _weights_of(module, name)
    found = tuple(forms.of(each, own, may_pack=True, unit=unit) for each, own in zip(weights, biases, strict=True))
    if forms.packs(weights[0], biases[0]):
        setattr(module, name, nn.Parameter(weights.to("meta"), requires_grad=False))
    return found


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the chosen experts. hidden_states [rows, D], top_k_index and top_k_weights [rows, k]; returns [rows, D]"""
    experts: _Experts = self.dendro_experts
    rows, ranks = top_k_index.shape
    chosen = top_k_index.reshape(-1).numpy()
    counts = np.bincount(chosen, minlength=len(experts.down))
    room = -(-counts // experts.unit) * experts.unit
    ends = np.cumsum(room)
    begins = ends - room
    order = np.argsort(chosen, kind="stable")  # pairs of row and rank, by expert
    places = np.empty(len(order), np.int64)
    places[order] = begins[chosen[order]] + places_in_runs(counts)
    source = np.zeros(-(-int(ends[-1]) // SAFE_ROWS) * SAFE_ROWS, np.int64)  # padding copies the first row
    source[places] = np.arange(len(order)) // ranks

    given = hidden_states.index_select(0, torch.from_numpy(source))
    active = [(expert, int(begins[expert]), int(ends[expert])) for expert in np.flatnonzero(counts).tolist()]
    inner = _applied(experts.first, given, active)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = _applied(experts.down, inner, active)
    if getattr(self, "has_post_expert_norm", False):  # transformers 5.17 has no such experts
        outer = self.post_expert_norm(outer)
    found = outer.index_select(0, torch.from_numpy(places)).view(rows, ranks, -1) * top_k_weights[..., None]
    total = found[:, 0].float()
    for rank in range(1, ranks):
        total = total + found[:, rank]
    return total.to(hidden_states.dtype)


def _applied(forms: tuple[Form, ...], rows: Tensor, active: list[tuple[int, int, int]]) -> Tensor:
    """Each expert's product with its range of rows; zeros for the rows after the last range."""
    made = [forms[expert](rows[start:stop]).as_subclass(Tensor) for expert, start, stop in active]
    missing = len(rows) - active[-1][2]
    if missing:
        made.append(made[0].new_zeros(missing, made[0].shape[-1]))
    return torch.cat(made)
