"""Gives gated MLPs of a target on an accelerator a forward of three launches: a product for gates and numbers, SiLU and
their product (`tree_kernels.swiglu`), and a product."""

from __future__ import annotations

from torch import Tensor, nn
from tree_layers.linear import Form, RowForms

from verifier_service.models.joined_products import joined_product
from verifier_service.models.row_functions import agrees, gated_parts


def use_gated_mlps(model: nn.Module, forms: RowForms) -> int:
    """Replace the forwards of MLPs that are gated by SiLU. Returns how many are."""
    count = 0
    for module in model.modules():
        parts = gated_parts(module)
        if parts is None or not agrees(module, _apart(*parts), parts[0].in_features, parts[0].weight.device):
            continue
        both = joined_product(module, "gate_proj", forms)
        ours = _apart(*parts) if both is None else _together(both, parts[0].out_features, parts[2])
        module.forward = ours
        count += 1
    return count


def _apart(gate: nn.Module, up: nn.Module, down: nn.Module) -> Form:
    from tree_kernels.swiglu.triton import swiglu_rows  # a CPU may have no triton

    def run(x: Tensor) -> Tensor:
        made: Tensor = down(swiglu_rows(gate(x), up(x)))
        return made

    return run


def _together(both: Form, width: int, down: nn.Module) -> Form:
    """The forward of a gated MLP. both: product for `width` gates and as many numbers   down: the last product"""
    from tree_kernels.swiglu.triton import swiglu_rows

    def run(x: Tensor) -> Tensor:
        gates = both(x)
        made: Tensor = down(swiglu_rows(gates[..., :width], gates[..., width:]))
        return made

    return run
