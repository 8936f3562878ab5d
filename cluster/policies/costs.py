"""Costs and emitted tokens of rounds, learned by classes of temperature, rows and load; the round times that they
predict; and the marginal rule, which sets the h and least of `until(auto,...)` shapes from them and the current rate
(docs/design/stopping.md#the-marginal-rule).

A microsecond is worth `rate` tokens, since other rounds emit that many in it. Another level is drafted, and a guess
verified, only if it is expected to emit more tokens than its time is worth:

    accept * S > rate * (level_us + guesses * row_us)    S = sum of V over the rows that would get children
    V(guess) > rate * row_us                             V = the estimated chance that a row is reached

The rule maximises E[N] / E[T] over the rounds if `rate` equals that ratio (Dinkelbach), so h needs no sweep. An
`UntilShape` drafts another level while 1 - S < h. Therefore

    h = 1 - rate * (level_us + guesses * row_us) / accept        least = rate * row_us
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.measured import OUTLIER
from dendro.modes import LISTED_MODES, VerificationMode
from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies.step_time import StepTime, TargetSteps, nonnegative_fit, usual_step_time

PRIOR_ROUNDS = 8.0
"""Most rounds that the data of earlier requests weighs in a new request."""
COST_STEP = 0.1
"""Least weight of a new measurement in a smoothed cost."""
LEAST_US = 1.0
"""Lower bound of a predicted round time: rates divide by it, and costs may come from a store or a peer."""
TRIED = 2
"""Measurements before a cost is used. The first one includes cold memory and code; an arm judged by it alone would
never be tried again."""

FIRST_ACCEPT = 0.85
"""Assumed acceptance rate of a level below an accepted guess, before any round is counted."""
FIRST_LEVELS = 8.0
"""Weight of FIRST_ACCEPT, in levels."""
MOST_BEHIND = 64
"""Number of plain rounds in a row, none of them begun ahead, after which `Costs.ahead` is unknown again."""
ROUND_KINDS = ("next", "off", "proposed", "first")
"""Kinds of rounds, whose calls to peers take different times. `next`: the tree's drafter also drafted the previous
round's tree. `first`: it did not, so it first reads the tokens emitted since its last tree, and the verifier has no
order for this one. `proposed`: the tree has proposals alone. `off`: there is no tree."""
KEPT = 1 - 1 / 256
"""Factor by which the weight of earlier rounds decays with each round: loads and texts change."""
CLASS_TEMPERATURES = {"greedy": 0.0, "cool": 0.7, "warm": 1.0}
"""A usual temperature of each class."""


def temperature_class(temperature: float) -> str:
    """Class of requests with similar acceptance rates: greedy (0), cool (below 0.85) or warm."""
    if temperature == 0:
        return "greedy"
    return "cool" if temperature < 0.85 else "warm"


def mode_class(mode: VerificationMode) -> str:
    """Class of verification modes with similar acceptance rates: a mode of LISTED_MODES is its own class; the others,
    whose drafters rank by the target's noise, are one class, named by the empty text."""
    return str(mode) if mode in LISTED_MODES else ""


@functools.lru_cache(maxsize=4096)  # cached: called several times a round
def load_class(requests: int) -> int:
    """Class of running requests with similar costs: 1 request, 2, 3 to 5, 6 to 11, 12 to 22, and so on.

    >>> [load_class(requests) for requests in (1, 2, 3, 5, 6, 11, 12)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return round(math.log2(max(requests, 1)))


@dataclass(slots=True)
class Cost:
    """A smoothed cost in microseconds. It starts at the least of the first TRIED measurements; later ones are cut at
    OUTLIER times the cost. A sample of 0 means that no draft was waited for: it is counted and otherwise ignored. An
    arm whose drafts are never begun therefore has a known cost of 0.

    >>> cost = Cost()
    >>> for us in (900.0, 300.0, 330.0):  # the first measurement is cold; the third weighs 1/3
    ...     cost.learn(us)
    >>> cost.us
    310.0
    """

    us: float = 0.0
    count: int = 0

    @property
    def known(self) -> bool:
        """True after TRIED measurements."""
        return self.count >= TRIED

    def at_most(self, count: int) -> Cost:
        """A copy that weighs as at most `count` measurements."""
        return Cost(self.us, min(self.count, count))

    def learn(self, us: float) -> None:
        """Record a measurement in microseconds; 0 if no draft was waited for."""
        self.count += 1
        if not us:
            return
        if self.count <= TRIED or not self.us:
            self.us = min(self.us or us, us)
            return
        step = max(COST_STEP, 1 / self.count)
        self.us += step * (min(us, OUTLIER * self.us) - self.us)


def round_kind(arm: Arm, last_maker: str) -> str:
    """Kind of a round of this arm (ROUND_KINDS). last_maker: maker of the tree in the text's previous round; empty if
    that round had no tree

    >>> chain, off = Arm.parse("mamba:(1,1)"), Arm.parse("off")
    >>> round_kind(chain, "mamba"), round_kind(chain, ""), round_kind(off, "mamba")
    ('next', 'first', 'off')
    """
    if arm.drafted:
        return "next" if arm.maker == last_maker else "first"
    return "off" if arm.off else "proposed"


@dataclass(slots=True)
class EmittedLength:
    """Mean of an arm's emitted tokens over a number of rounds, which may be fractional."""

    mean: float = 0.0
    rounds: float = 0.0

    def learn(self, tokens: float) -> None:
        """Record the tokens that a round emitted."""
        self.rounds += 1
        self.mean += (tokens - self.mean) / self.rounds

    def at_most(self, rounds: float) -> EmittedLength:
        """A copy whose weight is at most `rounds`."""
        return EmittedLength(self.mean, min(self.rounds, rounds))


@dataclass(slots=True)
class Rate:
    """Emitted tokens and their time, over rounds that may have fractional weights."""

    rounds: float = 0.0
    tokens: float = 0.0
    us: float = 0.0

    def learn(self, tokens: float, us: float, kept: float = 1.0) -> None:
        """Add a round. kept: factor on the weight of all earlier rounds"""
        self.rounds, self.tokens, self.us = kept * self.rounds + 1, kept * self.tokens + tokens, kept * self.us + us

    def begun_with(self, other: Rate, rounds: float) -> float:
        """Tokens per microsecond of these rounds together with `other`'s, which weigh at most `rounds`; 0 without any
        round."""
        scale = min(1.0, rounds / other.rounds) if other.rounds else 0.0
        us = self.us + scale * other.us
        return (self.tokens + scale * other.tokens) / us if us else 0.0


@dataclass(slots=True)
class StoppedDrafts:
    """Levels, guesses and acceptance of the drafts of one `until` arm. Sums decay by KEPT per draft."""

    level: Cost = field(default_factory=Cost)  # time of drafting one level
    levels: float = 0.0  # sum of the trees' levels; each draft counts at least one
    guesses: float = 0.0  # sum of the trees' guesses
    tried: float = FIRST_LEVELS  # levels below an accepted guess
    accepted: float = FIRST_ACCEPT * FIRST_LEVELS  # tried levels that had the text's token

    def learn(self, tree: DraftTree, verdict: Verdict) -> None:
        """Record a draft. Count acceptance only if the verifier trimmed no row.

        tree: as the drafter sent it, without merged proposals
        """
        levels, came = max(tree.depth, 1), min(verdict.length - 1, tree.depth)
        self.level.learn(tree.draft_us / tree.texts / levels)
        self.levels = KEPT * self.levels + levels
        self.guesses = KEPT * self.guesses + tree.guesses
        if not verdict.trimmed:
            self.tried = KEPT * self.tried + max(min(came + 1, tree.depth) - 1, 0)
            self.accepted = KEPT * self.accepted + max(came - 1, 0)

    @property
    def accept(self) -> float:
        """Acceptance rate of a level below an accepted guess."""
        return max(self.accepted, 1.0) / max(self.tried, 1.0)

    @property
    def guesses_per_level(self) -> float:
        """Mean guesses that a drafted level adds to the tree; 1 before any draft."""
        return self.guesses / self.levels if self.levels else 1.0


REFIT = 16
"""Measured drafts between two fits of a drafter's plane. A shape's second measurement causes a fit at once."""
FEATURES = (1, 2, 0)
"""Columns of the plane (0: once, 1: levels, 2: forwarded rows) in order of preference. A column that depends linearly
on those before it is left out, so a single shape gives a cost per level."""


@dataclass(slots=True)
class DraftPlane:
    """Draft time of one drafter as a plane over levels and forwarded rows: us = once + levels * a + forwarded * b.

    Coefficients are at least 0, by least squares of the relative errors over the measured shapes. Chains of 1, 2 and 4
    guesses that take 1.0, 1.5 and 2.5 ms cost 0.5 ms once and 0.5 ms a level, so a chain of 8 takes 4.5 ms:

    >>> def chain(depth: int) -> Arm:
    ...     return Arm.parse(f"mamba:({','.join(depth * '1')})")
    >>> measured = {chain(1): Cost(1000.0, TRIED), chain(2): Cost(1500.0, TRIED), chain(4): Cost(2500.0, TRIED)}
    >>> round(DraftPlane().at(chain(8), measured) or 0.0), round(DraftPlane().level_us(chain(8), measured) or 0.0)
    (4500, 500)
    """

    coefficients: tuple[float, float, float] | None = None  # microseconds: once, a, b
    _since_fit: int = REFIT  # drafts measured since the last fit

    def note(self, cost: Cost) -> None:
        """Count a measured draft. cost: the cost of its arm, this draft included"""
        self._since_fit = REFIT if cost.count == TRIED else self._since_fit + 1

    def at(self, arm: Arm, draft: Mapping[Arm, Cost]) -> float | None:
        """Predicted microseconds of a draft of this arm; None if `draft` has no known cost of the arm's drafter."""
        fit = self._current(arm, draft)
        return None if fit is None else fit[0] + fit[1] * arm.depth + fit[2] * arm.shape.forwarded

    def level_us(self, arm: Arm, draft: Mapping[Arm, Cost]) -> float | None:
        """Predicted microseconds of one more level, as wide as this arm's widest node; None if `draft` has no known
        cost of the arm's drafter."""
        fit = self._current(arm, draft)
        return None if fit is None else fit[1] + fit[2] * arm.shape.width

    def _current(self, arm: Arm, draft: Mapping[Arm, Cost]) -> tuple[float, float, float] | None:
        if self._since_fit >= REFIT:
            # Drafts of `until` shapes are left out: their levels vary, so a mean time belongs to no depth.
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
    """Measured costs of rounds under one load class."""

    hops: dict[str, Cost] = field(default_factory=dict)  # by kind of round: time of a call beyond the peer's own
    ahead: Cost = field(default_factory=Cost)  # part of a plain step that a round begun ahead does not wait for
    since_ahead: int = 0  # plain rounds since the last one that was begun ahead
    opening: Cost = field(default_factory=Cost)  # time that opening a text at a drafter adds to rounds meanwhile
    draft: dict[Arm, Cost] = field(default_factory=dict)  # by arm: a draft's time, over the texts drafted together
    step: StepTime = field(default_factory=StepTime)
    texts: float = 1.0  # smoothed number of texts in a step
    rounds: int = 0  # rounds whose draft or step was measured, the first one included, which is cold
    rows: dict[Arm, float] = field(default_factory=dict)  # by arm of proposals or `until`: smoothed rows of a tree
    rate: Rate = field(default_factory=Rate)  # tokens and time of the rounds of requests with a stop rule, decayed
    stopped: dict[Arm, StoppedDrafts] = field(default_factory=dict)  # by `until` arm: what its drafts gave
    _planes: defaultdict[str, DraftPlane] = field(default_factory=lambda: defaultdict(DraftPlane))  # one per drafter

    def hop_us(self, kind: str) -> float:
        """Microseconds of a call beyond the peer's own time in a round of this kind. Until such a round was measured:
        that of the first measured kind in ROUND_KINDS, or 0."""
        measured = (self.hops[each].us for each in (kind, *ROUND_KINDS) if each in self.hops)
        return next(measured, 0.0)

    def learn_ahead(self, us: float) -> None:
        """Record for a plain round how long its step ran before its call; 0 if it was not begun ahead. `ahead` is
        unknown again after MOST_BEHIND such rounds in a row: the verifier may have stopped to begin rounds ahead."""
        self.since_ahead = 0 if us else self.since_ahead + 1
        if us:
            self.ahead.learn(us)
        elif self.since_ahead >= MOST_BEHIND:
            self.ahead = Cost()

    def learn_draft(self, arm: Arm, us: float) -> None:
        """Record a draft's microseconds; 0 if none was waited for."""
        cost = self.draft.setdefault(arm, Cost())
        cost.learn(us)
        self._planes[arm.maker].note(cost)

    def verify_us(self, rows: float, target: TargetSteps) -> float:
        """A text's share, in microseconds, of a step in which every text has `rows` rows; 0 if no step was measured."""
        return self.step.at(target.padded(round(self.texts * rows)), target) / self.texts

    def draft_us(self, arm: Arm) -> float | None:
        """Microseconds of a draft: the arm's measured time after TRIED drafts, else predicted from the drafter's other
        arms, else the arm's only measurement; None if no draft of the drafter was measured."""
        own = self.draft.get(arm)
        if own is not None and own.known:
            return own.us
        fitted = self._planes[arm.maker].at(arm, self.draft)
        return own.us if fitted is None and own is not None and own.us else fitted

    def row_us(self, arm: Arm, target: TargetSteps) -> float:
        """Predicted microseconds that one more row of each text adds, per text, to a step of this arm's usual trees."""
        return self.step.slope(self.texts * self.rows.get(arm, arm.rows), target)

    def level_us(self, arm: Arm) -> float | None:
        """Microseconds of one level of the arm's drafts: measured, else predicted from the drafter's other arms; None
        if no draft of the drafter was measured."""
        stopped = self.stopped.get(arm)
        if stopped is not None and stopped.level.known and stopped.level.us:
            return stopped.level.us
        return self._planes[arm.maker].level_us(arm, self.draft)

    def hint(self) -> Costs:
        """A copy with which a new tenant or another router begins, without `rows`, `rate` and `stopped`. Each cost
        weighs at most PRIOR_ROUNDS."""
        most = int(PRIOR_ROUNDS)
        return Costs(
            hops={kind: cost.at_most(most) for kind, cost in self.hops.items()},
            ahead=self.ahead.at_most(most),
            opening=self.opening.at_most(most),
            draft={arm: cost.at_most(most) for arm, cost in self.draft.items()},
            step=self.step.at_most(PRIOR_ROUNDS),
            texts=self.texts,
            rounds=min(self.rounds, most),
        )


def hops(arm: Arm) -> int:
    """Number of calls to peers that a round of this arm waits for, one after the other."""
    return 2 if arm.drafted else 1


@dataclass(frozen=True, slots=True)
class Prices:
    """Predicts round times from the current costs under one load class.

    A plain step of 10 ms, a draft of 2 ms, and calls of 0.1 ms beyond the peers' own time:

    >>> chain, costs = Arm.parse("mamba:(1,1)"), Costs()
    >>> costs.hops["next"] = Cost(100.0, count=1)
    >>> costs.step.learn(1, 10_000.0, TargetSteps())
    >>> for us in (2_000.0, 2_000.0):  # the first one is cold
    ...     costs.learn_draft(chain, us)
    >>> Prices(costs, TargetSteps()).predicted_us(chain)
    12200.0
    """

    costs: Costs
    target: TargetSteps

    def predicted_us(self, arm: Arm, rows: float | None = None) -> float | None:
        """Predicted microseconds of a round of this arm, played before or not: a text's share of draft, step and hops.

        None until a step was measured and, for a drafted arm, a draft of its drafter (`StepTime`, `Costs.draft_us`).
        rows: rows of the tree, if known; the arm's usual number by default
        All texts of a step are assumed to choose this arm: if each relied on the others' trees being small, none would
        be. Drafted arms are priced as if the previous round's tree had the same drafter; otherwise a round takes
        `switching_us` longer.
        """
        costs = self.costs
        if not costs.step.sizes:
            return None
        draft_us = costs.draft_us(arm) if arm.drafted else 0.0
        if draft_us is None:
            return None
        if rows is None:  # proposals and `until` shapes seldom fill the shape
            rows = costs.rows.get(arm, arm.rows)
        verify_us = costs.verify_us(rows, self.target)
        ahead_us = costs.ahead.us if arm.off else 0.0  # a text that stays `off` has its rounds begun ahead
        return max(draft_us + verify_us + hops(arm) * costs.hop_us(round_kind(arm, arm.maker)) - ahead_us, LEAST_US)

    def spent_us(self, arm: Arm, tree: DraftTree, last_maker: str) -> float:
        """Microseconds of a round with this tree: the measured draft, plus predicted step and hops. A missing tree took
        the time waited for it, and its round has the verifier's call alone.

        last_maker: maker of the tree in the previous round; empty if that round had no tree
        """
        called = OFF_ARM if tree.missed else arm
        hop_us = self.costs.hop_us(round_kind(called, last_maker))
        return tree.draft_us / tree.texts + self.costs.verify_us(tree.rows, self.target) + hops(called) * hop_us

    def switching_us(self, arm: Arm, last_maker: str) -> float:
        """Microseconds by which a round of this arm takes longer than predicted after a round with this maker's tree;
        0 unless the arm's drafter is another."""
        costs = self.costs
        if round_kind(arm, last_maker) != "first" or "first" not in costs.hops:
            return 0.0
        return max(hops(arm) * (costs.hop_us("first") - costs.hop_us("next")), 0.0)


@dataclass(frozen=True, slots=True)
class Marginal:
    """Inputs of the marginal rule, and its results h and least. S and V are defined in the module's docstring.

    At 200 tokens a second, a level of 1 ms with one guess, whose row costs 0.1 ms, costs 0.0002 * 1100 = 0.22 tokens.
    At an acceptance rate of 0.8 it is drafted while S > 0.22 / 0.8 = 0.275, that is 1 - S < 0.725; a guess is verified
    if its V exceeds 0.0002 * 100:

    >>> rule = Marginal(rate=0.0002, level_us=1000.0, row_us=100.0, guesses=1.0, accept=0.8)
    >>> round(rule.h, 3), round(rule.least, 3)
    (0.725, 0.02)
    """

    rate: float  # tokens emitted per microsecond
    level_us: float  # microseconds of drafting one more level
    row_us: float  # microseconds of one more row in the verifier's step
    guesses: float  # mean guesses that a level adds to the tree
    accept: float  # acceptance rate of a level below an accepted guess

    @property
    def h(self) -> float:
        """Another level is drafted while 1 - S < h."""
        return 1 - self.rate * (self.level_us + self.guesses * self.row_us) / self.accept

    @property
    def least(self) -> float:
        """Least estimated chance V of a guess that is verified."""
        return self.rate * self.row_us


def usual_costs(measured: Sequence[Costs], target: TargetSteps) -> Costs:
    """Costs with which a new tenant begins: the lower median of each cost over several tenants; step times are those of
    `usual_step_time`.

    Three tenants measured one step each. One of them was half as long again, and has no effect:

    >>> found = []
    >>> for us in (10_000.0, 15_000.0, 10_200.0):
    ...     found.append(Costs())
    ...     found[-1].step.learn(1, us, TargetSteps())
    >>> usual_costs(found, TargetSteps()).step.at(1, TargetSteps())
    10200.0
    """
    arms = dict.fromkeys(arm for costs in measured for arm in costs.draft)
    kinds = dict.fromkeys(kind for costs in measured for kind in costs.hops)
    return Costs(
        hops={kind: _median(each.hops[kind] for each in measured if kind in each.hops) for kind in kinds},
        ahead=_median(each.ahead for each in measured),
        opening=_median(each.opening for each in measured),
        draft={arm: _median(each.draft[arm] for each in measured if arm in each.draft) for arm in arms},
        step=usual_step_time([each.step for each in measured], target),
        texts=statistics.median_low(each.texts for each in measured),
        rounds=sum(each.rounds for each in measured),
    )


def _median(costs: Iterable[Cost]) -> Cost:
    """The lower median of the known costs, or of all measured ones if none is known, with their greatest count."""
    measured = [cost for cost in costs if cost.count]
    chosen = [cost for cost in measured if cost.known] or measured
    if not chosen:
        return Cost()
    return Cost(statistics.median_low(cost.us for cost in chosen), max(cost.count for cost in chosen))
