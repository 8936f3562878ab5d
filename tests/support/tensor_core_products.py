"""Triton's interpreter with products of two-byte numbers as tensor cores make them; its own multiplies their bit
patterns, and its order of sums is a library's, which depends on the shape."""

from __future__ import annotations

import numpy as np

from tests.support.nearest_casts import round_casts

CHUNK = 16
"""Products that are added exactly, then rounded with the sum before them."""


def multiply_as_tensor_cores(monkeypatch):
    """Each number of a product is computed alike in a product of any shape."""
    from triton.runtime import interpreter

    def create_dot(self, a, b, before, input_precision, max_num_imprecise_acc):
        made = _product(_wide(a.data), _wide(b.data), np.asarray(before.data, np.float32))
        return interpreter.TensorHandle(made, before.dtype.scalar)

    round_casts(monkeypatch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _wide(numbers):
    if numbers.dtype == np.uint16:  # as the interpreter holds bfloat16
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float64)


def _product(a, b, before):
    if a.ndim == 3:
        return np.stack([_product(*each) for each in zip(a, b, before, strict=True)])
    made = before
    with np.errstate(invalid="ignore"):  # of poisoned keys, whose scores are masked
        for start in range(0, a.shape[1], CHUNK):
            chunk = made.astype(np.float64)
            for k in range(start, min(start + CHUNK, a.shape[1])):
                chunk += np.multiply.outer(a[:, k], b[k])
            made = chunk.astype(np.float32)
    return made
