"""The layouts of a target's pages on an accelerator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tree_kernels.tree_attention import Layout
from tree_kernels.tree_attention.splits import why_not_on_tensor_cores

from verifier_service.models.seats import ProbedLayer


def device_layouts(probed: Iterable[ProbedLayer]) -> tuple[Layout, ...]:
    """Pages are in the dtype of the keys for layers that tensor cores attend, and in float32 for others."""
    return tuple(
        layer.layout if why_not_of(layer) else replace(layer.layout, dtype=layer.dtypes[0]) for layer in probed
    )


def why_not_of(layer: ProbedLayer) -> str:
    """Reason why a layer is not attended by tensor cores; empty if it is."""
    return why_not_on_tensor_cores(layer.layout, layer.group, layer.dtypes)
