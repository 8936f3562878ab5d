"""What a router has learned of one (target, drafter) pair: what rounds cost, and how many tokens each arm emits.

A hint, shared by its requests and never a matter of correctness. Costs are of the machine and carry over whole; emitted
lengths are of the text and weigh in a new request as a few rounds at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dendro.text import Verdict
from dendro.tree import DraftTree, TreeShape

PRIOR_ROUNDS = 8.0
"""What all earlier requests together weigh in a new one, in rounds."""
COST_STEP = 0.1
OUTLIER = 3.0
"""A round that took longer than this many times the usual counts as that: one page fault must not condemn an arm."""
ROW_BUCKET = 8


TRIED = 2
"""Measurements before a cost is believed. The first of a kind pays for memory and code that nobody touched before; an
arm that is judged by it is never tried again."""


@dataclass(slots=True)
class Cost:
    """A smoothed cost in microseconds; the least of the first TRIED measurements to begin with."""

    us: float = 0.0
    count: int = 0

    @property
    def known(self) -> bool:
        return self.count >= TRIED

    def learn(self, us: float) -> None:
        self.count += 1
        if self.count <= TRIED:
            self.us = us if self.count == 1 else min(self.us, us)
            return
        step = max(COST_STEP, 1 / self.count)
        self.us += step * (min(us, OUTLIER * self.us) - self.us)


@dataclass(slots=True)
class Length:
    """Mean emitted tokens of an arm, and the rounds that it rests on."""

    mean: float = 0.0
    rounds: float = 0.0

    def learn(self, tokens: float) -> None:
        self.rounds += 1
        self.mean += (tokens - self.mean) / self.rounds


def temperature_class(temperature: float) -> str:
    """Requests that accept alike: greedy, cool, warm."""
    if temperature == 0:
        return "greedy"
    return "cool" if temperature < 0.85 else "warm"


def row_bucket(rows: int) -> int:
    """Rows of a forward after padding."""
    return -(-rows // ROW_BUCKET) * ROW_BUCKET


@dataclass(slots=True)
class Experience:
    """Costs and lengths so far. `hop` is what a call to a peer costs beyond the peer's own time."""

    hop: Cost = field(default_factory=Cost)
    draft_costs: dict[TreeShape, Cost] = field(default_factory=dict)
    verify_costs: dict[int, Cost] = field(default_factory=dict)  # by row bucket
    lengths: dict[tuple[str, TreeShape], Length] = field(default_factory=dict)

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict, temperature: float) -> None:
        """Take one round in. A late tree arrives as the root alone and carries the wait as its cost.

        A round costs its share of what it had in common with other texts' rounds. Were it to count the whole, each
        text would guess at the expense of all the others, and all would be slower than without.
        """
        if not shape.off:
            self.draft_costs.setdefault(shape, Cost()).learn(tree.draft_us / tree.texts)
        verify_us = (verdict.verify_us + verdict.queue_us) / verdict.texts
        self.verify_costs.setdefault(row_bucket(tree.rows), Cost()).learn(verify_us)
        self.lengths.setdefault((temperature_class(temperature), shape), Length()).learn(verdict.length)

    def learn_hops(self, shape: TreeShape, us: float) -> None:
        """A round's share of what it took beyond the time in which its peers were busy or had it queued."""
        self.hop.learn(us / (1 if shape.off else 2))

    def round_us(self, shape: TreeShape) -> float | None:
        """The predicted time of a round with this shape; None until something like it was seen often enough."""
        bucket = row_bucket(shape.rows)
        if bucket not in self.verify_costs or not self.verify_costs[bucket].known:
            return None
        # Fewer rows cost no more: what was learned under another load does not keep an arm from being tried under this.
        verify_us = min(cost.us for rows, cost in self.verify_costs.items() if rows >= bucket and cost.known)
        if shape.off:
            return verify_us + self.hop.us
        draft = self.draft_costs.get(shape)
        return draft.us + verify_us + 2 * self.hop.us if draft is not None and draft.known else None

    def prior(self, shape: TreeShape, temperature: float) -> Length:
        """How a new request starts out on this arm: the mean so far, weighing at most PRIOR_ROUNDS."""
        seen = self.lengths.get((temperature_class(temperature), shape), Length())
        return Length(seen.mean, min(seen.rounds, PRIOR_ROUNDS))

    @property
    def draft_ratio(self) -> float:
        """lambda_gamma of the paper: time of one drafter level over one plain target forward, 0.1 until measured."""
        plain = self.verify_costs.get(ROW_BUCKET)
        levels = [cost.us / shape.depth for shape, cost in self.draft_costs.items() if cost.count]
        if plain is None or not plain.us or not levels:
            return 0.1
        return min(levels) / plain.us
