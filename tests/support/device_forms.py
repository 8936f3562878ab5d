"""Loads a target on a CPU with the forms that it has on a GPU: the library's products, our norm kernel, attention on
tensor cores. Kernels run in Triton's interpreter, repaired."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.support.tensor_core_products import multiply_as_tensor_cores

CPU = torch.device("cpu")


def load_as_on_a_gpu(folder, buckets, monkeypatch, dtype=torch.bfloat16):
    from verifier_service.models import load_target
    from verifier_service.models.attention_layers import use_attention_layers
    from verifier_service.models.device_attention import PagedAttention
    from verifier_service.models.device_norms import use_norm_kernel
    from verifier_service.models.device_pages import device_layouts

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
    target = load_target(folder, dtype, CPU, buckets)
    use_attention_layers(target.model, target.run, target.max_positions, PagedAttention())
    return replace(target, layouts=device_layouts(target.run.probed))
