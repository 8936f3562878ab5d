"""What is set for products on a GPU, and that a torch without a setting is served, too. None of it needs a GPU."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch

from verifier_service.models import load_target
from verifier_service.models.gpu_products import KINDS, may_split_k, settle_products

SETTINGS = [f"allow_{kind}_reduced_precision_reduction" for kind in KINDS]


@pytest.fixture
def restored():
    matmul = torch.backends.cuda.matmul
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)) for name in SETTINGS}
    tf32, library = matmul.allow_tf32, torch.backends.cuda.preferred_blas_library()
    yield
    for name, values in before.items():
        setattr(matmul, name, values)
    matmul.allow_tf32 = tf32
    torch.backends.cuda.preferred_blas_library(library)


def test_split_k_narrow_sums_and_tf32_are_off(restored, caplog):
    torch.backends.cuda.matmul.allow_tf32 = True
    with caplog.at_level(logging.INFO, "dendro.verifier"):
        settle_products()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not any(getattr(torch.backends.cuda.matmul, name) for name in SETTINGS)
    assert not any(map(may_split_k, KINDS))
    assert "split-K off in bf16, split-K off in fp16; TF32 off" in caplog.text


def test_the_log_says_where_a_torch_cannot_turn_split_k_off(monkeypatch, caplog):
    class OneBool:
        def __setattr__(self, name, value):
            if not isinstance(value, bool):
                raise TypeError(f"{name} is a bool")
            object.__setattr__(self, name, value)

    matmul = OneBool()
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name: name)
    with caplog.at_level(logging.INFO, "dendro.verifier"):
        settle_products()
    assert not any(vars(matmul).values()) and set(vars(matmul)) == {"allow_tf32", *SETTINGS}
    assert "products by cuBLASLt; split-K on in bf16, split-K on in fp16" in caplog.text


def test_a_target_on_a_gpu_is_loaded_with_them(monkeypatch, tmp_path):
    class Settled(Exception):
        pass

    def settle():
        raise Settled

    monkeypatch.setattr("verifier_service.models.settle_products", settle)
    monkeypatch.setattr("verifier_service.models.launching_on", lambda device: nullcontext())
    with pytest.raises(Settled):
        load_target(tmp_path, torch.bfloat16, torch.device("cuda"), (8,))


def test_memory_that_the_checks_of_products_took_is_given_back(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr("verifier_service.models._load", lambda *_: called.append("loaded"))
    monkeypatch.setattr("verifier_service.models.launching_on", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("emptied"))
    for device in ("cpu", "cuda"):
        load_target(tmp_path, torch.bfloat16, torch.device(device), (8,))
    assert called == ["loaded", "loaded", "emptied"]
