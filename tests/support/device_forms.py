"""Loads a target on a CPU with the forms that it has on a GPU: the library's products, our norm kernel, attention on
tensor cores. Kernels run in Triton's interpreter, repaired."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from tree_layers.row_weights import make_rows_independent as library_rows

from tests.support.tensor_core_products import multiply_as_tensor_cores

CPU = torch.device("cpu")


def load_as_on_a_gpu(folder, buckets, monkeypatch, dtype=torch.bfloat16):
    from verifier_service.models import load_target
    from verifier_service.models.device_blocks import use_device_blocks
    from verifier_service.models.device_layers import use_device_layers
    from verifier_service.models.device_norms import use_norm_kernel
    from verifier_service.models.device_pages import device_layouts
    from verifier_service.models.joined_products import join_weights

    multiply_as_tensor_cores(monkeypatch)
    monkeypatch.setattr("tree_layers.linear.why_not_packed", lambda: "planted")
    monkeypatch.setattr("tree_layers.linear.can_be_packed", lambda weight: False)
    monkeypatch.setattr("tree_layers.wide_results.WIDENING", {"cpu"})
    monkeypatch.setattr("tree_layers.linear.faster_rows", lambda *_: {})
    monkeypatch.setattr("verifier_service.models.compiled.why_not_compiled", lambda: "planted")
    monkeypatch.setattr("verifier_service.models.use_row_functions", lambda model: use_norm_kernel(model, dtype, CPU))
    library = torch.mm

    def mm(x, weight, out_dtype=None):
        return (
            library(x, weight)
            if out_dtype is None
            else torch.addmm(x.new_zeros(1, dtype=out_dtype), x.float(), weight.float())
        )

    monkeypatch.setattr(torch, "mm", mm)
    made = []

    def make_rows_independent(model, forms):
        join_weights(model)
        library_rows(model, forms)
        made.append(forms)

    monkeypatch.setattr("verifier_service.models.make_rows_independent", make_rows_independent)
    with np.errstate(over="ignore"):
        target = load_target(folder, dtype, CPU, buckets)
        use_device_layers(target.model, target.run, target.max_positions, made[0])
        use_device_blocks(target.model, target.run, target.vocabulary)
    return replace(target, layouts=device_layouts(target.run.probed), linear=made[0].report())
