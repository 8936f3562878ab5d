"""The attention of a layer on an accelerator, in three launches: one rotates queries and keys and writes to the pages,
two attend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tree_kernels.tree_attention import Layout, RowRotation, TreeRows
from tree_layers.linear import RowForms

from verifier_service.models.attention_layers import PROJECTIONS, ROWS, Attends, Heads, in_heads, projected
from verifier_service.models.device_pages import why_not_of
from verifier_service.models.joined_products import joined_product
from verifier_service.models.scaled_rows import same_bits
from verifier_service.models.seats import ForwardContext, ProbedLayer


class PagedAttention:
    """Attention on tensor cores, from pages in the model's dtype."""

    def __init__(self, forms: RowForms) -> None:
        self._forms = forms

    def layout_of(self, layer: ProbedLayer) -> Layout | None:
        return None if why_not_of(layer) else replace(layer.layout, dtype=layer.dtypes[0])

    def projections(self, layer: Any, layout: Layout) -> Callable[[Tensor], Heads]:
        product = joined_product(layer, PROJECTIONS[0], self._forms)
        if product is None:
            return partial(projected, layer, layout)
        widths = [getattr(layer, name).out_features for name in PROJECTIONS]
        return lambda hidden: in_heads(layer, layout, *product(hidden).split(widths, 2))

    def serves(self, run: ForwardContext, attends: Attends) -> bool:
        # The checks while loading attend from other pages, through transformers' attention interface.
        assert run.pages is not None
        return not isinstance(run.step, TreeRows) and run.pages.layouts[attends.layer] == attends.layout

    def attend(self, heads: Heads, run: ForwardContext, attends: Attends, rotation: RowRotation) -> Tensor:
        from tree_kernels.tree_attention.rotation import rotate_and_write  # a CPU may have no triton
        from tree_kernels.tree_attention.tensor_cores import SplitRows, attend_pages

        assert run.pages is not None and isinstance(run.step, SplitRows)
        pages = run.pages.layers[attends.layer]
        query = rotate_and_write(pages, *heads, run.step.slots, attends.layout, rotation)
        how = attends.scaling, attends.window, attends.softcap, attends.sinks
        return attend_pages(query, pages, run.step, attends.layout, *how)

    def passes(self, heads: Heads, given: Heads, layout: Layout, scaling: float, rotation: RowRotation) -> bool:
        from tree_kernels.tree_attention.rotation import rotate_and_write

        pages = layout.pool(1 + ROWS, rotation.cos.device)
        slots = torch.arange(1, 1 + ROWS, device=rotation.cos.device)
        query = rotate_and_write(pages, *heads, slots, layout, rotation)
        key, value = (
            pages[1:]
            .transpose(0, 1)[..., : layout.key_dim + layout.value_dim]
            .split([layout.key_dim, layout.value_dim], 2)
        )
        return all(map(same_bits, (query, key, value), given))
