"""`dendro bench stopping`: drafts of every stop rule, replayed from drafts that were recorded once.

At every position of known answers one chain and one tree are recorded, with their values, as large as any rule lets
them grow. What a rule drafts there is a part of them: the drafter's own growth (`drafter_service/grow.py`) runs again,
on the recorded values. SpecDec++ (section 5) judges a rule by two rates that no cost enters:

    discard rate = guesses discarded / tokens emitted    verification rate = verifications / tokens emitted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dendro.shapes import CHANCE_DIGITS, DynamicShape, LevelShape, MarginalShape, TreeShape, UntilShape
from dendro.step_sizes import StepSizes
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.bench.costs import STEP_ROWS, ReplayCosts
from cluster.bench.traces import TracedAnswer, walk
from cluster.measure.report import Row
from cluster.measure.statistics import paired_ratio
from cluster.policies import Experience
from cluster.policies.experience import Concurrency
from cluster.policies.stopping import StopRule
from drafter_service.grow import growth_of

CHAIN, TREE = "chain", "tree"
MOST = 12
"""The most guesses of a chain."""
K, STEPS, TOTAL = 3, 7, 31
"""Of trees: rows of a level that get children, and children of each; levels; guesses that are kept."""
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""The fixed h of the sweep."""
DRAFTER = "drafter"
MARGINAL = "auto"
PASSES = 2
"""Passes of the marginal rule over all answers, as of policies: the first starts without any measurement, the second is
judged."""


@dataclass(frozen=True, slots=True)
class Form:
    """Chains or trees: the largest, and those of fixed length."""

    name: str
    largest: DynamicShape
    recorded: TreeShape  # has every guess that a draft within `largest` may have
    lengths: tuple[TreeShape, ...]  # by levels, from 1 on
    grown: tuple[DynamicShape, ...]  # drafted as `until` is, level by level, with so many levels, from 1 on

    def until(self, h: float) -> UntilShape:
        """The sweep's shape. In trees it leaves out guesses that are reached with a chance of at most 1 - h: else the
        largest tree's number of guesses, not h, would decide how many are discarded."""
        return UntilShape(self.largest, h, 0.0 if self.largest.k == 1 else round(1 - h, CHANCE_DIGITS))

    @property
    def marginal(self) -> MarginalShape:
        return MarginalShape(self.largest)


def _candidates(levels: int) -> int:
    return K + (levels - 1) * K * K


FORMS = (
    Form(
        CHAIN,
        DynamicShape(1, MOST, MOST),
        LevelShape((1,) * MOST),
        tuple(LevelShape((1,) * length) for length in range(1, MOST + 1)),
        tuple(DynamicShape(1, length, length) for length in range(1, MOST + 1)),
    ),
    Form(
        TREE,
        DynamicShape(K, STEPS, TOTAL),
        DynamicShape(K, STEPS, _candidates(STEPS)),
        tuple(DynamicShape(K, levels, min(_candidates(levels), TOTAL)) for levels in range(1, STEPS + 1)),
        tuple(DynamicShape(K, levels, _candidates(levels)) for levels in range(1, STEPS + 1)),
    ),
)


def stopped(recorded: DraftTree, shape: TreeShape) -> tuple[DraftTree, int]:
    """The tree that a drafter grows by this shape where it would grow `recorded` by a larger one of the same k, and the
    number of levels that it drafts for it.

    Values are float32, as sent; the drafter compares its own, in float64, with the shape's thresholds. Raises
    ValueError where a row that gets children has none in `recorded`.
    """
    growth, rows = growth_of(int(recorded.tokens[0]), shape), [0]
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(recorded.parents[1:].tolist(), 1):
        children.setdefault(parent, []).append(row)
    tokens, values = recorded.tokens.tolist(), recorded.values.tolist()
    while not growth.finished:
        expanded = [rows[row] for row in growth.frontier]
        if not all(row in children for row in expanded):
            raise ValueError(f"recorded: a row of it without children gets some in {shape}")
        below = [children[row] for row in expanded]
        chances = [[values[child] - values[row] for child in those] for row, those in zip(expanded, below, strict=True)]
        first = growth.processed
        growth.extend([[tokens[child] for child in those] for those in below], chances, chances)
        for those, count in zip(below, growth.children[first:], strict=True):
            rows += those[:count]
    return DraftTree(*growth.arrays()), growth.level


@dataclass(frozen=True, slots=True)
class StoppedRound:
    """One round of a replay."""

    emitted: int
    guesses: int
    levels: int  # that were drafted
    took_us: float


@dataclass(slots=True, eq=False)
class RecordedDrafts:
    """One drafter's drafts at every position of one answer, by the form's recorded shape."""

    answer: TracedAnswer
    trees: Mapping[TreeShape, Sequence[DraftTree]]
    _parts: dict[tuple[TreeShape, int], tuple[DraftTree, int]] = field(default_factory=dict)

    def draft(self, form: Form, shape: TreeShape, base: int) -> tuple[DraftTree, int]:
        """The tree of a round, and the levels that are drafted for it."""
        if (shape, base) not in self._parts:
            self._parts[shape, base] = stopped(self.trees[form.recorded][base - self.answer.begin], shape)
        return self._parts[shape, base]

    def emitted(self, tree: DraftTree, base: int) -> int:
        return len(walk(tree, self.answer.ids[base:]))


def draft_us(costs: ReplayCosts, form: Form, shape: TreeShape, levels: int) -> float:
    """A draft of a fixed length, or one that stopped after so many levels."""
    return costs.draft_us(shape if shape in form.lengths else form.grown[levels - 1])


Replayed = list[list[StoppedRound]]
"""By answer, its rounds."""


def run_shape(form: Form, shape: TreeShape, drafts: Sequence[RecordedDrafts], costs: ReplayCosts) -> Replayed:
    """Every round of every answer by the same shape."""
    return [_rounds(each, lambda base: shape, form, costs) for each in drafts]


def new_experience() -> Experience:
    """Of a target that is a Transformer, as that of these answers is."""
    return Experience(Concurrency(attends=True, sizes=StepSizes(STEP_ROWS)))


def run_marginal(
    form: Form, drafts: Sequence[RecordedDrafts], costs: ReplayCosts, temperature: float
) -> list[Replayed]:
    """Every answer by the marginal rule, PASSES times, with one experience as in a router; a list per pass.

    The rule measures what it depends on in these rounds, as a router does: the rate, a level, a row, the acceptance.
    """
    experience = new_experience()
    return [[_by_rule(each, form, costs, experience, temperature) for each in drafts] for _ in range(PASSES)]


class MarginalRounds:
    """One answer's rounds by the marginal rule, which learns from them what a router's would."""

    def __init__(self, shape: MarginalShape, experience: Experience, temperature: float) -> None:
        self._arm = Arm(DRAFTER, shape)
        self._rule = StopRule(experience)
        self._experience = experience
        self._temperature = temperature

    def begin(self) -> TreeShape:
        """The shape of the next round."""
        return self._rule.resolved(self._arm).shape

    def learn(self, tree: DraftTree, verdict: Verdict, took_us: float) -> None:
        """Record a round; the tree has the time of its draft."""
        self._rule.drafted(tree)
        self._experience.learn(self._arm, tree, verdict)
        self._experience.learn_time(self._arm, tree, verdict, took_us)
        self._rule.learn(verdict, self._experience.share_us(tree, verdict, took_us))


def _by_rule(
    drafts: RecordedDrafts, form: Form, costs: ReplayCosts, experience: Experience, temperature: float
) -> list[StoppedRound]:
    rounds = MarginalRounds(form.marginal, experience, temperature)

    def learn(tree: DraftTree, emitted: int, drafted_us: float, step_us: float) -> None:
        verdict = Verdict(
            tokens=(0,) * emitted,
            path=tuple(range(emitted)),
            ranks=(0,) * (emitted - 1),
            finish=None,
            length=emitted,
            verify_us=round(step_us),
            step_rows=tree.rows,
        )
        rounds.learn(replace(tree, draft_us=round(drafted_us)), verdict, drafted_us + step_us)

    with experience.concurrency.running() as running:
        running.begun()
        return _rounds(drafts, lambda base: rounds.begin(), form, costs, learn)


def _rounds(
    drafts: RecordedDrafts,
    shape_at: Callable[[int], TreeShape],
    form: Form,
    costs: ReplayCosts,
    learn: Callable[[DraftTree, int, float, float], None] = lambda *of_round: None,
) -> list[StoppedRound]:
    found, base = list[StoppedRound](), drafts.answer.begin
    while base < drafts.answer.end:
        shape = shape_at(base)
        tree, levels = drafts.draft(form, shape, base)
        emitted, drafted_us = drafts.emitted(tree, base), draft_us(costs, form, shape, levels)
        step_us = costs.step_us(tree.rows)
        found.append(StoppedRound(emitted, tree.guesses, levels, drafted_us + step_us))
        learn(tree, emitted, drafted_us, step_us)
        base += emitted
    return found


# Rows of the report
@dataclass(frozen=True, slots=True)
class Point:
    """A rule's rates over some answers."""

    rule: str
    discard: float
    verification: float


def point_of(rule: str, runs: Replayed) -> Point:
    rounds = [each for run in runs for each in run]
    emitted = sum(each.emitted for each in rounds)
    discarded = sum(each.guesses - (each.emitted - 1) for each in rounds)
    return Point(rule, discarded / emitted, len(rounds) / emitted)


def rate_of(runs: Replayed) -> float:
    """Tokens a second over all rounds."""
    rounds = [each for run in runs for each in run]
    return 1e6 * sum(each.emitted for each in rounds) / sum(each.took_us for each in rounds)


def rates_of(runs: Replayed) -> dict[tuple[int, int], float]:
    """Tokens a second of each answer, for `paired_ratio`."""
    return {(index, 0): rate_of([run]) for index, run in enumerate(runs)}


def front_at(front: Sequence[Point], discard: float) -> float | None:
    """The least verification rate at this discard rate between any two of these points: rounds may follow two rules by
    turns. None where all points discard more, or all less."""
    left = [point for point in front if point.discard <= discard]
    right = [point for point in front if point.discard >= discard]
    between = (
        one.verification
        + (discard - one.discard) / ((other.discard - one.discard) or 1.0) * (other.verification - one.verification)
        for one in left
        for other in right
    )
    return min(between, default=None)


def outside(fixed: Sequence[Point], sweep: Sequence[Point]) -> Iterator[tuple[Point, float]]:
    """Of each fixed length, its verification rate over that of the sweep's front at the same discard rate. Above 1: the
    sweep verifies less often. Lengths that discard less or more than every h are left out, and so are the first and the
    last: drafts of h = 0 and h = 1 have them, too."""
    for point in fixed[1:-1]:
        at = front_at(sweep, point.discard)
        if at is not None:
            yield point, point.verification / at


@dataclass(frozen=True, slots=True, eq=False)
class StoppingRecord:
    """All measurements; the report is computed from them."""

    drafts: Mapping[float, Sequence[RecordedDrafts]]  # by temperature
    costs: Mapping[float, ReplayCosts]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.answer.kind for those in self.drafts.values() for each in those))


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Every rule of one form on all answers of one temperature, in the order of the answers."""

    form: Form
    temperature: float
    kinds: tuple[str, ...]  # of each answer
    fixed: Mapping[TreeShape, Replayed]  # by length
    swept: Mapping[float, Replayed]  # by h
    marginal: Replayed

    def of_kind(self, kind: str, runs: Replayed) -> Replayed:
        return [run for own, run in zip(self.kinds, runs, strict=True) if own == kind]


def sweeps_of(recorded: StoppingRecord, step: Callable[[], None]) -> Iterator[Sweep]:
    """Replay every rule."""
    for temperature, drafts in recorded.drafts.items():
        costs = recorded.costs[temperature]
        for form in FORMS:
            fixed = {shape: run_shape(form, shape, drafts, costs) for shape in form.lengths}
            swept = {h: run_shape(form, form.until(h), drafts, costs) for h in THRESHOLDS}
            marginal = run_marginal(form, drafts, costs, temperature)[-1]
            yield Sweep(form, temperature, tuple(each.answer.kind for each in drafts), fixed, swept, marginal)
            step()


def rule_rows(sweep: Sweep) -> Iterator[Row]:
    """One row for each kind and rule: its rates, and the tokens a second that the measured costs predict."""
    for kind in dict.fromkeys(sweep.kinds):
        rules: list[tuple[str, str, Replayed]] = [
            *(("length", str(levels), runs) for levels, runs in enumerate(sweep.fixed.values(), 1)),
            *(("h", f"{h:g}", runs) for h, runs in sweep.swept.items()),
            ("marginal", MARGINAL, sweep.marginal),
        ]
        for rule, value, runs in rules:
            mine = sweep.of_kind(kind, runs)
            point, rounds = point_of(value, mine), [each for run in mine for each in run]
            yield {
                "kind": kind,
                "temperature": sweep.temperature,
                "form": sweep.form.name,
                "rule": rule,
                "value": value,
                "discard_rate": round(point.discard, 4),
                "verification_rate": round(point.verification, 4),
                "guesses_per_round": round(sum(each.guesses for each in rounds) / len(rounds), 3),
                "tokens_per_second": round(rate_of(mine), 3),
            }


def best_h(sweep: Sweep, kind: str) -> float:
    """The h of the greatest rate on these answers."""
    return max(sweep.swept, key=lambda h: rate_of(sweep.of_kind(kind, sweep.swept[h])))


def comparison_rows(sweep: Sweep) -> Iterator[Row]:
    """One row for each kind: the front of the sweep beside every fixed length, and the marginal rule beside the best
    h and the best length in hindsight."""
    for kind in dict.fromkeys(sweep.kinds):
        fixed = [point_of(str(n), sweep.of_kind(kind, runs)) for n, runs in enumerate(sweep.fixed.values(), 1)]
        swept = [point_of(f"{h:g}", sweep.of_kind(kind, runs)) for h, runs in sweep.swept.items()]
        beside = list(outside(fixed, swept))
        closest = min(beside, key=lambda found: found[1])
        best = best_h(sweep, kind)
        lengths = {n: sweep.of_kind(kind, runs) for n, runs in enumerate(sweep.fixed.values(), 1)}
        length = max(lengths, key=lambda n: rate_of(lengths[n]))
        marginal, by_h = sweep.of_kind(kind, sweep.marginal), sweep.of_kind(kind, sweep.swept[best])
        yield {
            "kind": kind,
            "temperature": sweep.temperature,
            "form": sweep.form.name,
            "front_over_closest": round(closest[1], 4),
            "closest_length": closest[0].rule,
            "lengths_compared": len(beside),
            "best_h": best,
            "best_h_tokens_per_second": round(rate_of(by_h), 3),
            "best_length": length,
            "best_length_tokens_per_second": round(rate_of(lengths[length]), 3),
            "marginal_tokens_per_second": round(rate_of(marginal), 3),
            "marginal_over_best_h": round(rate_of(marginal) / rate_of(by_h), 4),
            "marginal_by_prompt": paired_ratio(rates_of(marginal), rates_of(by_h)).as_json(),
            "best_h_over_best_length": round(rate_of(by_h) / rate_of(lengths[length]), 4),
        }


def cost_rows(recorded: StoppingRecord) -> Iterator[Row]:
    """Medians in milliseconds: drafts by levels, steps by rows."""
    for temperature, costs in recorded.costs.items():
        for form in FORMS:
            for what, shapes in (("fixed length", form.lengths), ("level by level", form.grown)):
                for levels, shape in enumerate(shapes, 1):
                    yield {
                        "what": f"{form.name}, {what}",
                        "temperature": temperature,
                        "count": levels,
                        "ms": round(costs.draft_us(shape) / 1e3, 3),
                    }
        for rows, us in costs.step.items():
            yield {"what": "verifier step", "temperature": temperature, "count": rows, "ms": round(us / 1e3, 3)}
