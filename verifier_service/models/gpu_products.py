"""Settings of the library's products on a GPU, so that fewer things change a row's bits."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

log = logging.getLogger("dendro.verifier")

KINDS = ("bf16", "fp16")


def settle_products() -> None:
    """Turn off, for this process, split-K and narrow sums in bfloat16 and float16 products, and TF32 in float32
    products.

    cuBLASLt is then asked for algorithms without split-K; cuBLAS has no such choice. Settings that this version of
    torch lacks are skipped: the check of a target's rows finds whether rows depend on each other. On an H200 (torch
    2.11) rows of 2 of 6 shapes depended on the number of rows before, none after.
    """
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    for kind in KINDS:
        setting = f"allow_{kind}_reduced_precision_reduction"
        try:
            setattr(matmul, setting, (False, False))  # sums in the narrow type, split-K
        except (TypeError, ValueError, RuntimeError):  # a torch whose setting is one bool
            setattr(matmul, setting, False)
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        library = "cuBLASLt"
    except RuntimeError as error:  # a build without it
        library = f"torch's choice ({error})"
    split = ", ".join(f"split-K {'on' if may_split_k(kind) else 'off'} in {kind}" for kind in KINDS)
    log.info("verifier: products by %s; %s; TF32 off", library, split)


def may_split_k(kind: str) -> bool:
    """True if products of a type, `bf16` or `fp16`, may split their inner dimension."""
    return bool(getattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction_split_k", True))


def accelerator_digest(device: torch.device) -> str:
    """8 hex digits of a SHA-256 of a GPU's model and the versions of torch, CUDA and Triton, which determine the order
    of sums."""
    import triton  # It may be missing on a machine without a GPU.

    about = torch.cuda.get_device_name(device), torch.__version__, torch.version.cuda, triton.__version__
    return hashlib.sha256(repr(about).encode()).hexdigest()[:8]
