"""How likely each of a drafter's ordered guesses is the text's next token, learned while it drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from dendro.tree import FloatArray

CANDIDATES = 8
"""Ordered guesses of a row among which ranks are told apart, and against which a guess's chance is weighed."""
KEPT = 1 - 1 / 4096
"""What the curvature keeps from token to token: what was learned 4096 tokens ago counts for a third."""
SHARPEST = 16.0
"""The greatest 1 / tau; the least is its inverse."""
MOST_UNSEEN = 12.0
"""The greatest logarithm of the weight of what is not among the candidates; the least is its negative."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A law over {candidate 0, ..., candidate K-1, none of them} with K = CANDIDATES, from the candidates' scores:

        c_j = exp(s_j / tau) / Z      c_none = n exp(s_(K-1) / tau) / Z      Z = sum of all of these

    So the tokens that are not shown weigh as `n` more of the last one that is. Scores are logits / T plus the noise of
    the position, logits at temperature 0: with shared noise a token's probability says little of whether it will be
    accepted, and the gap between perturbed scores much (ALGORITHMS 4.3). A shift of all of a row changes nothing.

    Both parameters are fitted by one step of gradient descent on -log c for each token of the text, divided by the
    curvature seen so far (the loss is convex in 1 / tau and log n). A value: `learn` returns another, so that a tree
    that grows goes on by the one it began with.
    """

    sharpness: float = 1.0  # 1 / tau
    unseen: float = 2.0  # log n
    curvature: tuple[float, float, float] = (32.0, 0.0, 2.0)
    """Sums of variance, covariance and variance of (gap, none) under the law; at first, the trust in the start."""

    @property
    def tau(self) -> float:
        return 1.0 / self.sharpness

    def confidences(self, scores: FloatArray) -> FloatArray:
        """log c of every candidate, in (-inf, 0], never increasing along a row.

        scores [rows, k] float32, never increasing along a row. A candidate past the first K is weighed like them, so
        that a row's chances do not depend on how many of its candidates are asked for, once they are K.
        """
        known = min(CANDIDATES, scores.shape[1])
        weights = (scores - scores[:, :1]) * np.float32(self.sharpness)
        total = np.exp(weights[:, :known]).sum(1) + np.exp(np.float32(self.unseen) + weights[:, known - 1])
        chances: FloatArray = weights - np.log(total)[:, None]  # the total holds exp(0) for the first, so is at least 1
        return chances

    def learn(self, scores: FloatArray, rank: int) -> Calibration:
        """What is known once the token after a row has turned out to be its candidate `rank`; none of them if >= K.

        scores [k] as in `confidences`. Those past the first K are not looked at.
        """
        shown = [float(score) for score in scores[:CANDIDATES]]
        gaps = [score - shown[-1] for score in shown]
        if not all(map(math.isfinite, gaps)):
            return self
        top = max(gaps[0] * self.sharpness, self.unseen)
        law = [math.exp(gap * self.sharpness - top) for gap in gaps]
        none = math.exp(self.unseen - top)
        total = sum(law) + none
        none /= total
        mean = sum(weight * gap for weight, gap in zip(law, gaps, strict=True)) / total
        square = sum(weight * gap * gap for weight, gap in zip(law, gaps, strict=True)) / total
        hit = rank < len(gaps)
        slope, slope_none = mean - (gaps[rank] if hit else 0.0), none - (not hit)
        a, b, c = (KEPT * sum_ for sum_ in self.curvature)
        a, b, c = a + square - mean * mean, b - mean * none, c + none - none * none
        scale = a * c - b * b
        sharpness = self.sharpness - (c * slope - b * slope_none) / scale
        unseen = self.unseen - (a * slope_none - b * slope) / scale
        return Calibration(
            min(max(sharpness, 1 / SHARPEST), SHARPEST), min(max(unseen, -MOST_UNSEEN), MOST_UNSEEN), (a, b, c)
        )
