"""Calls the compiled softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tree_kernels.kernel_cache import NoKernelsError, load_kernels
from tree_kernels.row_softmax import shapes

MODULE = "tree_kernels.row_softmax.loops"


@cache
def _kernel() -> Callable[[int], None] | None:
    """The kernel; None where none can be compiled."""
    try:
        return load_kernels(MODULE).functions["softmax"]
    except NoKernelsError:
        return None


def prepare_softmax() -> None:
    """Load the kernel, or compile it, before the first request needs it. Does nothing where none can be compiled."""
    _kernel()


def softmax(scores: Tensor) -> Tensor:
    """Probabilities [rows, n] float32 of scores [rows, n] float32."""
    kernel = _kernel() if scores.device.type == "cpu" else None
    return torch.softmax(scores, dim=1) if kernel is None else _computed(kernel, scores)[0]


def log_probabilities(scores: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [k] float32 of the tokens `ids` [k] after a row of logits, each finite or minus infinity.

    scores [1, n] float32. An accelerator's softmax adds in an order that depends on the row's address, so the
    row is copied.
    """
    kernel = _kernel() if scores.device.type == "cpu" else None
    if kernel is None:
        return torch.log_softmax(scores.clone(), 1)[0, ids]
    _, top, log_sum = _computed(kernel, scores)
    return scores[0, ids] - top - log_sum


def _computed(kernel: Callable[[int], None], scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The law [rows, n], and of each row the greatest score and the logarithm of its sum, [rows] each."""
    assert scores.dtype == torch.float32
    given = scores.contiguous()
    law, spare = torch.empty_like(given), torch.empty(shapes.LANES, dtype=torch.float64)
    top, log_sum = given.new_empty(len(given)), given.new_empty(len(given))
    words = np.empty(shapes.CALL_WORDS, np.int64)
    words[shapes.ROWS], words[shapes.WIDTH] = given.shape
    for word, array in (
        (shapes.SCORES, given),
        (shapes.LAW, law),
        (shapes.GREATEST, top),
        (shapes.LOG_SUM, log_sum),
        (shapes.SPARE, spare),
    ):
        words[word] = array.data_ptr()
    kernel(words.ctypes.data)
    return law, top, log_sum
