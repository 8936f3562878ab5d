"""Full information: every static arm is judged by what it would have emitted on this request's text, played or not.

    index_k = E[N_k] / T_k        E[N_k] = mean N of the arm's re-run on the ranks of the last tokens (`Replay`)

No arm need be played to be known, so nothing is explored, with two exceptions. A text of which no prior tells begins
with trees until a few of its tokens are ranked. And as no ranks come while no drafter is asked, a tree is asked for now
and then: its trace tells of all tokens since the last one, so the replay has no gap. Trees that do not come are counted
against all arms alike.

Beam and dynamic trees depend on values of guesses that nobody records. Those arms are judged as `RatioUCB` judges them,
by their own rounds; so are arms wider than the ranks reach, and all arms while there are no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dendro.shapes import OFF, TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.policies.experience import Experience
from cluster.policies.offers import Offer
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.rate import OPENING_ROUNDS
from cluster.policies.ratio_ucb import RatioUCB
from cluster.policies.replay import WINDOW, RankTrace, Replay, replayed

PROBE_EVERY = 28
"""Rounds without a drafter before a tree is asked for. The drafter's lease is given back after 32, and with it goes the
memory of what was traced: fewer keep the trace whole. The least tree costs some tenths of a round, so a probe in 28
costs one or two in a hundred."""
LEAST_RANKED = 8
"""Tokens whose ranks are known before `off` may be chosen for them: the first few wrong guesses say little."""
LATE_STEP = 0.1


class FullInfo(RatioUCB):
    """The policy of one request. Its costs may be predicted: an arm whose time is known from others' is not tried for
    it."""

    def __init__(
        self,
        arms: Sequence[TreeShape],
        experience: Experience,
        temperature: float,
        prior: Prior = NO_PRIOR,
        window: int = WINDOW,
    ) -> None:
        """window: text tokens, 64 to 256, by which arms are judged"""
        super().__init__(arms, experience, temperature, prior)
        self.replay = Replay([arm for arm in self.arms if replayed(arm)], window)
        self._before = [self.lengths[arm].at_most(math.inf) for arm in self.replay.shapes]
        self.means: dict[TreeShape, float] = {}  # tokens of a round whose tree comes, by re-run and prior
        self._trace = RankTrace()
        self._came = 1.0  # of the trees asked for, lately
        self._waited = 0  # rounds with trees asked for before enough was ranked
        self._rested = 0  # rounds since a drafter was asked

    def hoped(self, arm: TreeShape) -> float:
        mean = self.means.get(arm)
        return super().hoped(arm) if mean is None else 1 + self._came * (mean - 1)

    def round_us(self, arm: TreeShape) -> float | None:
        return self.experience.predicted_us(arm, self.rows(arm))

    def choose(self, offer: Offer | None = None) -> TreeShape:
        shape = super().choose(offer)
        if shape.drafted or not self.replay.shapes:
            self._rested = 0
            return shape
        self._rested += 1
        trial = self.experience.concurrency.trial
        if self._rested <= PROBE_EVERY or not (trial is None or trial.guessing):
            return shape
        self._rested = 0
        return min(self.replay.shapes, key=lambda arm: (self.round_us(arm) or math.inf, arm.rows))

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        told = self._trace.learn(tree, verdict)
        if told.ranks:
            if not told.joined:
                self.replay.cut()
            self.replay.feed(told.ranks)
            self._judge()
        if shape.drafted:
            self._waited += 1
            if not self._opening or not tree.missed:
                self._came += LATE_STEP * ((not tree.missed) - self._came)
        super().learn(shape, tree, verdict)

    def _judge(self) -> None:
        tokens, rounds = self.replay.tokens.tolist(), self.replay.rounds.tolist()
        for arm, mine, count, before in zip(self.replay.shapes, tokens, rounds, self._before, strict=True):
            if count + before.rounds:
                self.means[arm] = (mine + before.rounds * before.mean) / (count + before.rounds)

    def _best(self, arms: Sequence[TreeShape]) -> TreeShape:
        if self._begins and self.experience.predicted_us(OFF) is not None:
            arms = [arm for arm in arms if not arm.off]
        return super()._best(arms)

    @property
    def _begins(self) -> bool:
        """Whether too little is known of the text to choose `off`, and trees still come that may say more."""
        if self.replay.positions >= LEAST_RANKED or self._waited >= OPENING_ROUNDS + LEAST_RANKED:
            return False
        return not all(before.rounds for before in self._before)
