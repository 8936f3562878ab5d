"""Temperature, top-k, top-p and min-p, the target's token, and the order of a drafter's guesses.

Rows are independent: a row warped alone equals, bit for bit, the same row warped in a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tree_kernels.row_softmax import softmax

SMALLEST_TEMPERATURE = 1e-6
"""Least temperature above 0, which is greedy: dividing by less may overflow float32."""
LARGEST_TEMPERATURE = 1e30
"""Greatest temperature. It must be finite in float32: -inf divided by infinity is NaN."""

FIRST_WIDTHS = (64, 1024)
"""Numbers of the likeliest tokens that top-p and min-p try before all tokens."""


@dataclass(frozen=True, slots=True)
class Warp:
    """Sampling parameters. Temperature 0 is greedy; the others are then ignored."""

    temperature: float = 0.0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or SMALLEST_TEMPERATURE <= self.temperature <= LARGEST_TEMPERATURE):
            raise ValueError(
                f"temperature: must be 0 (greedy), or {SMALLEST_TEMPERATURE} to {LARGEST_TEMPERATURE}, "
                f"got {self.temperature}"
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k: must be a whole number, 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be above 0 and at most 1 (off), got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p: must be at least 0 (off) and below 1, got {self.min_p}")

    @classmethod
    def of(cls, sampling: object) -> Self:
        """Warp of a request's sampling parameters, which have the same field names."""
        return cls(**{each.name: getattr(sampling, each.name) for each in fields(cls)})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def masks(self) -> bool:
        """True if any filter is on."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Ranking:
    """A drafter's guesses for each row, best first."""

    ids: Tensor  # [rows, k] int64, unique within a row
    scores: Tensor  # [rows, k] float32: logits / temperature + noise, unmasked (so the first need not be the largest)


def warp(logits: Tensor, warp: Warp) -> Tensor:
    """Warp logits [rows, vocabulary]. Returns scores float32 of this shape: logits / temperature, -inf where removed.

    The order is top-k, top-p, min-p, as in transformers; at least one token stays. Ties are broken by the
    lowest id, so exactly top_k tokens stay. At temperature 0 returns the logits unchanged (not a copy).
    """
    return _warped(logits, warp)


def _warped(logits: Tensor, warp: Warp) -> Tensor:  # called where an argument is named warp
    if warp.greedy:
        return logits.float()
    scores = logits.float() / warp.temperature
    removed = _removed(scores, warp)
    return scores if removed is None else scores.masked_fill_(removed, -math.inf)


def _removed(scores: Tensor, warp: Warp) -> Tensor | None:
    """Mask [rows, vocabulary] of the tokens that top-k, then top-p, then min-p remove; None if all are off."""
    vocabulary = scores.shape[1]
    if 0 < warp.top_k < vocabulary:
        best = _largest(scores, warp.top_k + 1)  # one more than is kept, to detect a tie with the last one
        law = softmax(best[:, : warp.top_k])
        return _all_but(scores, best, _nucleus(law, _mass(law), warp))
    if warp.top_p == 1 and warp.min_p == 0:
        return None
    law = softmax(scores)
    mass = _mass(law)
    for width in (*(width for width in FIRST_WIDTHS if 4 * width <= vocabulary), vocabulary):
        # A longer list begins with the shorter one, so the width does not change the result.
        kept = _nucleus(_largest(law, width), mass, warp)
        if bool((kept < width).all()):
            break
    return _all_but(scores, _largest(scores, width), kept)  # by score: unequal scores can have equal probabilities


def _mass(law: Tensor) -> Tensor:
    """The sum of each row of float32 probabilities, [rows, 1] float64: up to 3e-7 away from 1.

    By cumsum, which adds in order; a sum over one long row may be split among threads.
    """
    return law.cumsum(dim=1, dtype=torch.float64)[:, -1:]


def _nucleus(law: Tensor, mass: Tensor, warp: Warp) -> Tensor:
    """The number of tokens that top-p and min-p keep, [rows, 1]. law [rows, width] float32, descending.

    top-p keeps a token if the sum of those before it is less than top_p: the smallest set with at least top_p.
    """
    kept = torch.full((law.shape[0], 1), law.shape[1], device=law.device)
    if warp.top_p < 1:
        before = law[:, :-1].cumsum(dim=1, dtype=torch.float64)
        kept = 1 + (before < warp.top_p * mass).sum(dim=1, keepdim=True)
    if warp.min_p > 0:
        likely = (law >= warp.min_p * law[:, :1]).sum(dim=1, keepdim=True)
        kept = torch.minimum(kept, likely.clamp(min=1))  # 0 only if a logit is NaN
    return kept


def _all_but(values: Tensor, best: Tensor, kept: Tensor) -> Tensor:
    """Mask [rows, n] of all but each row's `kept` [rows, 1] largest values; among equals the lowest ids are kept.

    best [rows, width]: the row's largest values, descending, at least one more than `kept` if there are more.
    """
    last = best.gather(1, kept - 1)
    removed = values < last
    following = best.gather(1, kept.clamp(max=best.shape[1] - 1))
    tied = (last == following) & (kept < best.shape[1]) & (last > -math.inf)
    if bool(tied.any()):
        equal = values == last
        room = kept - (~removed & ~equal).sum(dim=1, keepdim=True)
        removed |= equal & (equal.cumsum(dim=1) > room)
    return removed


def _largest(values: Tensor, count: int) -> Tensor:
    """Each row's `count` largest values, descending: [rows, count]. The rest of a row is not sorted.

    On a CPU, NumPy's vectorised selection takes a third of topk's time, and its sort a twentieth of torch's.
    """
    if values.device.type != "cpu":
        return values.topk(count, dim=1).values
    array = values.detach().numpy()
    cut = array.shape[1] - count
    tail = np.partition(array, cut, axis=1)[:, cut:] if cut else array
    return torch.from_numpy(np.sort(tail, axis=1)[:, ::-1].copy())


def tokens_of(logits: Tensor, warp: Warp, noise: Tensor | None) -> Tensor:
    """The target's token of each row: argmax(warped logits + noise), the lowest id on ties.

    logits and noise [rows, vocabulary]; noise is None if and only if the temperature is 0; returns [rows] int64.

    Noise of 2 on the second token outweighs its smaller logit; a temperature of 0.25 makes the difference 4:

    >>> logits, noise = torch.tensor([[3.0, 2.0, 0.0]]), torch.tensor([[0.0, 2.0, 0.0]])
    >>> [tokens_of(logits, Warp(temperature), noise).item() for temperature in (1.0, 0.25)]
    [1, 0]
    """
    _check_noise(logits, warp, noise)
    scores = _warped(logits, warp)
    return torch.argmax(scores if noise is None else scores + noise, dim=1)


def drafter_order(logits: Tensor, warp: Warp, noise: Tensor | None, k: int) -> Tensor:
    """The ids of `drafter_ranking`: [rows, k] int64, best first."""
    return drafter_ranking(logits, warp, noise, k).ids


def drafter_ranking(logits: Tensor, warp: Warp, noise: Tensor | None, k: int) -> Ranking:
    """Rank a drafter's k guesses for each row, with the noise that the target will use for the token being guessed.

    The first guess is from the law masked by top-k, top-p and min-p; the others are from the unmasked law, since the
    target's mask may keep tokens that the drafter's removes. At temperature 0: the k largest logits, ties by the lowest
    id.
    """
    _check_noise(logits, warp, noise)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: must be 1 to {logits.shape[1]}, the vocabulary, got {k}")
    scores = logits.float()
    if noise is None:
        ids = _ordered(scores, k)
        return Ranking(ids, scores.gather(1, ids))
    scores = scores / warp.temperature
    removed = _removed(scores, warp)
    scores += noise
    if removed is None:
        ids = _ordered(scores, k)
    else:
        first = scores.masked_fill(removed, -math.inf).argmax(dim=1, keepdim=True)
        ids = _ordered(scores.scatter(1, first, math.inf), k)
    return Ranking(ids, scores.gather(1, ids))


def _ordered(values: Tensor, k: int) -> Tensor:
    """The ids of each row's k largest values, by (value descending, id ascending): [rows, k]."""
    best = values.topk(min(k + 1, values.shape[1]), dim=1)
    ids = best.indices[:, :k].contiguous()
    tied = (best.values[:, 1:] == best.values[:, :-1]).any(dim=1)
    for row in tied.nonzero()[:, 0].tolist():  # topk has no defined order among equals
        candidates = (~(values[row] < best.values[row, k - 1])).nonzero()[:, 0]  # ascending
        ids[row] = candidates[values[row, candidates].sort(descending=True, stable=True).indices[:k]]
    return ids


def _check_noise(logits: Tensor, warp: Warp, noise: Tensor | None) -> None:
    if warp.greedy != (noise is None):
        raise ValueError("noise: must be None at temperature 0, and a tensor at any other")
    if noise is not None and noise.shape != logits.shape:
        raise ValueError(f"noise: must have the shape of logits, {list(logits.shape)}, got {list(noise.shape)}")
