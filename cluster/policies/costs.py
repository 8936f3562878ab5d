"""What rounds cost and emit, learned from their times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from dendro.shapes import TreeShape

from cluster.policies.classes import row_bucket
from cluster.policies.step_time import OUTLIER, StepTime

PRIOR_ROUNDS = 8.0
"""What all earlier requests together weigh in a new one, in rounds."""
COST_STEP = 0.1
LEAST_US = 1.0
"""No round is predicted to take less: rates divide by it, and costs may come from a store or a peer."""
TRIED = 2
"""Measurements before a cost is believed. The first of a kind pays for memory and code that nobody touched before; an
arm that is judged by it is never tried again."""


@dataclass(slots=True)
class Cost:
    """A smoothed cost in microseconds; the least of the first TRIED measurements to begin with. Nothing was measured
    where none was made: an arm whose drafts never come is known to cost none, until one does."""

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
    """Mean and variance of an arm's emitted tokens, and the rounds that they rest on."""

    mean: float = 0.0
    rounds: float = 0.0
    variance: float = 0.0  # tokens squared

    def learn(self, tokens: float) -> None:
        self.rounds += 1
        off = tokens - self.mean
        self.mean += off / self.rounds
        self.variance += (off * (tokens - self.mean) - self.variance) / self.rounds

    def at_most(self, rounds: float) -> EmittedLength:
        """The same, resting on so many rounds at most."""
        return EmittedLength(self.mean, min(self.rounds, rounds), self.variance)


REFIT = 16
"""Measured drafts until the plane is fitted anew; a shape's first two fit it at once."""
FEATURES = ((1,), (1, 2), (0, 1), (0, 2), (0, 1, 2))
"""Of (once, levels, forwarded rows), those that a plane may rest on, the plainest first."""


@dataclass(slots=True)
class DraftPlane:
    """A draft's time as a plane over its levels and the rows that go through the drafter, by the shapes that were
    played: us = once + levels * a + forwarded * b, none of them negative, by least squares of relative errors.

    One shape tells of levels alone; where several planes fit as well, that of fewer features is taken.
    """

    coefficients: tuple[float, float, float] | None = None
    _fresh: int = 0  # measured drafts since it was fitted

    def note(self, cost: Cost) -> None:
        """A shape's draft was measured."""
        self._fresh = REFIT if cost.count == TRIED else self._fresh + 1

    def at(self, shape: TreeShape, draft: Mapping[TreeShape, Cost]) -> float | None:
        """Microseconds of a draft of this shape, by what `draft` has of others; None where it has nothing."""
        if self._fresh >= REFIT:
            self._fit({other: cost for other, cost in draft.items() if cost.known and cost.us})
            self._fresh = 0
        if self.coefficients is None:
            return None
        once, level, row = self.coefficients
        return once + level * shape.depth + row * shape.forwarded

    def _fit(self, known: Mapping[TreeShape, Cost]) -> None:
        drafts = [(1.0, shape.depth, shape.forwarded) for shape in known]
        us = np.array([max(cost.us, 1.0) for cost in known.values()])
        design = np.array(drafts).reshape(-1, 3) / us[:, None]
        self.coefficients, least = None, math.inf
        for features in FEATURES:
            chosen = design[:, features]
            if len(us) < len(features) or np.linalg.matrix_rank(chosen) < len(features):
                continue
            found = np.linalg.lstsq(chosen, np.ones(len(us)), rcond=None)[0]
            error = float(np.square(chosen @ found - 1).sum())
            if (found >= 0).all() and error < least - 1e-6:
                least, by_feature = error, dict(zip(features, found.tolist(), strict=True))
                self.coefficients = (by_feature.get(0, 0.0), by_feature.get(1, 0.0), by_feature.get(2, 0.0))


@dataclass(slots=True)
class Costs:
    """Costs and lengths under one load. `hop` is what a call to a peer costs beyond the peer's own time."""

    hop: Cost = field(default_factory=Cost)
    draft: dict[TreeShape, Cost] = field(default_factory=dict)
    step: StepTime = field(default_factory=StepTime)
    texts: float = 1.0  # of a step, usually
    tried: Counter[int] = field(default_factory=Counter)  # rounds by row bucket
    rows: dict[TreeShape, float] = field(default_factory=dict)  # of a tree, usually
    lengths: dict[tuple[str, TreeShape], EmittedLength] = field(default_factory=dict)
    _plane: DraftPlane = field(default_factory=DraftPlane)

    def learn_draft(self, shape: TreeShape, us: float) -> None:
        """A draft of this shape took so long."""
        cost = self.draft.setdefault(shape, Cost())
        cost.learn(us)
        self._plane.note(cost)

    def verify_us(self, rows: float, degree: int) -> float:
        """A text's share of a step in which every text has so many rows, of a target whose steps have this degree."""
        return self.step.at(row_bucket(round(self.texts * rows)), degree) / self.texts

    def draft_us(self, shape: TreeShape) -> float | None:
        """The shape's own measured draft, or what the others' say of it; None where no shape's is known."""
        own = self.draft.get(shape)
        if own is not None and own.known:
            return own.us
        return self._plane.at(shape, self.draft)

    def hint(self) -> Costs:
        """Costs alone, each weighing PRIOR_ROUNDS at most."""
        most = int(PRIOR_ROUNDS)
        return Costs(
            hop=Cost(self.hop.us, min(self.hop.count, most)),
            draft={shape: Cost(cost.us, min(cost.count, most)) for shape, cost in self.draft.items()},
            step=replace(self.step, weight=min(self.step.weight, PRIOR_ROUNDS)),
            texts=self.texts,
            tried=Counter({rows: min(count, most) for rows, count in self.tried.items()}),
        )

    def begin(self, hint: Costs) -> None:
        """Take costs over whole; what is known of lengths stays."""
        self.hop, self.draft, self.step = hint.hop, hint.draft, hint.step
        self.texts, self.tried = hint.texts, hint.tried
        self._plane = DraftPlane(_fresh=REFIT)
