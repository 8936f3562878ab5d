"""Costs and emitted tokens of rounds, learned from measurements."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from dendro.shapes import TreeShape
from dendro.smoothing import OUTLIER
from dendro.step_sizes import StepSizes
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.least_squares import nonnegative_fit
from cluster.policies.step_time import StepTime

PRIOR_ROUNDS = 8.0
"""Weight of all earlier requests together in a new one, in rounds."""
COST_STEP = 0.1
LEAST_US = 1.0
"""Lower bound of a predicted round time: rates divide by it, and costs may come from a store or a peer."""
TRIED = 2
"""Measurements before a cost is used. The first of a kind includes the cost of cold memory and code; an arm judged by
it would never be tried again."""

FIRST_ACCEPT = 0.85
"""The chance that a level has the text's token, if the level above had it, before any round is counted."""
FIRST_LEVELS = 8.0
"""Weight of FIRST_ACCEPT, in levels."""
KEPT = 1 - 1 / 256
"""Decay of measured sums per round: loads and texts change."""


@dataclass(slots=True)
class Cost:
    """A smoothed cost in microseconds, starting at the least of the first TRIED measurements. A sample of 0 means that
    no draft came: it is counted and otherwise ignored. So an arm has a known cost of 0 while its drafts never come."""

    us: float = 0.0
    count: int = 0

    @property
    def known(self) -> bool:
        return self.count >= TRIED

    def learn(self, us: float) -> None:
        self.count += 1
        if not us:
            return
        if self.count <= TRIED or not self.us:
            self.us = min(self.us or us, us)
            return
        step = max(COST_STEP, 1 / self.count)
        self.us += step * (min(us, OUTLIER * self.us) - self.us)


@dataclass(slots=True)
class EmittedLength:
    """Mean and variance of an arm's emitted tokens over a number of rounds, which may be fractional."""

    mean: float = 0.0
    rounds: float = 0.0
    variance: float = 0.0  # tokens squared

    def learn(self, tokens: float) -> None:
        self.rounds += 1
        off = tokens - self.mean
        self.mean += off / self.rounds
        self.variance += (off * (tokens - self.mean) - self.variance) / self.rounds

    def at_most(self, rounds: float) -> EmittedLength:
        """A copy that counts as at most so many rounds."""
        return EmittedLength(self.mean, min(self.rounds, rounds), self.variance)


@dataclass(slots=True)
class Rate:
    """Emitted tokens and their time, over rounds that may have fractional weights."""

    rounds: float = 0.0
    tokens: float = 0.0
    us: float = 0.0

    def learn(self, tokens: float, us: float, kept: float = 1.0) -> None:
        """Add a round. kept: by which the weight of all earlier ones is multiplied"""
        self.rounds, self.tokens, self.us = kept * self.rounds + 1, kept * self.tokens + tokens, kept * self.us + us

    def begun_with(self, other: Rate, rounds: float) -> float:
        """Tokens per microsecond of these rounds and of `other`'s, which weigh at most so many rounds; 0 if there are
        none."""
        scale = min(1.0, rounds / other.rounds) if other.rounds else 0.0
        us = self.us + scale * other.us
        return (self.tokens + scale * other.tokens) / us if us else 0.0


@dataclass(slots=True)
class StoppedDrafts:
    """What is measured of the drafts of one `until` arm. Sums decay by KEPT per draft."""

    level: Cost = field(default_factory=Cost)  # of drafting one level
    levels: float = 0.0  # sum of those of the trees; at least one for each draft
    guesses: float = 0.0
    tried: float = FIRST_LEVELS  # levels below an accepted guess
    accepted: float = FIRST_ACCEPT * FIRST_LEVELS  # those of them that had the text's token

    def learn(self, tree: DraftTree, verdict: Verdict) -> None:
        """Record a draft as it came from its drafter, and what was accepted of its round's tree, where the verifier
        left out none of it."""
        levels, came = max(tree.depth, 1), min(verdict.length - 1, tree.depth)
        self.level.learn(tree.draft_us / tree.texts / levels)
        self.levels = KEPT * self.levels + levels
        self.guesses = KEPT * self.guesses + tree.guesses
        if not verdict.trimmed:
            self.tried = KEPT * self.tried + max(min(came + 1, tree.depth) - 1, 0)
            self.accepted = KEPT * self.accepted + max(came - 1, 0)

    @property
    def accept(self) -> float:
        return max(self.accepted, 1.0) / max(self.tried, 1.0)

    @property
    def guesses_per_level(self) -> float:
        """1 before any draft."""
        return self.guesses / self.levels if self.levels else 1.0


REFIT = 16
"""Measured drafts between two fits of the plane. A shape's second measurement causes a fit at once."""
FEATURES = (1, 2, 0)
"""Columns of the plane (once, levels, forwarded rows) in order of preference: one that depends linearly on those before
it is left out, so that a single shape gives a cost per level."""


@dataclass(slots=True)
class DraftPlane:
    """One drafter's draft time as a plane over levels and forwarded rows: us = once + levels * a + forwarded * b.

    Coefficients are at least 0, from the least squares of relative errors over the shapes measured.
    """

    coefficients: tuple[float, float, float] | None = None
    _since_fit: int = REFIT  # measured drafts

    def note(self, cost: Cost) -> None:
        """Count a measured draft; `cost` is its shape's."""
        self._since_fit = REFIT if cost.count == TRIED else self._since_fit + 1

    def at(self, arm: Arm, draft: Mapping[Arm, Cost]) -> float | None:
        """Microseconds of a draft, predicted from the drafter's costs in `draft`; None where none is known."""
        fit = self._current(arm, draft)
        return None if fit is None else fit[0] + fit[1] * arm.depth + fit[2] * arm.shape.forwarded

    def level_us(self, arm: Arm, draft: Mapping[Arm, Cost]) -> float | None:
        """As `at`, of one more level, whose rows are as many as a row of this arm has children at most."""
        fit = self._current(arm, draft)
        return None if fit is None else fit[1] + fit[2] * arm.shape.width

    def _current(self, arm: Arm, draft: Mapping[Arm, Cost]) -> tuple[float, float, float] | None:
        if self._since_fit >= REFIT:
            # The levels of a draft that stops in time vary: its mean time is not that of its shape's depth.
            own = {other: cost for other, cost in draft.items() if other.maker == arm.maker and not other.stops}
            self._fit({other.shape: cost for other, cost in own.items() if cost.known and cost.us})
            self._since_fit = 0
        return self.coefficients

    def _fit(self, known: Mapping[TreeShape, Cost]) -> None:
        if not known:
            self.coefficients = None
            return
        features = np.array([(1.0, shape.depth, shape.forwarded) for shape in known])
        chosen: list[int] = []
        for column in FEATURES:
            if np.linalg.matrix_rank(features[:, [*chosen, column]]) > len(chosen):
                chosen.append(column)
        us = np.array([max(cost.us, LEAST_US) for cost in known.values()])
        fit = dict(zip(chosen, nonnegative_fit(features[:, chosen] / us[:, None], np.ones(len(us))), strict=True))
        self.coefficients = (fit.get(0, 0.0), fit.get(1, 0.0), fit.get(2, 0.0))


@dataclass(slots=True)
class Costs:
    """Costs under one load class. `hop` is the time of a call to a peer beyond the peer's own time in a round with a
    tree, `plain_hop` in one without, which has less to send; `ahead` is the part of a step without a tree that a round
    begun ahead of its call does not wait for."""

    hop: Cost = field(default_factory=Cost)
    plain_hop: Cost = field(default_factory=Cost)
    ahead: Cost = field(default_factory=Cost)
    draft: dict[Arm, Cost] = field(default_factory=dict)
    step: StepTime = field(default_factory=StepTime)
    texts: float = 1.0  # of a step, smoothed
    tried: Counter[int] = field(default_factory=Counter)  # rounds by row class
    rows: dict[Arm, float] = field(default_factory=dict)  # of a tree, smoothed
    rate: Rate = field(default_factory=Rate)  # of all rounds, decayed
    stopped: dict[Arm, StoppedDrafts] = field(default_factory=dict)
    _planes: defaultdict[str, DraftPlane] = field(default_factory=lambda: defaultdict(DraftPlane))  # by drafter

    def hop_us(self, off: bool) -> float:
        """Microseconds of a call beyond the peer's own time, in a round without a tree (`off`) or with one. Until one
        kind of round was measured, the other's time is returned."""
        own, other = (self.plain_hop, self.hop) if off else (self.hop, self.plain_hop)
        return own.us if own.count else other.us

    def learn_draft(self, arm: Arm, us: float) -> None:
        """Record a measured draft; 0 if none came."""
        cost = self.draft.setdefault(arm, Cost())
        cost.learn(us)
        self._planes[arm.maker].note(cost)

    def verify_us(self, rows: float, degree: int, sizes: StepSizes) -> float:
        """A text's share of a step in which every text has so many rows. degree: of the step-time polynomial"""
        return self.step.at(sizes.padded(round(self.texts * rows)), degree) / self.texts

    def draft_us(self, arm: Arm) -> float | None:
        """The arm's measured draft time, else one predicted from its drafter's other arms, else its only
        measurement; None where none was measured."""
        own = self.draft.get(arm)
        if own is not None and own.known:
            return own.us
        fitted = self._planes[arm.maker].at(arm, self.draft)
        return own.us if fitted is None and own is not None and own.us else fitted

    def row_us(self, arm: Arm, degree: int) -> float:
        """A text's share of what one more row of every text adds to a step of this arm's usual trees, by the fit."""
        return self.step.slope(self.texts * self.rows.get(arm, arm.rows), degree)

    def level_us(self, arm: Arm) -> float | None:
        """One level of the arm's drafts as measured, else as predicted from its drafter's other arms; None where no
        draft was measured."""
        stopped = self.stopped.get(arm)
        if stopped is not None and stopped.level.known and stopped.level.us:
            return stopped.level.us
        return self._planes[arm.maker].level_us(arm, self.draft)

    def hint(self) -> Costs:
        """A copy of the costs, without rows, rate and stopped drafts; each weighs PRIOR_ROUNDS at most."""
        most = int(PRIOR_ROUNDS)
        return Costs(
            hop=Cost(self.hop.us, min(self.hop.count, most)),
            plain_hop=Cost(self.plain_hop.us, min(self.plain_hop.count, most)),
            ahead=Cost(self.ahead.us, min(self.ahead.count, most)),
            draft={arm: Cost(cost.us, min(cost.count, most)) for arm, cost in self.draft.items()},
            step=self.step.at_most(PRIOR_ROUNDS),
            texts=self.texts,
            tried=Counter({rows: min(count, most) for rows, count in self.tried.items()}),
        )

    def begin(self, hint: Costs) -> None:
        """Replace all costs by those of `hint`. What `hint` leaves out stays."""
        self.hop, self.plain_hop, self.ahead = hint.hop, hint.plain_hop, hint.ahead
        self.draft, self.step = hint.draft, hint.step
        self.texts, self.tried = hint.texts, hint.tried
        self._planes.clear()
