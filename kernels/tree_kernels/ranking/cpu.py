"""Calls the compiled ranking."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tree_kernels.kernel_cache import NoKernelsError, load_kernels

SPARE = 4 * 256
"""Bytes of the scores that the kernel computes at a time."""


@cache
def why_not_ranked() -> str:
    """Why the kernel cannot be compiled here; empty if it can."""
    try:
        _kernel()
    except NoKernelsError as error:
        return str(error)
    return ""


@cache
def _kernel() -> Any:
    return load_kernels("tree_kernels.ranking.loops").functions["ranking"]


def ranked(
    logits: Tensor,
    temperatures: Sequence[float],
    noise: Sequence[Tensor | None],
    vocabularies: Sequence[int],
    width: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Ids and scores [rows, width] of each row's best tokens, the lower id first among equals. Runs on a CPU.

    logits [rows, V] float32, any distance between rows   temperatures [rows]; 0: by the logits, without noise
    noise [rows], each at least [vocabulary] float32, None at temperature 0
    vocabularies [rows]: only tokens below count; at least `width`, at most V
    Raises NoKernelsError where the kernel cannot be compiled.
    """
    rows = len(logits)
    assert logits.stride(1) == 1 and width <= min(vocabularies) and max(vocabularies) <= logits.shape[1]
    table = np.empty((rows, 3), np.int64)
    table[:, 0] = logits.data_ptr() + 4 * logits.stride(0) * np.arange(rows)
    table[:, 1] = [0 if each is None else each.data_ptr() for each in noise]
    table[:, 2] = vocabularies
    degrees = np.array(temperatures, np.float32)
    ids, scores = np.empty((rows, width), np.int64), np.empty((rows, width), np.float32)
    spare = np.empty(SPARE // 4, np.float32)
    places = (each.ctypes.data for each in (ids, scores, spare))
    _kernel()(rows, table.ctypes.data, degrees.ctypes.data, width, *places)
    return ids, scores
