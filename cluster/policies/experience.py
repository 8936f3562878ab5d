"""What a router has learned of one (target, drafter) pair: what rounds cost, and how many tokens each arm emits.

A hint, shared by one tenant's requests and never a matter of correctness. Costs are of the machine, its load and the
length of texts, and carry over whole; emitted lengths are of the text and weigh in a new request as a few rounds at
most. Both depend on what clients choose, so no tenant's requests learn from another's (`Experiences`).

Which tree suits a text is predicted, and is the text's own business. Whether the requests that run together should
speculate is decided for all of them (`SpeculationTrial`): what one of them guesses the others wait for, and a drafter
that shares a machine with the verifier slows rounds of all, which no single round's cost shows. So all of them try both
ways in turns, and the rates are compared.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.policies.classes import ROW_BUCKET, load_class, row_bucket, temperature_class
from cluster.policies.costs import COST_STEP, LEAST_US, PRIOR_ROUNDS, TRIED, Costs, EmittedLength
from cluster.policies.promises import Promises
from cluster.policies.step_time import degree_of
from cluster.policies.trial import SpeculationTrial

CONCURRENCY_DECAY_US = 500_000.0
"""How long those that were here are reckoned with: longer than a crowd of clients takes to come back."""

TENANTS = 512
"""Tenants of a target whose experience a router keeps; the one that asked longest ago goes."""


class RunningRequest:
    """One of the requests that run: its text is being opened until `begun`, and at a drafter while `opening`."""

    def __init__(self, concurrency: Concurrency, fixed: bool) -> None:
        self._concurrency = concurrency
        self._fixed = fixed
        self._opening = True
        concurrency.opening += 1

    @property
    def guesses(self) -> bool:
        """Whether this request may want trees, with as many beside it as there are: always where its client fixed the
        shape."""
        trial = self._concurrency.trial
        return self._fixed or trial is None or trial.guessing

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """While a drafter processes its text, which takes from the rounds of all."""
        self._concurrency.opening += 1
        try:
            yield
        finally:
            self._concurrency.opening -= 1

    def begun(self) -> None:
        """Its text is open. May be said again."""
        self._concurrency.opening -= self._opening
        self._opening = False


@dataclass(slots=True)
class Concurrency:
    """What all tenants of a target have in common at a router: the requests that run, whether these guess, and a
    property of the target."""

    requests: int = 0  # that run now
    expected: float = 0.0  # how many may be expected to: those that ran of late, where there are fewer now
    fixed: int = 0  # of them, those whose shape the client chose
    opening: int = 0  # texts that a peer processes before their rounds
    attends: bool = False  # whether the target has layers of attention: as its replica says, when it is met
    trials: defaultdict[int, SpeculationTrial] = field(
        default_factory=lambda: defaultdict(SpeculationTrial)
    )  # by load class

    @property
    def load(self) -> int:
        """The class of the load that there is."""
        return load_class(self.requests)

    @property
    def expected_load(self) -> int:
        """The class of the load that a text may expect. Where many are answered at once, as many often come at once,
        and the first of them is not alone for long."""
        return load_class(round(self.expected))

    @property
    def trial(self) -> SpeculationTrial | None:
        """Those that run now; None where each decides for itself: a text that is alone, and one in company whose shapes
        clients have fixed, until this load is known otherwise."""
        trial = self.trials[self.expected_load]
        return trial if round(self.expected) > 1 and (not self.fixed or trial.gain is not None) else None

    @contextlib.contextmanager
    def running(self, fixed: bool = False) -> Iterator[RunningRequest]:
        """While a request runs, it counts."""
        self.requests += 1
        self.expected = max(self.expected, self.requests)
        self.fixed += fixed
        place = RunningRequest(self, fixed)
        try:
            yield place
        finally:
            place.begun()
            self.requests -= 1
            self.fixed -= fixed

    def learn(self, tokens: int, took_us: float, disturbed: bool) -> None:
        """Take in one round, all told, of any request."""
        if self.requests > 1 and not self.fixed and self.load == self.expected_load:
            self.trials[self.load].learn(tokens, took_us, self.requests, disturbed)
        self.expected += (self.requests - self.expected) * min(
            took_us / max(self.requests, 1) / CONCURRENCY_DECAY_US, 1.0
        )


@dataclass(slots=True)
class Experience:
    """Costs and lengths so far of one tenant's requests, for each load by itself: an arm that a full house gave up is
    tried again when the trial is empty."""

    concurrency: Concurrency = field(default_factory=Concurrency)
    promises: Promises = field(default_factory=Promises)
    _by_load: defaultdict[int, Costs] = field(default_factory=lambda: defaultdict(Costs))

    @property
    def costs(self) -> Costs:
        """Those of the load that a text may expect."""
        return self._by_load[self.concurrency.expected_load]

    def worth(self, shape: TreeShape, tree: DraftTree, verdict: Verdict, temperature: float) -> float:
        """Tokens by which a round speaks for its arm: see `Promises`."""
        return self.promises.worth(temperature_class(temperature), shape, tree, verdict)

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict, temperature: float) -> float:
        """Take one round in. A late tree arrives as the root alone and carries the wait as its cost. Returns what the
        round is worth.

        A round costs its share of a draft that it had in common with other texts. Of steps, only how long they take
        with so many rows is learned: what others guess in them is not this arm's doing.
        """
        costs = self._by_load[self.concurrency.load]
        if shape.drafted:
            costs.learn_draft(shape, tree.draft_us / tree.texts)
        if costs.tried.total() and not verdict.cold:  # the very first pays for cold memory
            costs.step.learn(row_bucket(verdict.step_rows), verdict.verify_us, self.degree)
            costs.texts += COST_STEP * (verdict.texts - costs.texts)
        costs.tried[row_bucket(tree.rows)] += 1
        rows = costs.rows.setdefault(shape, tree.rows)
        costs.rows[shape] = rows + COST_STEP * (tree.rows - rows)
        kind, worth = temperature_class(temperature), self.worth(shape, tree, verdict, temperature)
        costs.lengths.setdefault((kind, shape), EmittedLength()).learn(worth)
        self.promises.learn(kind, shape, tree, verdict)
        return worth

    def learn_time(
        self, shape: TreeShape, tree: DraftTree, verdict: Verdict, took_us: float, disturbed: bool = False
    ) -> None:
        """Take in how long a round took, all told. What its peers were not busy with it, and had it not queued, was on
        its way: its share of that is its hops'."""
        busy_us = tree.draft_us + verdict.verify_us + verdict.queue_us
        hops_us = max(took_us - busy_us, 0.0) / verdict.texts
        self._by_load[self.concurrency.load].hop.learn(hops_us / self._hops(shape))
        self.concurrency.learn(verdict.length, took_us, disturbed or verdict.cold)

    def round_us(self, shape: TreeShape, rows: float | None = None) -> float | None:
        """The predicted time of a round with this shape, its share of what it has in common with others; None until
        something like it was seen often enough. `rows` are the tree's, where they are known before.

        As if all texts of a step chose this shape: where each counts on the others to stay small, none does.
        """
        costs = self.costs
        rows = self._rows(shape) if rows is None else rows
        if costs.tried[row_bucket(round(rows))] < TRIED:
            return None
        if not shape.drafted:
            return max(self._verify_us(rows) + costs.hop.us, LEAST_US)
        draft = costs.draft.get(shape)
        if draft is None or not draft.known:
            return None
        return max(draft.us + self._verify_us(rows) + self._hops(shape) * costs.hop.us, LEAST_US)

    @property
    def degree(self) -> int:
        """Of the polynomial through the target's steps."""
        return degree_of(self.concurrency.attends)

    def _verify_us(self, rows: float) -> float:
        return self.costs.verify_us(rows, self.degree)

    def _rows(self, shape: TreeShape) -> float:
        """Rows that a round of it has: proposals alone seldom fill a shape."""
        return shape.rows if shape.drafted else self.costs.rows.get(shape, shape.rows)

    def _hops(self, shape: TreeShape) -> int:
        """Calls to peers that a round waits for."""
        return 2 if shape.drafted else 1

    def predicted_us(self, shape: TreeShape, rows: float | None = None) -> float | None:
        """The same for a shape that nobody need have played: its step is read off the fit of steps, its draft off the
        plane. None until a step was measured, and for a tree until some tree's draft was."""
        costs = self.costs
        if not costs.step.weight:
            return None
        rows = self._rows(shape) if rows is None else rows
        if not shape.drafted:
            return max(self._verify_us(rows) + costs.hop.us, LEAST_US)
        draft_us = costs.draft_us(shape)
        if draft_us is None:
            return None
        return max(draft_us + self._verify_us(rows) + self._hops(shape) * costs.hop.us, LEAST_US)

    def hints(self) -> dict[int, Costs]:
        """What costs are known, by load class, for an experience that has none: see `take`."""
        return {load: costs.hint() for load, costs in self._by_load.items() if costs.tried.total()}

    def take(self, hints: Mapping[int, Costs]) -> None:
        """Begin with a prior's costs under each load of which there are none; they weigh PRIOR_ROUNDS at most."""
        for load, costs in hints.items():
            if not self._by_load[load].tried.total():
                self._by_load[load].begin(costs.hint())

    def prior(self, shape: TreeShape, temperature: float) -> EmittedLength:
        """How a new request starts out on this arm: the mean so far, weighing at most PRIOR_ROUNDS."""
        return self.costs.lengths.get((temperature_class(temperature), shape), EmittedLength()).at_most(PRIOR_ROUNDS)

    @property
    def draft_ratio(self) -> float:
        """lambda_gamma of the paper: time of one drafter level over one plain target forward, 0.1 until measured."""
        plain_us = self.costs.step.at(ROW_BUCKET, self.degree)
        levels = [cost.us / shape.depth for shape, cost in self.costs.draft.items() if cost.us]
        if not plain_us or not levels:
            return 0.1
        return min(levels) / plain_us


@dataclass(slots=True)
class Experiences:
    """A router's experience of one target, each tenant's by itself: its clients choose how long texts are, which shapes
    are drawn and how long a draft may take, so what it measures must not change what others are predicted."""

    concurrency: Concurrency = field(default_factory=Concurrency)
    _by_tenant: OrderedDict[str, Experience] = field(default_factory=OrderedDict)

    def of(self, tenant: str) -> Experience:
        """That of TENANTS at most; one that was dropped begins anew."""
        experience = self._by_tenant.setdefault(tenant, Experience(self.concurrency))
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > TENANTS:
            self._by_tenant.popitem(last=False)
        return experience
