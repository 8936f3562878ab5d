"""Statistics of earlier requests of one kind, with which a new request begins. They affect speed only.

A kind is a target, its drafters, a temperature class, a tenant and a class of verification modes. A prior has

- the emitted tokens of each arm's rounds;
- for each drafter, counts of the ranks that it gave to the text's tokens, which predict arms never played;
- how many tokens proposals promised, and how many of them came;
- the tenant's costs, and the gains of speculation at the target, by load class.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from dendro.modes import VerificationMode
from dendro.shapes import MAX_ROWS
from dendro.text import Verdict
from dendro.tree import RANKED, DraftTree
from dendro.wire import MAX_STEP_ROWS

from cluster.arms import Arm
from cluster.policies.costs import PRIOR_ROUNDS, ROUND_KINDS, Cost, Costs, EmittedLength, mode_class, temperature_class
from cluster.policies.replay import RankTrace, mean_emitted, replayed
from cluster.policies.step_time import MOST_SIZES, StepTime

KEPT_ROUNDS = 64.0
"""Most rounds that a prior's earlier rounds weigh when new ones are added: a tenant's next texts may differ."""
LEAST_ROUNDS = 4.0
"""Least rounds of an arm, or ranked tokens of a drafter, with which a tenant counts in `pair_prior`, unless no tenant
has as many."""
DOUBTED = 2.0
"""Tokens added both to those promised and to those that came (additive smoothing)."""
DEPTHS = 16
"""Number of depths with rank counts of their own; deeper tokens count at the last."""
BACK_OFF = 1.0
"""Weight, in tokens, of the rank distribution of the depth above; a depth never reached has that distribution."""
FORMAT = 11
"""Format of stored priors, increased with every change; a prior of another format counts as missing."""
MAX_PRIOR_BYTES = 1 << 16
MAX_ARMS, MAX_LOADS = 256, 32
"""Limits on a prior's arms and load classes, above what a router's policies and requests produce."""
MOST = 1e15
"""Upper bound of all numbers in a prior."""

RankCounts = npt.NDArray[np.float64]
"""Counts c[d][r], [DEPTHS, RANKED + 1]: number of text tokens that were the d-th of their round and to which a drafter
gave the rank r. Only tokens are counted before which the whole round was guessed right."""


def no_ranks() -> RankCounts:
    """Rank counts of zero."""
    return np.zeros((DEPTHS, RANKED + 1))


def tenant_tag(tenant: str) -> str:
    """Hash of a tenant's name, used in keys of the store. A domain prefix makes it differ from other hashes of it.

    It keeps plain names out of keys. It does not hide them from readers of the store, who can hash guessed names; a
    secret hash key would not either, since it would be in the store.
    """
    return hashlib.sha256(b"dendro:prior\0" + tenant.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PriorKey:
    """Key of a kind of request in the store of priors."""

    target: str
    drafters: tuple[str, ...]
    temperature: str  # temperature class
    tenant: str  # tag of the tenant (`tenant_tag`)
    mode: str = ""  # class of verification modes

    @classmethod
    def of(
        cls,
        target: str,
        drafters: tuple[str, ...],
        temperature: float,
        tenant: str,
        mode: VerificationMode = VerificationMode.COUPLED,
    ) -> PriorKey:
        return cls(target, drafters, temperature_class(temperature), tenant_tag(tenant), mode_class(mode))

    @property
    def name(self) -> str:
        parts = [self.target, "+".join(self.drafters), self.temperature, self.tenant]
        return ":".join([*parts, self.mode] if self.mode else parts)


@dataclass(frozen=True, slots=True)
class Promises:
    """Accepted tokens that played proposals promised by their chances, and accepted tokens that came.

    >>> Promises(promised=10.0, came=4.0).share  # (4 + DOUBTED) / (10 + DOUBTED)
    0.5
    """

    promised: float = 0.0
    came: float = 0.0

    def added(self, other: Promises) -> Promises:
        """The sum of both."""
        return Promises(self.promised + other.promised, self.came + other.came)

    def at_most(self, promised: float) -> Promises:
        """A copy with the same share of tokens that came, scaled down to at most `promised` promised tokens."""
        part = min(1.0, promised / max(self.promised, 1e-9))
        return Promises(part * self.promised, part * self.came)

    @property
    def share(self) -> float:
        """Share of promised tokens that came, with DOUBTED tokens added to both. It is never 0, or no proposal would be
        played again."""
        return (self.came + DOUBTED) / (self.promised + DOUBTED)


def promised_tokens(tree: DraftTree, rows: int) -> float:
    """Sum of the chances of a tree's likeliest guesses: the accepted tokens that they promise.

    rows: most rows that are counted, the root among them
    """
    return float(np.exp(np.sort(tree.values)[-min(rows, tree.rows) :]).sum()) - 1


@dataclass(slots=True)
class Prior:
    """Statistics of rounds: of a kind of requests, or of a single request before they are added to its kind.

    A drafter ranked 8 first tokens of rounds: 6 times first, twice second. A chain of one guess then emits 1 + 6/8
    tokens a round, a tree of two siblings 1 + 8/8, though neither was played:

    >>> ranks = no_ranks()
    >>> ranks[0, 0], ranks[0, 1] = 6, 2
    >>> found = Prior(ranks={"mamba": ranks}).lengths_of([Arm.parse("mamba:(1)"), Arm.parse("mamba:(2)")])
    >>> [length.mean for length in found.values()]
    [1.75, 2.0]
    """

    lengths: dict[Arm, EmittedLength] = field(default_factory=dict)  # by arm: emitted tokens of its rounds
    ranks: dict[str, RankCounts] = field(default_factory=dict)  # one table per drafter
    costs: dict[int, Costs] = field(default_factory=dict)  # one per load class
    gains: dict[int, float] = field(default_factory=dict)  # by load class: gain measured by speculation trials
    promises: Promises = Promises()  # promises of rounds whose tree had proposals alone
    _trace: RankTrace = field(default_factory=RankTrace)

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict, chosen: bool) -> None:
        """Record a round of a single request. A round without its drafter's tree does not count for the arm.

        chosen: True if a policy chose the arm. Shapes fixed by clients are not kept, as clients can name any number of
        them.
        """
        ranked = self._trace.learn(arm.maker, tree, verdict)
        if ranked.ranks:
            if arm.maker not in self.ranks:
                self.ranks[arm.maker] = no_ranks()
            counts = self.ranks[arm.maker]
            for rank, depth in zip(ranked.ranks, ranked.depths, strict=True):
                counts[min(depth, DEPTHS) - 1, rank] += 1
        if chosen and tree.guesses and not tree.missed:
            self.lengths.setdefault(arm, EmittedLength()).learn(verdict.length)
            if arm.proposed:
                round_ = Promises(promised_tokens(tree, tree.rows), verdict.length - 1.0)
                self.promises = self.promises.added(round_)

    @property
    def guessed(self) -> bool:
        """True if the prior has emitted lengths or ranks, with which a new request can begin."""
        return bool(self.lengths or self.ranks)

    def knows(self, drafter: str) -> bool:
        """True if a request has tried the drafter."""
        return drafter in self.ranks or any(arm.maker == drafter for arm in self.lengths)

    def add(self, other: Prior) -> None:
        """Add another prior's rounds. Rounds recorded before weigh at most KEPT_ROUNDS."""
        for arm, new in other.lengths.items():
            self.lengths[arm] = _pooled(self.lengths.get(arm, EmittedLength()).at_most(KEPT_ROUNDS), new)
        for drafter, counts in other.ranks.items():
            kept = self.ranks.get(drafter, no_ranks())
            self.ranks[drafter] = kept * min(1.0, KEPT_ROUNDS / max(kept[0].sum(), 1e-9)) + counts
        self.promises = self.promises.at_most(KEPT_ROUNDS).added(other.promises)

    def measured(self, costs: dict[int, Costs], gains: dict[int, float]) -> None:
        """Replace the costs, by load class, and the gains of the target's trials."""
        self.costs, self.gains = costs, gains

    def replace_rounds(self, other: Prior) -> None:
        """Replace what rounds emitted, ranked and promised by another's."""
        self.lengths, self.ranks, self.promises = other.lengths, other.ranks, other.promises

    def begun(self) -> Prior:
        """A new tenant's prior made from this one of all tenants. Its rounds weigh at most PRIOR_ROUNDS."""
        return Prior(
            {arm: length.at_most(PRIOR_ROUNDS) for arm, length in self.lengths.items()},
            {
                drafter: counts * min(1.0, PRIOR_ROUNDS / max(counts[0].sum(), 1e-9))
                for drafter, counts in self.ranks.items()
            },
            dict(self.costs),
            dict(self.gains),
            self.promises.at_most(PRIOR_ROUNDS),
        )

    def lengths_of(self, arms: Sequence[Arm]) -> dict[Arm, EmittedLength]:
        """Emitted lengths by arm with which a new request begins, each of a weight of at most PRIOR_ROUNDS.

        An arm's length comes from the rounds that played it. If these are fewer than PRIOR_ROUNDS, it comes from the
        drafter's ranks, provided that they determine what the shape emits (`replayed`) and have more rounds. Arms
        without either are left out.
        """
        found = dict[Arm, EmittedLength]()
        chances = dict[str, RankCounts]()  # one table per drafter
        for arm in arms:
            played, ranks = self.lengths.get(arm), self.ranks.get(arm.maker)
            known = played.rounds if played is not None else 0.0
            rounds = float(ranks[0].sum()) if ranks is not None and replayed(arm.shape) else 0.0
            if ranks is not None and known < min(rounds, PRIOR_ROUNDS):
                if arm.maker not in chances:
                    chances[arm.maker] = _chances(ranks)
                found[arm] = EmittedLength(mean_emitted(arm.shape, chances[arm.maker]), min(rounds, PRIOR_ROUNDS))
            elif played is not None:
                found[arm] = played.at_most(PRIOR_ROUNDS)
        return found


def pair_prior(priors: Collection[Prior]) -> Prior:
    """The prior of a tenant without earlier requests, from the priors of all tenants. A few tenants cannot move it
    far, whatever their texts, because it takes

    - for each arm, the emitted length of the median tenant;
    - for each drafter, the rank counts of the middle third of the tenants, by the share of tokens ranked first;
    - the promises of the tenant with the median share that came.
    """
    pair = Prior()
    promises = [prior.promises for prior in priors if prior.promises.promised]
    promises = [each for each in promises if each.promised >= LEAST_ROUNDS] or promises
    if promises:
        pair.promises = sorted(promises, key=lambda each: each.share)[(len(promises) - 1) // 2].at_most(KEPT_ROUNDS)
    for arm in {arm for prior in priors for arm in prior.lengths}:
        known = [prior.lengths[arm] for prior in priors if arm in prior.lengths]
        sure = [length for length in known if length.rounds >= LEAST_ROUNDS] or known
        pair.lengths[arm] = sorted(sure, key=lambda length: length.mean)[(len(sure) - 1) // 2].at_most(KEPT_ROUNDS)
    for drafter in {drafter for prior in priors for drafter in prior.ranks}:
        tables = [prior.ranks[drafter] for prior in priors if drafter in prior.ranks]
        enough = [counts for counts in tables if counts[0].sum() >= LEAST_ROUNDS] or tables
        ordered = sorted(enough, key=lambda counts: counts[0, 0] / max(counts[0].sum(), 1e-9))
        middle = ordered[len(ordered) // 3 : len(ordered) - len(ordered) // 3]
        pair.ranks[drafter] = np.sum(
            [counts * min(1.0, KEPT_ROUNDS / max(counts[0].sum(), 1e-9)) for counts in middle], 0
        )
    return pair


NO_PRIOR = Prior()
"""The prior of an unknown kind. Must not be changed."""


class PriorStore(Protocol):
    """Keeps priors by key for a limited time. Losing one costs a few rounds. No call raises or takes long."""

    async def load(self, key: PriorKey) -> Prior | None:
        """Called at a router's first request of a kind. Returns the stored prior; None if missing or malformed."""
        ...

    async def save(self, key: PriorKey, prior: Prior) -> bool:
        """Called after requests of the kind have ended. Returns True if the prior was stored."""
        ...


def _pooled(one: EmittedLength, other: EmittedLength) -> EmittedLength:
    """Mean over the rounds of both."""
    rounds = one.rounds + other.rounds
    if not rounds:
        return EmittedLength()
    return EmittedLength(one.mean + other.rounds / rounds * (other.mean - one.mean), rounds)


def _chances(ranks: RankCounts) -> RankCounts:
    """Chances a_d(r) [DEPTHS, RANKED + 1] that the d-th token of a round has rank r, if all before it were guessed
    right:

        a_d(r) = (c[d][r] + BACK_OFF * a_{d-1}(r)) / (sum_r c[d][r] + BACK_OFF)
    """
    chances = np.zeros_like(ranks)
    chances[0] = ranks[0] / ranks[0].sum()
    for depth in range(1, DEPTHS):
        counts = ranks[depth]
        chances[depth] = (counts + BACK_OFF * chances[depth - 1]) / (counts.sum() + BACK_OFF)
    return chances


def pack_prior(prior: Prior) -> bytes:
    """Write a prior as JSON, with arms as text."""
    content = {
        "format": FORMAT,
        "lengths": {str(arm): astuple(length) for arm, length in prior.lengths.items()},
        "ranks": {drafter: counts.round(3).tolist() for drafter, counts in prior.ranks.items()},
        "costs": {
            load: {
                "hops": {kind: astuple(cost) for kind, cost in costs.hops.items()},
                "ahead": astuple(costs.ahead),
                "opening": astuple(costs.opening),
                "draft": {str(arm): astuple(cost) for arm, cost in costs.draft.items()},
                "step": costs.step.sizes,
                "texts": costs.texts,
                "rounds": costs.rounds,
            }
            for load, costs in prior.costs.items()
        },
        "gains": prior.gains,
        "promises": astuple(prior.promises),
    }
    return json.dumps(content).encode()


def unpack_prior(blob: bytes) -> Prior | None:
    """Read what `pack_prior` wrote; None, so that it counts as missing, if malformed or with impossible values."""
    try:
        if len(blob) > MAX_PRIOR_BYTES:
            return None
        content = json.loads(blob)
        if content["format"] != FORMAT:
            return None
        if max(len(content["lengths"]), len(content["ranks"])) > MAX_ARMS:
            return None
        if max(len(content["costs"]), len(content["gains"])) > MAX_LOADS:
            return None
        return Prior(
            {Arm.parse(text): _length(*numbers) for text, numbers in content["lengths"].items()},
            {drafter: _ranks(counts) for drafter, counts in content["ranks"].items()},
            {_load(load): _costs(costs) for load, costs in content["costs"].items()},
            {_load(load): _number(gain) for load, gain in content["gains"].items()},
            _promises(*content["promises"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        return None


def _number(value: Any, least: float = 0.0, most: float = MOST) -> float:
    """The value as a float. Raises ValueError for anything but a number in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{value!r} is not a number from {least} to {most}")
    return float(value)


def _ranks(content: Any) -> RankCounts:
    counts = np.array(content, np.float64)
    if counts.shape != (DEPTHS, RANKED + 1) or not (np.isfinite(counts) & (counts >= 0) & (counts <= MOST)).all():
        raise ValueError("ranks: not a table of counts by depth and rank")
    return counts


def _length(mean: Any, rounds: Any) -> EmittedLength:
    # Tokens are bounded by MAX_ROWS and not by the arm's depth: proposals in the same tree may be deeper.
    return EmittedLength(_number(mean, 1.0, MAX_ROWS), _number(rounds))


def _promises(promised: Any, came: Any) -> Promises:
    return Promises(_number(promised), _number(came))


def _cost(us: Any, count: Any) -> Cost:
    return Cost(_number(us), int(_number(count)))


def _round_kind(kind: str) -> str:
    if kind not in ROUND_KINDS:
        raise ValueError(f"costs: {kind!r} is none of {ROUND_KINDS}")
    return kind


def _drafted(text: str) -> Arm:
    arm = Arm.parse(text)
    if not arm.drafted:
        raise ValueError(f"costs: {arm} has no draft")
    return arm


def _step(rows: int, weight: Any, us: Any) -> tuple[int, tuple[float, float]]:
    if not 1 <= rows <= MAX_STEP_ROWS or not weight or not us:
        raise ValueError(f"step: {rows} rows, weight {weight!r}, {us!r} us; all must be greater than 0")
    return rows, (_number(weight), _number(us))


def _load(text: str) -> int:
    load = int(text)
    if not 0 <= load < MAX_LOADS:
        raise ValueError(f"{load} is no load class")
    return load


def _costs(content: Mapping[str, Any]) -> Costs:
    if len(content["draft"]) > MAX_ARMS or len(content["step"]) > MOST_SIZES:
        raise ValueError("costs: too many arms or numbers of rows")
    return Costs(
        hops={_round_kind(kind): _cost(*cost) for kind, cost in content["hops"].items()},
        ahead=_cost(*content["ahead"]),
        opening=_cost(*content["opening"]),
        draft={_drafted(text): _cost(*cost) for text, cost in content["draft"].items()},
        step=StepTime(dict(_step(int(rows), *numbers) for rows, numbers in content["step"].items())),
        texts=_number(content["texts"], 1.0),
        rounds=int(_number(content["rounds"])),
    )
