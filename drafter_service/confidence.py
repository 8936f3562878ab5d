"""Confidence: the estimated probability that a drafter's candidate is the text's next token, fitted online."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dendro.failures import log_failure
from dendro.tree import RANKED

log = logging.getLogger("dendro.drafter")

CANDIDATES = RANKED
"""K: number of best candidates of a row over which confidences are normalised."""
KEPT = 1 - 1 / 4096
"""Factor by which the curvature decays per token: after 4096 tokens, the weight of a token is 1/e."""
SHARPEST = 16.0
"""Upper bound of 1 / tau; the lower bound is its inverse."""
MOST_UNSEEN = 12.0
"""Upper bound of log n, with n as in `Calibration`; the lower bound is its negative."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A distribution over {candidate 0, ..., candidate K-1, none of them}, K = CANDIDATES, from the candidates' scores:

        c_j = exp(s_j / tau) / Z      c_none = n exp(s_(K-1) / tau) / Z      Z = sum of all of these

    All other tokens together have the weight of `n` tokens with the score of candidate K-1. Scores are logits / T plus
    the noise of the position; at temperature 0, logits. With shared noise a token's probability predicts its acceptance
    badly, and the gap between perturbed scores predicts it well (docs/design/drafting.md#chances). Adding a constant to
    all scores of a row changes nothing.

    Each token of the text moves both parameters by one step of gradient descent on -log c, divided by the curvature
    accumulated so far (the loss is convex in 1 / tau and log n). Immutable: `learn` returns a new value, so that a tree
    keeps the calibration that it started with.

    At first, candidates with scores 2, 1 and 0 have the chances 0.40, 0.15 and 0.05; after 50 tokens that were all the
    first candidate, the first has 0.73:

    >>> start = learned = Calibration()
    >>> for _ in range(50):
    ...     learned = learned.learn([2.0, 1.0, 0.0], rank=0)
    >>> [[round(math.exp(c), 2) for c in each.confidences([[2.0, 1.0, 0.0]])[0]] for each in (start, learned)]
    [[0.4, 0.15, 0.05], [0.73, 0.16, 0.03]]
    """

    sharpness: float = 1.0  # 1 / tau
    unseen: float = 2.0  # log n
    curvature: tuple[float, float, float] = (32.0, 0.0, 2.0)
    """Decayed sums of var(gap), cov(gap, none) and var(none); the initial values are the weight of the prior."""

    @property
    def tau(self) -> float:
        return 1.0 / self.sharpness

    def confidences(self, scores: Sequence[Sequence[float]]) -> list[list[float]]:
        """Log c of every candidate, in (-inf, 0], never increasing along a row.

        scores [rows][k], never increasing along a row. Candidates past the first K have the same normaliser, so that a
        row's confidences do not depend on k once k >= K.
        """
        found = []
        for row in scores:
            weights = [(score - row[0]) * self.sharpness for score in row]
            shown = weights[:CANDIDATES]
            total = sum(map(math.exp, shown)) + math.exp(self.unseen + shown[-1])
            normaliser = math.log(total)  # total >= 1: it has exp(0) of the first candidate
            found.append([weight - normaliser for weight in weights])
        return found

    def learn(self, scores: Sequence[float], rank: int) -> Calibration:
        """The calibration after one more row, whose next token was its candidate number `rank`; none of them if
        rank >= K.

        scores [k], never increasing; scores past the first K are ignored, and so is a row with scores that are not
        finite.
        """
        shown = scores[:CANDIDATES]
        gaps = [score - shown[-1] for score in shown]
        if not all(map(math.isfinite, gaps)):
            return self
        top = max(gaps[0] * self.sharpness, self.unseen)
        weights = [math.exp(gap * self.sharpness - top) for gap in gaps]
        none = math.exp(self.unseen - top)
        total = sum(weights) + none
        none /= total
        mean = sum(weight * gap for weight, gap in zip(weights, gaps, strict=True)) / total
        # The difference of the mean square and the squared mean would lose the curvature so far where gaps are large.
        spread = sum(weight * (gap - mean) ** 2 for weight, gap in zip(weights, gaps, strict=True)) / total
        hit = rank < len(gaps)
        slope, slope_none = mean - (gaps[rank] if hit else 0.0), none - (not hit)
        a, b, c = (KEPT * sum_ for sum_ in self.curvature)
        a, b, c = a + spread + none * mean * mean, b - mean * none, c + none - none * none
        scale = a * c - b * b
        sharpness = self.sharpness - (c * slope - b * slope_none) / scale
        unseen = self.unseen - (a * slope_none - b * slope) / scale
        return Calibration(
            min(max(sharpness, 1 / SHARPEST), SHARPEST), min(max(unseen, -MOST_UNSEEN), MOST_UNSEEN), (a, b, c)
        )


class Calibrations:
    """A drafter's calibrations by kind of scores: `logits`, `noise` or `temperature`. Ranks are noted while a caller
    waits for its tree, and learned once it has been sent."""

    def __init__(self) -> None:
        self._current = {kind: Calibration() for kind in ("logits", "noise", "temperature")}
        self._noted: list[tuple[str, Sequence[float], int]] = []

    def __getitem__(self, kind: str) -> Calibration:
        return self._current[kind]

    def note(self, kind: str, scores: Sequence[float], rank: int) -> None:
        """Keep arguments of `Calibration.learn` until `learn` is called."""
        self._noted.append((kind, scores, rank))

    def learn(self) -> None:
        """Learn what was noted, in that order."""
        noted, self._noted = self._noted, []
        for kind, scores, rank in noted:
            try:
                self._current[kind] = self._current[kind].learn(scores, rank)
            except ArithmeticError as error:  # a row of odd scores says nothing
                log_failure(log, error, "a rank could not be learned")
