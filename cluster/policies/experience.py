"""Costs of rounds that a router measured at one target, kept per tenant.

Costs affect speed only. All requests of a tenant share them. They depend on the machine, its load and the length of
texts. Clients choose the lengths, so tenants do not share costs; a new tenant begins with the costs of the median
tenant (`Experiences`).

Each request's policy predicts which tree suits its text. Whether concurrent requests speculate at all is decided for
all of them together (`SpeculationTrial`): one text's guesses delay the others, and a drafter that shares a machine with
the verifier slows every round, which the cost of a single round does not show. So all requests run with and without
speculation in turns, and the rates are compared.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dendro.modes import VerificationMode
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies.costs import (
    COST_STEP,
    KEPT,
    LEAST_US,
    PRIOR_ROUNDS,
    Cost,
    Costs,
    Marginal,
    Prices,
    Rate,
    StoppedDrafts,
    hops,
    load_class,
    mode_class,
    round_kind,
    usual_costs,
)
from cluster.policies.step_time import TargetSteps
from cluster.policies.trial import LEAST_PILOTS, SpeculationTrial, pilot_share

CONCURRENCY_DECAY_US = 500_000.0
"""Decay constant of the expected concurrency: longer than a batch of clients takes to send its next requests."""

GOLDEN_RATIO = 0.6180339887498949

LATEST = 32
"""Tenants from whose costs a new tenant's costs begin."""
STOPPED_ARMS = 64
"""Most `until` arms of a load class whose stopped drafts are kept. Clients can name any number of shapes; beyond that
the arm recorded first is dropped."""
TENANTS = 512
"""Most experiences that a router keeps of a target, one for each tenant and class of modes. Beyond that the least
recently used one is dropped."""


class RunningRequest:
    """A running request, counted in its target's `Concurrency`. Until `begun`, and during each `opening`, it counts
    among the texts being opened."""

    def __init__(self, concurrency: Concurrency, fixed: bool) -> None:
        self._concurrency = concurrency
        self._fixed = fixed
        self._opening = True
        concurrency.opening += 1

    @property
    def speculates(self) -> bool:
        """True if the request may use trees at the current concurrency; always where the client fixed the shape."""
        trial = self._concurrency.trial
        return self._fixed or trial is None or trial.speculating

    @property
    def rests(self) -> bool:
        """True if the request needs no drafter until the next trial; never where the client fixed the shape."""
        trial = self._concurrency.trial
        return not self._fixed and trial is not None and trial.resting

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Count the text as being opened while a drafter prefills it, which slows the rounds of all requests."""
        self._concurrency.opening += 1
        try:
            yield
        finally:
            self._concurrency.opening -= 1

    def begun(self) -> None:
        """Record that the text is open at the verifier. May be called again."""
        self._concurrency.opening -= self._opening
        self._opening = False


@dataclass(slots=True)
class Concurrency:
    """State that all tenants of a target share at a router: running requests, speculation trials, facts of the
    target."""

    requests: int = 0  # requests running now
    expected: float = 0.0  # expected concurrency: at least `requests`; decays towards it after more have run
    fixed: int = 0  # running requests whose shape the client chose or bounded
    off: int = 0  # running requests of mode `off`
    opening: int = 0  # texts that a verifier or drafter is opening
    target: TargetSteps = TargetSteps()  # sizes and times of steps, from the hello of its latest replica
    trials: dict[int, SpeculationTrial] = field(default_factory=dict)  # one per load class
    _places: int = 0  # places given out so far

    def learn_target(self, target: TargetSteps) -> None:
        """Record the sizes and times of steps that a verifier's hello reports."""
        if target != self.target:
            self.target = target

    @property
    def guessing(self) -> int:
        """Number of running requests that may guess; a trial counts its rounds by their number."""
        return self.requests - self.off

    @property
    def load(self) -> int:
        """Load class of the running requests."""
        return load_class(self.requests)

    @property
    def expected_load(self) -> int:
        """Load class of the expected concurrency, for which costs are predicted. Requests that were answered together
        often return together, so the first to return must not be treated as running alone."""
        return load_class(round(self.expected))

    @property
    def trial(self) -> SpeculationTrial | None:
        """The trial at the expected load. None if each request decides alone: when only one is expected, or when
        requests with shapes fixed by clients are running and this load's gain is unknown. Beside fixed shapes no turn
        can be judged, so texts then follow the outcome of the last trial."""
        if round(self.expected) < 2:
            return None
        trial = self.trial_at(self.expected_load)
        if not self.fixed:
            return trial
        return None if trial.gain is None else trial.as_settled()

    def trial_at(self, load: int) -> SpeculationTrial:
        """The trial of a load class, made if missing. Guesses gain less the more texts share a step, so a win at a
        higher load implies a win here, and a failure at a lower load implies a failure here. A new trial begins with
        the gain of the nearest load class that implies its outcome.

        >>> concurrency = Concurrency(trials={3: SpeculationTrial.begun(1.0, gain=1.4)})
        >>> concurrency.trial_at(2).gain, concurrency.trial_at(4).gain
        (1.4, None)
        """
        if load not in self.trials:
            pilots = pilot_share(2**load)
            settled = {other: trial for other, trial in self.trials.items() if trial.settled is not None}
            known = [
                (abs(other - load), trial.gain)
                for other, trial in settled.items()
                if trial.gain is not None and (other > load if trial.settled else other < load)
            ]
            gain = min(known)[1] if known else None
            self.trials[load] = SpeculationTrial(pilots) if gain is None else SpeculationTrial.begun(pilots, gain)
        return self.trials[load]

    def may_guess(self, trial: SpeculationTrial, place: float) -> bool:
        """True if the text at this place may guess under the trial. A pilot for many texts excludes no text once fewer
        than twice LEAST_PILOTS requests that may guess are running."""
        return trial.includes(place) or (trial.speculating and self.guessing < 2 * LEAST_PILOTS)

    def gains(self) -> dict[int, float]:
        """Measured gain of speculation by load class, with which another router begins (`begin_trials`)."""
        return {load: trial.gain for load, trial in self.trials.items() if trial.settled is not None and trial.gain}

    def begin_trials(self, gains: Mapping[int, float]) -> None:
        """Start trials from a prior's gains, for load classes without an outcome. gains: by load class"""
        for load, gain in gains.items():
            if load not in self.trials or self.trials[load].settled is None:
                self.trials[load] = SpeculationTrial.begun(pilot_share(2**load), gain)

    def next_place(self) -> float:
        """A new text's place in [0, 1): a pilot includes the places below its share. Places are multiples of the golden
        ratio modulo 1, so consecutive texts are spread evenly.

        >>> concurrency = Concurrency()
        >>> [round(concurrency.next_place(), 2) for _ in range(4)]
        [0.62, 0.24, 0.85, 0.47]
        """
        self._places += 1
        return self._places * GOLDEN_RATIO % 1

    @contextlib.contextmanager
    def running(self, fixed: bool = False, off: bool = False) -> Iterator[RunningRequest]:
        """Count a request while it runs. fixed: True if its client chose or bounded its shapes   off: True in mode
        `off`"""
        self.requests += 1
        self.expected = max(self.expected, self.requests)
        self.fixed += fixed
        self.off += off
        request = RunningRequest(self, fixed)
        try:
            yield request
        finally:
            request.begun()
            self.requests -= 1
            self.fixed -= fixed
            self.off -= off

    def learn(self, tokens: int, took_us: float, disturbed: bool, guessed: bool, judged: bool) -> None:
        """Record a round of any request. took_us: its time with all waits   guessed: True if its arm was not `off`
        judged: True if the request may guess in a trial's turns
        """
        if self.requests > 1 and not self.fixed and judged and self.load == self.expected_load:
            self.trial_at(self.load).learn(tokens, took_us, self.guessing, disturbed, guessed)
        self.expected += (self.requests - self.expected) * min(
            took_us / max(self.requests, 1) / CONCURRENCY_DECAY_US, 1.0
        )


def _is_usual(costs: Costs, arm: Arm, verdict: Verdict) -> bool:
    """False for a plain round that was not begun ahead although others were, because it follows a tree or a drafter
    opens the text meanwhile. Such a step takes longer (on two cores 9.1 ms) than the step of a text without trees (8.0
    ms), with which trees must be compared."""
    return not arm.off or verdict.ahead_us > 0 or not costs.ahead.count


@dataclass(slots=True)
class Experience:
    """Measured costs of one tenant's requests, per load class: an arm may pay at low concurrency and not at high."""

    concurrency: Concurrency = field(default_factory=Concurrency)
    _by_load: defaultdict[int, Costs] = field(default_factory=lambda: defaultdict(Costs))
    _opening_us: float = 0.0  # time by which rounds during the current opening exceeded predictions

    @property
    def costs(self) -> Costs:
        """Costs under the expected load class."""
        return self._by_load[self.concurrency.expected_load]

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict, chosen: bool = True) -> None:
        """Record a round's draft time and step time. A late tree is the root alone, with the wait as its draft time.

        chosen: True if a policy chose the arm. If a client fixed the shape, only the step's time is kept, as clients
        can name any number of shapes.

        A draft's time is divided by the texts drafted together. A step's time is learned by its number of rows and not
        for the arm, since other texts chose most of the rows.
        """
        costs = self._by_load[self.concurrency.load]
        if arm.drafted and chosen:
            costs.learn_draft(arm, tree.draft_us / tree.texts)
        # The first step touches cold memory.
        if costs.rounds and not verdict.cold and _is_usual(costs, arm, verdict):
            # A mean of 0 us would cut every later step to 0 us, as an outlier.
            us = max(verdict.verify_us + verdict.ahead_us, LEAST_US)
            costs.step.learn(self.concurrency.target.padded(verdict.step_rows), us, self.concurrency.target)
            costs.texts += COST_STEP * (verdict.texts - costs.texts)
        costs.rounds += 1
        if chosen and (arm.proposed or arm.stops):  # the trees of other arms have the shape's rows
            rows = costs.rows.setdefault(arm, tree.rows)
            costs.rows[arm] = rows + COST_STEP * (tree.rows - rows)

    def learn_time(
        self,
        arm: Arm,
        tree: DraftTree,
        verdict: Verdict,
        took_us: float,
        disturbed: bool = False,
        judged: bool = True,
        last_maker: str = "",
    ) -> None:
        """Record a round's whole time. The time that remains after draft, queue and step is that of the hops, divided
        by the texts of the step.

        took_us: the round's time with all waits   disturbed: True if a text was being opened meanwhile
        judged: False for a request that guesses in no trial
        last_maker: maker of the tree in the text's previous round; empty if that round had no tree
        """
        costs = self._by_load[self.concurrency.load]
        self._learn_opening(costs, arm, tree, took_us, disturbed)
        if _is_usual(costs, arm, verdict) and not tree.missed:
            hop = costs.hops.setdefault(round_kind(arm, last_maker), Cost())
            hop.learn(self._hops_us(tree, verdict, took_us) / hops(arm))
        if arm.off:
            costs.learn_ahead(verdict.ahead_us / verdict.texts)
        self.concurrency.learn(verdict.length, took_us, disturbed or verdict.cold, not arm.off, judged)

    def _learn_opening(self, costs: Costs, arm: Arm, tree: DraftTree, took_us: float, disturbed: bool) -> None:
        """Sum the microseconds by which a lone request's rounds exceed predictions while its text is being opened;
        learn the sum once the text is open. A round whose tree is missing is compared with a plain one; the wait for
        the tree is a cost of drafts."""
        if self.concurrency.requests != 1:
            self._opening_us = 0.0
        elif disturbed:
            waited_us, played = (tree.draft_us, OFF_ARM) if tree.missed else (0, arm)
            expected_us = self.prices().predicted_us(played)
            if expected_us is not None:
                begun_us = costs.ahead.us if tree.missed else 0.0  # the round was not begun ahead, as plain ones are
                self._opening_us += max(took_us - waited_us - begun_us - expected_us, 0.0)
        elif self._opening_us:
            costs.opening.learn(self._opening_us)
            self._opening_us = 0.0

    def share_us(self, tree: DraftTree, verdict: Verdict, took_us: float) -> float:
        """Measured microseconds of what `Prices.predicted_us` predicts: the text's share of draft, step and hops."""
        step_us = (verdict.verify_us + verdict.ahead_us) / verdict.texts
        return max(tree.draft_us / tree.texts + step_us + self._hops_us(tree, verdict, took_us), LEAST_US)

    def _hops_us(self, tree: DraftTree, verdict: Verdict, took_us: float) -> float:
        """A text's share, in microseconds, of the round's time that remains after draft, step and the waiting for
        steps of other texts. A text that is alone waits for nothing but its own work, such as noise computed ahead."""
        queue_us = verdict.queue_us if self.concurrency.requests > 1 else 0
        return max(took_us - tree.draft_us - verdict.verify_us - queue_us, 0.0) / verdict.texts

    def learn_rate(self, tokens: int, share_us: float) -> None:
        """Record a round of a request with a stop rule. share_us: the round's cost (`share_us`)"""
        self._by_load[self.concurrency.load].rate.learn(tokens, share_us, KEPT)

    def learn_stop(self, arm: Arm, drafted: DraftTree, verdict: Verdict) -> None:
        """Record a draft of an `until` arm. drafted: as the drafter sent it   verdict: on the round's tree"""
        stopped = self._by_load[self.concurrency.load].stopped
        if arm not in stopped and len(stopped) >= STOPPED_ARMS:
            del stopped[next(iter(stopped))]
        stopped.setdefault(arm, StoppedDrafts()).learn(drafted, verdict)

    def marginal(self, arm: Arm, rate: Rate) -> Marginal | None:
        """The numbers of the marginal rule, by which a draft of an `until(auto,...)` arm stops; None until a round, a
        step and a level of the arm's drafter were measured.

        rate: tokens and time of the request's own rounds; rounds of other requests weigh at most PRIOR_ROUNDS beside it
        """
        costs = self.costs
        now, level_us = rate.begun_with(costs.rate, PRIOR_ROUNDS), costs.level_us(arm)
        if not now or level_us is None or not costs.step.sizes:
            return None
        stopped = costs.stopped.get(arm, StoppedDrafts())
        return Marginal(
            now, level_us, costs.row_us(arm, self.concurrency.target), stopped.guesses_per_level, stopped.accept
        )

    def prices(self) -> Prices:
        """Predictions for several arms, valid until the next round is learned."""
        return Prices(self.costs, self.concurrency.target)

    def hints(self) -> dict[int, Costs]:
        """Measured costs by load class, with which another experience begins (`take`)."""
        return {load: costs.hint() for load, costs in self.measured()}

    def measured(self) -> list[tuple[int, Costs]]:
        """Load classes with measurements, and their costs."""
        return [(load, costs) for load, costs in self._by_load.items() if costs.rounds]

    def take(self, hints: Mapping[int, Costs]) -> None:
        """Start from a prior's costs in load classes without measurements; each cost weighs at most PRIOR_ROUNDS."""
        for load, costs in hints.items():
            if not self._by_load[load].rounds:
                self._by_load[load] = costs.hint()

    @property
    def draft_ratio(self) -> float:
        """The paper's lambda_gamma: time of one level of the fastest drafter over time of a plain target forward; 0.1
        until both were measured."""
        plain_us = self.costs.step.at(self.concurrency.target.padded(1), self.concurrency.target)
        levels = [cost.us / arm.depth for arm, cost in self.costs.draft.items() if cost.us]
        if not plain_us or not levels:
            return 0.1
        return min(levels) / plain_us


@dataclass(frozen=True, slots=True)
class _UsualCosts:
    """Medians of several tenants' costs under one load class."""

    costs: Costs
    due: int  # value of `Experiences._requests` from which on the medians may be computed again


@dataclass(slots=True)
class Experiences:
    """A router's experiences with one target, one per tenant and class of verification modes. Clients choose the
    length of texts, fixed shapes and draft deadlines, so one tenant's measurements must not change predictions for
    another. The same arm costs differently in another class of modes."""

    concurrency: Concurrency = field(default_factory=Concurrency)
    _by_tenant: OrderedDict[tuple[str, str], Experience] = field(default_factory=OrderedDict)
    _usual: dict[tuple[str, int], _UsualCosts] = field(default_factory=dict)  # key: class of modes, load class
    _requests: int = 0  # calls of `of` so far

    def of(self, tenant: str, mode: VerificationMode = VerificationMode.COUPLED) -> Experience:
        """The tenant's experience. A new tenant's begins with the medians of other tenants' costs (`_usual_costs`). At
        most TENANTS experiences are kept."""
        key = tenant, mode_class(mode)
        self._requests += 1
        if key not in self._by_tenant:
            begun = Experience(self.concurrency)
            if self._by_tenant:
                begun.take(self._usual_costs(key[1]))
            self._by_tenant[key] = begun
        experience = self._by_tenant[key]
        self._by_tenant.move_to_end(key)
        if len(self._by_tenant) > TENANTS:
            self._by_tenant.popitem(last=False)
        return experience

    def _usual_costs(self, mode: str) -> dict[int, Costs]:
        """Medians of the costs that the LATEST tenants measured, by load class. The machine decides costs, but each
        tenant the length of its texts, so a few extreme tenants move no other's.

        Computing the medians of one load class over LATEST tenants takes milliseconds, in which no other request
        proceeds. So medians are cached: a new tenant has them computed again for at most one load class, and medians
        over n tenants are used for at least n requests.
        """
        latest = [each for (_, own), each in reversed(self._by_tenant.items()) if own == mode][:LATEST]
        known: defaultdict[int, list[Costs]] = defaultdict(list)
        for experience in latest:
            for load, costs in experience.measured():
                known[load].append(costs)
        old = [load for load in known if (mode, load) in self._usual and self._usual[mode, load].due <= self._requests]
        oldest = min(old, key=lambda load: self._usual[mode, load].due, default=None)
        for load, measured in known.items():
            if load == oldest or (mode, load) not in self._usual:
                medians = usual_costs([costs.hint() for costs in measured], self.concurrency.target)
                self._usual[mode, load] = _UsualCosts(medians, self._requests + len(measured))
        return {load: usual.costs for (own, load), usual in self._usual.items() if own == mode}
