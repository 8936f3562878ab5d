"""The attention of a layer on an accelerator, in three launches: one rotates queries and keys and writes to the pages,
two attend."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from tree_kernels.tree_attention import Layout, RowRotation, TreeRows

from verifier_service.models.attention_layers import ROWS, Attends, Heads
from verifier_service.models.device_pages import why_not_of
from verifier_service.models.scaled_rows import same_bits
from verifier_service.models.seats import ForwardContext, ProbedLayer


class PagedAttention:
    """Attention on tensor cores, from pages in the model's dtype."""

    def layout_of(self, layer: ProbedLayer) -> Layout | None:
        return None if why_not_of(layer) else replace(layer.layout, dtype=layer.dtypes[0])

    def serves(self, run: ForwardContext, attends: Attends) -> bool:
        # The model's interface attends from other pages, such as those of the checks of a load.
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
