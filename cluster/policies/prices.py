"""Predicted round times of arms, from measured costs; and the marginal rule, which sets the h and least of
`until(auto,...)` shapes from them and the current rate (docs/design/stopping.md#the-marginal-rule).

A microsecond is worth `rate` tokens, since other rounds emit that many in it. Another level is drafted, and a guess
verified, only if it is expected to emit more tokens than its time is worth:

    accept * S > rate * (level_us + guesses * row_us)    S = sum of V over the rows that would get children
    V(guess) > rate * row_us                             V = the estimated chance that a row is reached

The rule maximises E[N] / E[T] over the rounds if `rate` equals that ratio (Dinkelbach), so h needs no sweep. An
`UntilShape` drafts another level while 1 - S < h. Therefore

    h = 1 - rate * (level_us + guesses * row_us) / accept        least = rate * row_us
"""

from __future__ import annotations

from dataclasses import dataclass

from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies.costs import LEAST_US, Costs, round_kind
from cluster.policies.step_time import TargetSteps


def hops(arm: Arm) -> int:
    """Number of calls to peers that a round of this arm waits for, one after the other."""
    return 2 if arm.drafted else 1


class Prices:
    """Predicts round times from the current costs under one load class. A policy makes one for each choice.

    A plain step of 10 ms, a draft of 2 ms, and calls of 0.1 ms beyond the peers' own time:

    >>> from cluster.policies.costs import Cost
    >>> chain, costs = Arm.parse("mamba:(1,1)"), Costs()
    >>> costs.hops["next"] = Cost(100.0, count=1)
    >>> costs.step.learn(1, 10_000.0, TargetSteps())
    >>> for us in (2_000.0, 2_000.0):  # the first one is cold
    ...     costs.learn_draft(chain, us)
    >>> Prices(costs, TargetSteps()).predicted_us(chain)
    12200.0
    """

    __slots__ = ("_costs", "_target", "_verify_us")

    def __init__(self, costs: Costs, target: TargetSteps) -> None:
        self._costs, self._target = costs, target
        self._verify_us: dict[float, float] = {}  # by rows, as computed so far: arms share numbers of rows

    def predicted_us(self, arm: Arm, rows: float | None = None) -> float | None:
        """Predicted microseconds of a round of this arm, played before or not: a text's share of draft, step and hops.

        None until a step was measured and, for a drafted arm, a draft of its drafter (`StepTime`, `Costs.draft_us`).
        rows: rows of the tree, if known; the arm's usual number by default
        All texts of a step are assumed to choose this arm: if each relied on the others' trees being small, none would
        be. Drafted arms are priced as if the previous round's tree had the same drafter; otherwise a round takes
        `switching_us` longer.
        """
        costs = self._costs
        if not costs.step.sizes:
            return None
        draft_us = costs.draft_us(arm) if arm.drafted else 0.0
        if draft_us is None:
            return None
        if rows is None:
            rows = self._rows(arm)
        verify_us = self.verify_us(rows)
        ahead_us = costs.ahead.us if arm.off else 0.0  # a text that stays `off` has its rounds begun ahead
        return max(draft_us + verify_us + hops(arm) * costs.hop_us(round_kind(arm, arm.maker)) - ahead_us, LEAST_US)

    def spent_us(self, arm: Arm, tree: DraftTree, last_maker: str) -> float:
        """Microseconds of a round with this tree: the measured draft, plus predicted step and hops. A missing tree took
        the time waited for it, and its round has the verifier's call alone.

        last_maker: maker of the tree in the previous round; empty if that round had no tree
        """
        called = OFF_ARM if tree.missed else arm
        hop_us = self._costs.hop_us(round_kind(called, last_maker))
        return tree.draft_us / tree.texts + self.verify_us(tree.rows) + hops(called) * hop_us

    def switching_us(self, arm: Arm) -> float:
        """Microseconds by which a round of a drafted arm takes longer than predicted if the previous round had no tree
        of the arm's drafter."""
        costs = self._costs
        if not arm.drafted or "first" not in costs.hops:
            return 0.0
        return max(hops(arm) * (costs.hop_us("first") - costs.hop_us("next")), 0.0)

    @property
    def ahead_us(self) -> float:
        """Microseconds by which a round of `off` is shorter where the verifier begins it ahead."""
        return self._costs.ahead.us

    def verify_us(self, rows: float) -> float:
        """A text's share, in microseconds, of a step in which every text has `rows` rows; 0 if no step was measured."""
        found = self._verify_us.get(rows)
        if found is None:
            found = self._verify_us[rows] = self._costs.verify_us(rows, self._target)
        return found

    def _rows(self, arm: Arm) -> float:
        """Expected rows of a round's tree; measured for proposals and `until` shapes, which seldom fill the shape."""
        return arm.rows if arm.drafted and not arm.stops else self._costs.rows.get(arm, arm.rows)


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
