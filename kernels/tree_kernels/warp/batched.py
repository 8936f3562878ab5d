"""The target's tokens of rows with parameters per row. The host reads no value, so a step can be captured.

The order of the filters, and of ties, is that of `reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

PART_ROWS = 32
"""Rows that are filtered at once: filters need about 70 bytes for each token of a row, at most 80."""
UNITS = 2.0**60
"""Number of units in the probability 1. The units of a row sum to about this number, which an int64 holds."""


@dataclass(frozen=True, slots=True)
class WarpRows:
    """The fields of `Warp` for each row, [rows] each. A greedy row has temperature 0."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64, 0 is off
    top_p: Tensor  # float64, 1 is off
    min_p: Tensor  # float32, 0 is off

    @classmethod
    def of(cls, given: Mapping[str, Tensor]) -> Self:
        """The rows of arrays by the fields' names: `top_k` of int64, the others of float64."""
        narrow = {name: given[name].float() for name in ("temperature", "min_p")}
        return cls(top_k=given["top_k"], top_p=given["top_p"], **narrow)

    def part(self, rows: slice) -> WarpRows:
        return WarpRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def tokens_of_rows(logits: Tensor, warp: WarpRows, noise: Tensor, masks: bool) -> Tensor:
    """argmax(warped logits + noise) of each row, the lowest id on ties; [rows] int64.

    logits, noise [rows, vocabulary] float32; the noise of a greedy row is ignored. masks: whether any row has a filter;
    if not, no row is sorted.
    """
    greedy = (warp.temperature == 0)[:, None]
    scores = logits.float() / torch.where(greedy, 1.0, warp.temperature[:, None])
    if masks:
        for first in range(0, len(scores), PART_ROWS):
            part = slice(first, first + PART_ROWS)
            scores[part] = torch.where(greedy[part], scores[part], _filtered(scores[part], warp.part(part)))
    return torch.argmax(torch.where(greedy, scores, scores + noise), dim=1)


def _filtered(scores: Tensor, warp: WarpRows) -> Tensor:
    """scores [rows, vocabulary] with -inf where top-k, then top-p, then min-p remove a token."""
    vocabulary = scores.shape[1]
    ordered, ids = scores.sort(dim=1, descending=True, stable=True)  # the lower id first among equals
    ranks = torch.arange(vocabulary, device=scores.device)[None]
    width = torch.where(warp.top_k > 0, warp.top_k, vocabulary)[:, None]
    kept = ranks < width
    law = _softmax(ordered.masked_fill(~kept, -math.inf))
    # Sums of whole numbers have one value in any order; an accelerator's order depends on the number of rows.
    units = (law.double() * UNITS).long()
    mass = units.cumsum(dim=1)
    before = mass - units
    kept &= (before < warp.top_p[:, None] * mass[:, -1:]) | (warp.top_p[:, None] == 1)
    kept &= law >= warp.min_p[:, None] * law[:, :1]
    kept |= ranks == 0
    return torch.full_like(scores, -math.inf).scatter(1, ids, ordered.masked_fill(~kept, -math.inf))


def _softmax(scores: Tensor) -> Tensor:
    """The softmax of each row of scores [rows, vocabulary], wherever the row is among others.

    On an accelerator torch gives a row's numbers to threads by the row's address modulo 16 bytes, which changes the
    order of its sum: rows are padded with -inf, so that each begins at a multiple of 16 bytes.
    """
    vocabulary = scores.shape[1]
    return torch.softmax(F.pad(scores, (0, -vocabulary % 4), value=-math.inf), dim=1)[:, :vocabulary]
