"""Thompson sampling: play the arm that is best under one sample from the posterior.

An arm's N is modelled as normal, with a Normal-Gamma prior of its mean and precision; an arm's index is the sampled
mean over the predicted time. The posterior is of N rather than log(N / T), whose mean prefers a steady arm to a faster
one (3 tokens to 1 or 7). T_k is predicted and needs no posterior.

    precision ~ Gamma(a, rate b)     mean ~ Normal(m, 1 / (c * precision))

    c = 1 + n    m = (m0 + n * mean N) / c    a = 1 + n / 2    b = b0 + n * var N / 2 + n * (mean N - m0)^2 / (2 c)
    m0 = 1 + depth / 2    b0 = (depth / 4)^2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.arms import Arm
from cluster.policies.experience import Experience
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.rate import RatePolicy

STREAM = 0x7407
"""Separates its random numbers from others derived from the request's seed."""


class Thompson(RatePolicy):
    """The policy of one request. Equal seeds, costs and rounds give equal choices."""

    def __init__(
        self,
        arms: Sequence[Arm],
        experience: Experience,
        temperature: float,
        seed: int,
        prior: Prior = NO_PRIOR,
    ) -> None:
        """seed: at least 0, of any size."""
        super().__init__(arms, experience, temperature, prior)
        self._rng = np.random.default_rng([STREAM, seed])
        self._deepest = np.array([arm.depth for arm in self.arms], np.float64)
        self._sampled = dict.fromkeys(self.arms, 1.0)  # means, for the current choice

    def hoped(self, arm: Arm) -> float:
        """The mean tokens of a round, as sampled for the current choice."""
        return self._sampled[arm]

    def _best(self, arms: Sequence[Arm]) -> Arm:
        self._sample()
        return super()._best(arms)

    def _sample(self) -> None:
        lengths = [self.lengths[arm] for arm in self.arms]
        rounds = np.array([length.rounds for length in lengths])
        mean = np.array([length.mean for length in lengths])
        spread = np.array([length.variance for length in lengths])
        middle, weight = 1 + self._deepest / 2, 1 + rounds
        rate = np.square(self._deepest / 4) + rounds * (spread + np.square(mean - middle) / weight) / 2
        centre = (middle + rounds * mean) / weight
        precision = self._rng.standard_gamma(1 + rounds / 2) / np.maximum(rate, 1e-9)
        sampled = centre + self._rng.standard_normal(len(lengths)) / np.sqrt(weight * np.maximum(precision, 1e-9))
        # An arm emits 1 to depth + 1 tokens, so `off` exactly 1.
        self._sampled = dict(zip(self.arms, np.clip(sampled, 1.0, 1 + self._deepest).tolist(), strict=True))
