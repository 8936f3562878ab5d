"""What a router has learned of one (target, drafter) pair: what rounds cost, and how many tokens each arm emits.

A hint, shared by one tenant's requests and never a matter of correctness. Costs are of the machine, its load and the
length of texts, and carry over whole; emitted lengths are of the text and weigh in a new request as a few rounds at
most. Both depend on what clients choose, so no tenant's requests learn from another's (`Experiences`).

Which tree suits a text is predicted, and is the text's own business. Whether those that run together should guess at
all is theirs together (`House`): what one of them guesses the others wait for, and a drafter that shares a machine with
the verifier takes from all of them what no round's price says. So it is tried, by all at once, and measured.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np
from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.policies.promises import Promises
from cluster.policies.step_time import OUTLIER, StepTime, degree_of

PRIOR_ROUNDS = 8.0
"""What all earlier requests together weigh in a new one, in rounds."""
COST_STEP = 0.1
ROW_BUCKET = 8
LEAST_US = 1.0
"""No round is predicted to take less: rates divide by it, and costs may come from a store or a peer."""
LEARNING_ROUNDS = 16.0
"""Rounds in which a house's texts get to know the arms under a new load, before what they reach is measured."""
SETTLING_ROUNDS = 4.0
"""Rounds after a change of sides that are of both: drafters are opened in them, and late drafts come in."""
TURN_ROUNDS = 8.0
COMPANY_US = 500_000.0
"""How long those that were here are reckoned with: longer than a crowd of clients takes to come back."""
CROWD = 4
"""Texts from which on a turn is half as long: it has the rounds of all of them."""
TURNS = 6
"""Of a trial, the two sides one after the other: what else the machine does meanwhile befalls both."""
FIRST_REST, LONGEST_REST = 512.0, 8192.0
"""Rounds until the next trial: one costs what a dozen rounds do, a fiftieth of them at most. It doubles with every
trial that changes nothing."""
DISTURBED = 0.25
"""What a round counts for in which a prompt was processed: it is not judged, but a house that always has one must not
be caught in a trial."""
GUESSING_MARGIN = 1.1
"""How much faster rounds must be with guesses: drafters are opened and closed besides, and prompts wait for larger
steps."""

TENANTS = 512
"""Tenants of a target whose experience a router keeps; the one that asked longest ago goes."""
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
class Length:
    """Mean and variance of an arm's emitted tokens, and the rounds that they rest on."""

    mean: float = 0.0
    rounds: float = 0.0
    variance: float = 0.0  # tokens squared

    def learn(self, tokens: float) -> None:
        self.rounds += 1
        off = tokens - self.mean
        self.mean += off / self.rounds
        self.variance += (off * (tokens - self.mean) - self.variance) / self.rounds

    def at_most(self, rounds: float) -> Length:
        """The same, resting on so many rounds at most."""
        return Length(self.mean, min(self.rounds, rounds), self.variance)


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
class Side:
    """What a house came to in a turn, guessing or not."""

    tokens: list[int] = field(default_factory=list)  # of each round
    shares_us: list[float] = field(default_factory=list)  # of the house's time

    @property
    def rate(self) -> float:
        """Tokens per microsecond of the whole house. A hiccup means nothing for the choice; but late drafts and full
        steps, which the median would pass over, do."""
        longest_us = OUTLIER * median(self.shares_us)
        return sum(self.tokens) / max(sum(min(share_us, longest_us) for share_us in self.shares_us), 1e-9)


@dataclass(slots=True)
class House:
    """Whether the texts that run together under one load guess: the side under which they emitted more tokens a second,
    all of them on one side at a time. Rounds are counted as those of one text."""

    guessing: bool = True
    gain: float | None = None  # how many times as many tokens a second they emit if they guess; None: not tried yet
    usual: float = 1.0  # tokens of a round in which they do
    rounds: float = -LEARNING_ROUNDS  # of this turn or rest; below zero they are not judged
    until: float = TURN_ROUNDS
    turns: int = TURNS  # that are left of a trial, this one among them; 0: the house rests
    settled: bool | None = None  # whether it guesses while it rests
    rest: float = FIRST_REST
    _sides: list[Side] = field(default_factory=lambda: [Side()])  # of the trial's turns so far, and of this one

    def learn(self, tokens: int, took_us: float, texts: int, disturbed: bool = False) -> None:
        """Take in one of its rounds, which took so long with all its waits, while so many texts ran. A round is
        disturbed by the prompt of another text, which takes longer than any guess and says nothing of them."""
        if texts >= CROWD and self.rounds < -LEARNING_ROUNDS / 2:
            self.rounds = -LEARNING_ROUNDS / 2
        before, self.rounds = self.rounds, self.rounds + (DISTURBED if disturbed else 1) / texts
        if before < 0:
            return
        if self.turns and not disturbed:
            self._sides[-1].tokens.append(tokens)
            self._sides[-1].shares_us.append(took_us / texts)
        if self.rounds >= (self.until / 2 if self.turns and texts >= CROWD else self.until):
            self._next()

    def repays(self, tokens: float) -> bool:
        """Whether a text guesses with the others from which a round draws so many tokens: what a round with guesses
        takes is known by what the house emits in its own."""
        return bool(self.turns) or self.gain is None or tokens * self.gain >= self.usual

    def _next(self) -> None:
        """What comes after a turn or a rest."""
        if not self.turns:
            self._sides = [Side()]
            self.turns = TURNS
            self._turn(not self.guessing, TURN_ROUNDS)
            return
        self.turns -= 1
        if self.turns:
            self._sides.append(Side())
            self._turn(not self.guessing, TURN_ROUNDS)
            return
        better = self._compare()
        self.rest = min(2 * self.rest, LONGEST_REST) if better is self.settled else FIRST_REST
        self.settled = better
        self._turn(better, self.rest)

    def _compare(self) -> bool:
        """Whether guesses are better: each turn beside the one after it, which the machine was alike to; of these, the
        median. Where drafters were opened for as long as they were wanted, they are not."""
        last, before = self._sides[1::2], self._sides[::2]  # a trial ends on the side that is tried now
        pairs = list(zip(*((last, before) if self.guessing else (before, last)), strict=True))
        found = [(guessing, off) for guessing, off in pairs if guessing.tokens and off.tokens]
        if found:
            gain = median(guessing.rate / off.rate for guessing, off in found)
            self.gain = gain if self.gain is None else math.sqrt(self.gain * gain)
            self.usual = fmean(fmean(guessing.tokens) for guessing, _ in found)
        if self.gain is None:
            return not any(off.tokens for _, off in pairs)
        return self.gain >= GUESSING_MARGIN

    def _turn(self, guessing: bool, until: float) -> None:
        self.rounds = -SETTLING_ROUNDS if guessing is not self.guessing else 0.0
        self.guessing, self.until = guessing, until


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
    lengths: dict[tuple[str, TreeShape], Length] = field(default_factory=dict)
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


class Place:
    """One of the requests that run: its text is being opened until `begun`, and at a drafter while `opening`."""

    def __init__(self, shared: Shared, fixed: bool) -> None:
        self._shared = shared
        self._fixed = fixed
        self._opening = True
        shared.opening += 1

    @property
    def guesses(self) -> bool:
        """Whether this request may want trees, with as many beside it as there are: always where its client fixed the
        shape."""
        house = self._shared.house
        return self._fixed or house is None or house.guessing

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """While a drafter processes its text, which takes from the rounds of all."""
        self._shared.opening += 1
        try:
            yield
        finally:
            self._shared.opening -= 1

    def begun(self) -> None:
        """Its text is open. May be said again."""
        self._shared.opening -= self._opening
        self._opening = False


@dataclass(slots=True)
class Shared:
    """What all tenants of a target have in common at a router: the requests that run, whether these guess, and a
    property of the target."""

    requests: int = 0  # that run now
    company: float = 0.0  # how many may be expected to: those that ran of late, where there are fewer now
    fixed: int = 0  # of them, those whose shape the client chose
    opening: int = 0  # texts that a peer processes before their rounds
    attends: bool = False  # whether the target has layers of attention: as its replica says, when it is met
    houses: defaultdict[int, House] = field(default_factory=lambda: defaultdict(House))  # by load class

    @property
    def load(self) -> int:
        """The class of the load that there is."""
        return load_class(self.requests)

    @property
    def expected_load(self) -> int:
        """The class of the load that a text may expect. Where many are answered at once, as many often come at once,
        and the first of them is not alone for long."""
        return load_class(round(self.company))

    @property
    def house(self) -> House | None:
        """Those that run now; None where each decides for itself: a text that is alone, and one in company whose shapes
        clients have fixed, until this load is known otherwise."""
        house = self.houses[self.expected_load]
        return house if round(self.company) > 1 and (not self.fixed or house.gain is not None) else None

    @contextlib.contextmanager
    def running(self, fixed: bool = False) -> Iterator[Place]:
        """While a request runs, it counts."""
        self.requests += 1
        self.company = max(self.company, self.requests)
        self.fixed += fixed
        place = Place(self, fixed)
        try:
            yield place
        finally:
            place.begun()
            self.requests -= 1
            self.fixed -= fixed

    def learn(self, tokens: int, took_us: float, disturbed: bool) -> None:
        """Take in one round, all told, of any request."""
        if self.requests > 1 and not self.fixed and self.load == self.expected_load:
            self.houses[self.load].learn(tokens, took_us, self.requests, disturbed)
        self.company += (self.requests - self.company) * min(took_us / max(self.requests, 1) / COMPANY_US, 1.0)


@dataclass(slots=True)
class Experience:
    """Costs and lengths so far of one tenant's requests, for each load by itself: an arm that a full house gave up is
    tried again when the house is empty."""

    shared: Shared = field(default_factory=Shared)
    promises: Promises = field(default_factory=Promises)
    _by_load: defaultdict[int, Costs] = field(default_factory=lambda: defaultdict(Costs))

    @property
    def costs(self) -> Costs:
        """Those of the load that a text may expect."""
        return self._by_load[self.shared.expected_load]

    def worth(self, shape: TreeShape, tree: DraftTree, verdict: Verdict, temperature: float) -> float:
        """Tokens by which a round speaks for its arm: see `Promises`."""
        return self.promises.worth(temperature_class(temperature), shape, tree, verdict)

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict, temperature: float) -> float:
        """Take one round in. A late tree arrives as the root alone and carries the wait as its cost. Returns what the
        round is worth.

        A round costs its share of a draft that it had in common with other texts. Of steps, only how long they take
        with so many rows is learned: what others guess in them is not this arm's doing.
        """
        costs = self._by_load[self.shared.load]
        if shape.drafted:
            costs.learn_draft(shape, tree.draft_us / tree.texts)
        if costs.tried.total() and not verdict.cold:  # the very first pays for cold memory
            costs.step.learn(row_bucket(verdict.step_rows), verdict.verify_us, self.degree)
            costs.texts += COST_STEP * (verdict.texts - costs.texts)
        costs.tried[row_bucket(tree.rows)] += 1
        rows = costs.rows.setdefault(shape, tree.rows)
        costs.rows[shape] = rows + COST_STEP * (tree.rows - rows)
        kind, worth = temperature_class(temperature), self.worth(shape, tree, verdict, temperature)
        costs.lengths.setdefault((kind, shape), Length()).learn(worth)
        self.promises.learn(kind, shape, tree, verdict)
        return worth

    def learn_time(
        self, shape: TreeShape, tree: DraftTree, verdict: Verdict, took_us: float, disturbed: bool = False
    ) -> None:
        """Take in how long a round took, all told. What its peers were not busy with it, and had it not queued, was on
        its way: its share of that is its hops'."""
        busy_us = tree.draft_us + verdict.verify_us + verdict.queue_us
        hops_us = max(took_us - busy_us, 0.0) / verdict.texts
        self._by_load[self.shared.load].hop.learn(hops_us / self._hops(shape))
        self.shared.learn(verdict.length, took_us, disturbed or verdict.cold)

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
        return degree_of(self.shared.attends)

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

    def prior(self, shape: TreeShape, temperature: float) -> Length:
        """How a new request starts out on this arm: the mean so far, weighing at most PRIOR_ROUNDS."""
        return self.costs.lengths.get((temperature_class(temperature), shape), Length()).at_most(PRIOR_ROUNDS)

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

    shared: Shared = field(default_factory=Shared)
    _by_tenant: OrderedDict[str, Experience] = field(default_factory=OrderedDict)

    def of(self, tenant: str) -> Experience:
        """That of TENANTS at most; one that was dropped begins anew."""
        experience = self._by_tenant.setdefault(tenant, Experience(self.shared))
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > TENANTS:
            self._by_tenant.popitem(last=False)
        return experience
