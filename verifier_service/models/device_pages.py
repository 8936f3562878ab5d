"""The layouts of a target's pages on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tree_kernels.tree_attention import Layout
from tree_kernels.tree_attention.splits import why_not_on_tensor_cores

from verifier_service.models.seats import ProbedLayer


def device_layouts(probed: Sequence[ProbedLayer]) -> tuple[Layout, ...]:
    """Pages are in the dtype of the keys for layers that tensor cores attend, and in float32 for others."""
    return tuple(
        layer.layout if why_not_of(layer) else replace(layer.layout, dtype=layer.dtypes[0]) for layer in probed
    )


def why_not_of(layer: ProbedLayer) -> str:
    """Reason why a layer is not attended by tensor cores; empty if it is."""
    return why_not_on_tensor_cores(layer.layout, layer.group, layer.dtypes)


def attention_on_device(probed: Sequence[ProbedLayer]) -> str:
    """The form of the attention of these layers, with the reason where some are not on tensor cores."""
    whys = [why for layer in probed if (why := why_not_of(layer))]
    if not whys:
        return f"on tensor cores, pages in {str(probed[0].dtypes[0]).removeprefix('torch.')}"
    return f"on tensor cores in {len(probed) - len(whys)} layers, from float32 pages in {len(whys)}, as {whys[0]}"
