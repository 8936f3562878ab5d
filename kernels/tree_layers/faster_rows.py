"""Pads a product on a GPU to a larger number of rows where the library takes less time for more.

Without split-K cuBLASLt's choice for few rows can be slow: on an H200 a product of each layer of a GPT-NeoX of width
4,096 took 365 us with 8 rows, and none more than 45 us with 256. A form that passed the check of rows has the same bits
for each of these numbers, so times may choose among them: replicas that choose otherwise compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TIMED = {"cuda"}
"""Kinds of devices whose products are timed."""
REPEATS, TRIALS = 10, 3
"""Products between two readings of the device's clock, and readings; the shortest counts."""
LEAST_GAIN_S, LEAST_SHARE = 20e-6, 0.7
"""Least seconds that padding must save, and greatest share of the unpadded time that it may take: padding also copies
the rows and their results."""


def faster_rows(form: Callable[[Tensor], Tensor], rows: Tensor, buckets: Sequence[int]) -> Mapping[int, int]:
    """Numbers of rows to pad to, by number of rows; numbers that are faster unpadded are left out.
    rows [most, inputs]: rows that are timed"""
    seconds = {bucket: seconds_of(form, rows[None, :bucket]) for bucket in sorted(buckets)}
    found = {}
    for bucket, own_s in seconds.items():
        best = min((more for more in seconds if more >= bucket), key=seconds.__getitem__)
        if seconds[best] <= min(LEAST_SHARE * own_s, own_s - LEAST_GAIN_S):
            found[bucket] = best
    return found


def seconds_of(form: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The time of a product on x's GPU."""
    form(x)  # the library loads its kernels
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    took = []
    for _ in range(TRIALS):
        begin.record()
        for _ in range(REPEATS):
            form(x)
        end.record()
        end.synchronize()
        took.append(float(begin.elapsed_time(end)) / 1e3 / REPEATS)
    return min(took)


def padded(form: Callable[[Tensor], Tensor], more: Mapping[int, int]) -> Callable[[Tensor], Tensor]:
    """A form that pads n rows to `more[n]` rows, and does not pad numbers of rows that `more` lacks."""
    if not more:
        return form

    def run(x: Tensor) -> Tensor:
        rows = x.shape[-2]
        if rows not in more:
            return form(x)
        return form(F.pad(x, (0, 0, 0, more[rows] - rows)))[..., :rows, :]

    return run
