"""What a router has learned of one (target, drafter) pair: what rounds cost, and how many tokens each arm emits.

A hint, shared by its requests and never a matter of correctness. Costs are of the machine and its load, and carry over
whole; emitted lengths are of the text and weigh in a new request as a few rounds at most.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
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


def load_class(requests: int) -> int:
    """Loads that cost alike: 1 request, 2, 3 to 5, 6 to 11, 12 to 22, and so on."""
    return round(math.log2(max(requests, 1)))


@dataclass(slots=True)
class Costs:
    """Costs and lengths under one load. `hop` is what a call to a peer costs beyond the peer's own time."""

    hop: Cost = field(default_factory=Cost)
    draft: dict[TreeShape, Cost] = field(default_factory=dict)
    verify: dict[int, Cost] = field(default_factory=dict)  # by row bucket
    lengths: dict[tuple[str, TreeShape], Length] = field(default_factory=dict)


@dataclass(slots=True)
class Experience:
    """Costs and lengths so far, for each load by itself: an arm that a full house gave up is tried again when the house
    is empty."""

    requests: int = 0  # that run now
    _by_load: defaultdict[int, Costs] = field(default_factory=lambda: defaultdict(Costs))

    @property
    def costs(self) -> Costs:
        """Those of the present load."""
        return self._by_load[load_class(self.requests)]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While a request runs, it counts."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict, temperature: float) -> None:
        """Take one round in. A late tree arrives as the root alone and carries the wait as its cost.

        A round costs its share of what it had in common with other texts' rounds. Were it to count the whole, each
        text would guess at the expense of all the others, and all would be slower than without.
        """
        if not shape.off:
            self.costs.draft.setdefault(shape, Cost()).learn(tree.draft_us / tree.texts)
        verify_us = (verdict.verify_us + verdict.queue_us) / verdict.texts
        self.costs.verify.setdefault(row_bucket(tree.rows), Cost()).learn(verify_us)
        self.costs.lengths.setdefault((temperature_class(temperature), shape), Length()).learn(verdict.length)

    def learn_hops(self, shape: TreeShape, us: float) -> None:
        """A round's share of what it took beyond the time in which its peers were busy or had it queued."""
        self.costs.hop.learn(us / (1 if shape.off else 2))

    def round_us(self, shape: TreeShape) -> float | None:
        """The predicted time of a round with this shape; None until something like it was seen often enough."""
        costs, bucket = self.costs, row_bucket(shape.rows)
        if bucket not in costs.verify or not costs.verify[bucket].known:
            return None
        verify_us = costs.verify[bucket].us
        if shape.off:
            return verify_us + costs.hop.us
        draft = costs.draft.get(shape)
        return draft.us + verify_us + 2 * costs.hop.us if draft is not None and draft.known else None

    def prior(self, shape: TreeShape, temperature: float) -> Length:
        """How a new request starts out on this arm: the mean so far, weighing at most PRIOR_ROUNDS."""
        seen = self.costs.lengths.get((temperature_class(temperature), shape), Length())
        return Length(seen.mean, min(seen.rounds, PRIOR_ROUNDS))

    @property
    def draft_ratio(self) -> float:
        """lambda_gamma of the paper: time of one drafter level over one plain target forward, 0.1 until measured."""
        plain = self.costs.verify.get(ROW_BUCKET)
        levels = [cost.us / shape.depth for shape, cost in self.costs.draft.items() if cost.count]
        if plain is None or not plain.us or not levels:
            return 0.1
        return min(levels) / plain.us
