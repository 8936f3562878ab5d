"""Full information: every static arm is judged by what it would have emitted on this request's text, played or not.

    index_k = E[N_k] / T_k        E[N_k] = mean N of the arm's re-run on the ranks of the last tokens (`Replay`)

An arm is known without being played, so there is no exploration, with two exceptions. A text without a prior begins
with trees until LEAST_RANKED of its tokens are ranked. And since ranks come with drafts only, a tree is drafted after
PROBE_EVERY rounds without one; its trace has the ranks of all tokens since the last tree, so the replay has no gap.
Trees that do not come reduce the E[N] of all arms of their drafter alike.

Beam and dynamic trees depend on values of guesses, which are not recorded. Those arms are judged by their own rounds,
as in `RatioUCB`; so are arms wider than RANKED, and all arms while there are no ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from dendro.calls import IDLE_ROUNDS
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm, drafters_of
from cluster.policies.costs import EmittedLength
from cluster.policies.experience import Experience
from cluster.policies.offers import Offer
from cluster.policies.prices import Prices
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.rate import OPENING_ROUNDS
from cluster.policies.ratio_ucb import RatioUCB
from cluster.policies.replay import WINDOW, Ranked, RankTrace, Replay, replayed

PROBE_EVERY = IDLE_ROUNDS - 4
"""Rounds without a drafter before a tree is drafted as a probe. Fewer than those after which the drafter's lease is
released, and with it the trace. The smallest tree costs some tenths of a round, so one probe in 28 rounds costs 1 to
2 %."""
LEAST_RANKED = 8
"""Ranked tokens before `off` may be chosen because of them: the first few wrong guesses are weak evidence."""
LATE_STEP = 0.1


class FullInfo(RatioUCB):
    """The policy of one request. Costs of arms never played are predicted from those of others, so no arm is tried
    only to measure its time."""

    def __init__(
        self,
        arms: Sequence[Arm],
        experience: Experience,
        temperature: float,
        prior: Prior = NO_PRIOR,
        window: int = WINDOW,
    ) -> None:
        """window: text tokens, 64 to 256, over which arms are judged"""
        super().__init__(arms, experience, temperature, prior)
        self.replayed = [arm for arm in self.arms if replayed(arm.shape)]
        self._window = window
        self.means: dict[Arm, float] = {}  # tokens of a round whose tree comes, from replay and prior
        self._trace = RankTrace()
        self._arrival = dict.fromkeys(
            drafters_of(self.arms), 1.0
        )  # by drafter: smoothed share of requested trees that came
        self._drafted_rounds = 0
        self._undrafted_rounds = 0  # since a drafter was last asked

    @functools.cached_property
    def replays(self) -> dict[str, Replay]:
        return {
            drafter: Replay([arm.shape for arm in self.replayed if arm.maker == drafter], self._window)
            for drafter in self._arrival
        }

    @functools.cached_property
    def _priors(self) -> dict[Arm, EmittedLength]:
        return {arm: self.lengths[arm].at_most(math.inf) for arm in self.replayed}

    def hoped(self, arm: Arm) -> float:
        mean = self.means.get(arm)
        return super().hoped(arm) if mean is None else 1 + self._arrival[arm.maker] * (mean - 1)

    def _price(self, arm: Arm, prices: Prices) -> float | None:
        return prices.predicted_us(arm, self.rows(arm))

    def choose(self, offer: Offer | None = None) -> Arm:
        arm = super().choose(offer)
        if arm.drafted or not self.replayed:
            self._undrafted_rounds = 0
            return arm
        self._undrafted_rounds += 1
        trial = self.experience.concurrency.trial
        if self._undrafted_rounds <= PROBE_EVERY or not (trial is None or self._may_guess(trial)):
            return arm
        self._undrafted_rounds = 0
        return min(self.replayed, key=lambda arm: (self.round_us(arm) or math.inf, arm.rows))

    @property
    def stays_off(self) -> bool:
        return super().stays_off and (self._excluded or self._undrafted_rounds < PROBE_EVERY or not self.replayed)

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        ranked = self._trace.learn(arm.maker, tree, verdict)
        if arm.drafted:
            if ranked.ranks:
                self._replay(arm.maker, ranked)
            self._drafted_rounds += 1
            if not self._openings.get(arm.maker) or not tree.missed:
                self._arrival[arm.maker] += LATE_STEP * ((not tree.missed) - self._arrival[arm.maker])
        super().learn(arm, tree, verdict)

    def _replay(self, drafter: str, ranked: Ranked) -> None:
        """Advance the drafter's arms by the ranks of a trace."""
        replay = self.replays[drafter]
        if not ranked.joined:
            replay.cut()
        replay.feed(ranked.ranks)
        arms = [arm for arm in self.replayed if arm.maker == drafter]
        for arm, tokens, rounds in zip(arms, replay.tokens.tolist(), replay.rounds.tolist(), strict=True):
            prior = self._priors[arm]
            if rounds + prior.rounds:
                self.means[arm] = (tokens + prior.rounds * prior.mean) / (rounds + prior.rounds)

    def _best(self, arms: Sequence[Arm]) -> Arm:
        if self._excludes_off and self.experience.predicted_us(OFF_ARM) is not None:
            arms = [arm for arm in arms if not arm.off]
        return super()._best(arms)

    @property
    def _excludes_off(self) -> bool:
        """Whether too few tokens are ranked to choose `off`. False if all static arms have a prior, and after
        OPENING_ROUNDS + LEAST_RANKED drafted rounds."""
        ranked = max((replay.positions for replay in self.replays.values()), default=0)
        if ranked >= LEAST_RANKED or self._drafted_rounds >= OPENING_ROUNDS + LEAST_RANKED:
            return False
        return not all(prior.rounds for prior in self._priors.values())
