"""`dendro bench stopping`: drafts of every stop rule, replayed from drafts that were recorded once.

At every position of known answers one chain and one tree are recorded, with their values, as large as any rule lets
them grow. What a rule drafts there is a part of them: the drafter's own growth (`drafter_service/grow.py`) runs again,
on the recorded values. SpecDec++ (section 5) judges a rule by two rates that no cost enters:

    discard rate = guesses discarded / tokens emitted    verification rate = verifications / tokens emitted
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dendro.shapes import CHANCE_DIGITS, MAX_ROWS, DynamicShape, LevelShape, MarginalShape, TreeShape, UntilShape
from dendro.step_sizes import StepSizes
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.bench.replay import STEP_ROWS, ReplayCosts, ReplayedAnswer, ReplayedRound, costed, rate, rates, run_fixed
from cluster.bench.traces import SIDE_BY_SIDE, SPARE, Trace, TracedAnswer, grown_trees, write_answers
from cluster.demo.kinds import KINDS
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, models, option, seed, temperatures
from cluster.measure.engine_times import measure_drafts, measure_steps
from cluster.measure.in_process import DRAFTER_DTYPE, drafter_of, verifier_of
from cluster.measure.measurement import Begin
from cluster.measure.options import KIND_PROMPTS
from cluster.measure.report import Row
from cluster.measure.statistics import paired_ratio
from cluster.measure.targets import COSTLY, target_config
from cluster.policies import Experience
from cluster.policies.experience import Concurrency
from cluster.policies.stopping import StopRule
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS
from drafter_service.grow import growth_of

CHAIN, TREE = "chain", "tree"
MOST = 12
"""The most guesses of a chain."""
K, STEPS, TOTAL = 3, 7, 31
"""Sizes of trees: rows of a level that get children, and children of each; levels; guesses that are kept."""
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""The fixed h of the sweep."""
DRAFTER = "mamba2"
PASSES = 2
"""Passes of the marginal rule over all answers: the first starts without any measurement, the second is judged."""


@dataclass(frozen=True, slots=True)
class StoppingOptions:
    prompts: int = option(KIND_PROMPTS, 9, 1, least=1)
    tokens: int = option("New tokens of every answer.", ANSWER_TOKENS, 24, least=1)
    repetitions: int = option("Measurements of each cost.", 15, 3, least=1)
    temperatures: tuple[float, ...] = temperatures()
    seed: int = seed()
    models: Path = models()


@dataclass(frozen=True, slots=True)
class Form:
    """Chains or trees: the largest, and those of fixed length."""

    name: str
    largest: DynamicShape
    recorded: TreeShape  # has every guess that a draft within `largest` may have
    lengths: tuple[TreeShape, ...]  # index + 1: levels
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


class StoppedTrace(Trace):
    """One drafter's drafts for one answer by a form's recorded shape, of which each rule's draft is a part."""

    def __init__(self, answer: TracedAnswer, form: Form, drafts: Sequence[DraftTree]) -> None:
        super().__init__(answer, ())
        self._form = form
        self._drafts = drafts
        self._parts: dict[tuple[TreeShape, int], tuple[DraftTree, int]] = {}

    def part(self, shape: TreeShape, base: int) -> tuple[DraftTree, int]:
        """The tree of a round, and the levels that are drafted for it."""
        if (shape, base) not in self._parts:
            self._parts[shape, base] = stopped(self._drafts[base - self.answer.begin], shape)
        return self._parts[shape, base]

    def recorded(self, shape: TreeShape, base: int) -> DraftTree:
        return self.part(shape, base)[0]

    def drafted_as(self, shape: TreeShape, base: int) -> TreeShape:
        """A fixed length itself; for a draft that stops, the tree grown level by level to as many levels."""
        return shape if shape in self._form.lengths else self._form.grown[self.part(shape, base)[1] - 1]


Replayed = list[ReplayedAnswer]


def run_by_rule(form: Form, experience: Experience, trace: StoppedTrace, costs: ReplayCosts) -> ReplayedAnswer:
    """Replay one answer by the marginal rule. The experience learns from it what a router's does."""
    arm, rule, rounds = Arm(DRAFTER, form.marginal), StopRule(experience), list[ReplayedRound]()
    base = trace.answer.begin
    with experience.concurrency.running() as running:
        while base < trace.answer.end:
            shape = rule.resolved(arm).shape
            draft_us, step_us = costs.draft_us(trace.drafted_as(shape, base)), costs.step_us(trace.rows(shape, base))
            tree = replace(trace.recorded(shape, base), draft_us=round(draft_us), texts=1)
            rule.drafted(tree)
            path = trace.path(shape, base)
            verdict = Verdict(
                tokens=trace.answer.ids[base : base + len(path)],
                path=path,
                ranks=tuple(tree.children(above).index(row) for above, row in pairwise(path)),
                finish=None,
                length=len(path),
                verify_us=round(step_us),
                step_rows=tree.rows,
            )
            experience.learn(arm, tree, verdict)
            running.begun()
            took_us = draft_us + step_us
            if rounds:  # the first round includes opening the text, as in the router
                experience.learn_time(arm, tree, verdict, took_us)
            rule.learn(verdict, experience.share_us(tree, verdict, took_us) if rounds else None)
            rounds.append(ReplayedRound(len(path), tree.guesses, took_us))
            base += len(path)
    return ReplayedAnswer(trace, tuple(rounds))


def run_marginal(form: Form, traces: Sequence[StoppedTrace], costs: ReplayCosts) -> list[Replayed]:
    """Every answer by the marginal rule, PASSES times, with one experience as in a router; a list per pass.

    The rule measures what it depends on in these rounds, as a router does: the rate, a level, a row, the acceptance.
    """
    experience = Experience(Concurrency(attends=True, sizes=StepSizes(STEP_ROWS)))
    return [[run_by_rule(form, experience, trace, costs) for trace in traces] for _ in range(PASSES)]


# Rows of the report
@dataclass(frozen=True, slots=True)
class Point:
    """A rule's rates over some answers."""

    rule: str
    discard: float
    verification: float


def point_of(rule: str, runs: Replayed) -> Point:
    rounds = [each for run in runs for each in run.rounds]
    emitted = sum(each.emitted for each in rounds)
    discarded = sum(each.guesses - (each.emitted - 1) for each in rounds)
    return Point(rule, discarded / emitted, len(rounds) / emitted)


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
    """Yield each fixed length, and its verification rate over that of the sweep's front at the same discard rate. Above
    1: the sweep verifies less often. Lengths that discard less or more than every h are left out, and so are the first
    and the last: drafts of h = 0 and h = 1 have them, too."""
    for point in fixed[1:-1]:
        at = front_at(sweep, point.discard)
        if at is not None:
            yield point, point.verification / at


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Every rule of one form on all answers of one temperature, in the order of the answers."""

    form: Form
    temperature: float
    kinds: tuple[str, ...]  # kind of each answer
    fixed: Mapping[str, Replayed]  # levels -> rounds
    swept: Mapping[str, Replayed]  # h -> rounds
    marginal: Replayed

    def of_kind(self, kind: str, runs: Mapping[str, Replayed]) -> dict[str, Replayed]:
        return {
            value: [run for own, run in zip(self.kinds, each, strict=True) if own == kind]
            for value, each in runs.items()
        }


def sweep_of(form: Form, temperature: float, traces: Sequence[StoppedTrace], costs: ReplayCosts) -> Sweep:
    """Replay every rule."""

    def fixed(shape: TreeShape) -> Replayed:
        return [run_fixed(shape, trace, costs) for trace in traces]

    return Sweep(
        form,
        temperature,
        tuple(trace.answer.kind for trace in traces),
        {str(levels): fixed(shape) for levels, shape in enumerate(form.lengths, 1)},
        {f"{h:g}": fixed(form.until(h)) for h in THRESHOLDS},
        run_marginal(form, traces, costs)[-1],
    )


def rule_rows(sweep: Sweep) -> Iterator[Row]:
    """One row for each kind and rule: its rates, and the tokens a second that the measured costs predict."""
    for kind in dict.fromkeys(sweep.kinds):
        rules = (("fixed length", sweep.fixed), ("fixed h", sweep.swept), ("marginal rule", {"auto": sweep.marginal}))
        for rule, runs in rules:
            for value, mine in sweep.of_kind(kind, runs).items():
                point = point_of(value, mine)
                yield {
                    "kind": kind,
                    "temperature": sweep.temperature,
                    "form": sweep.form.name,
                    "rule": rule,
                    "value": value,
                    "discard_rate": round(point.discard, 4),
                    "verification_rate": round(point.verification, 4),
                    "tokens_per_second": round(rate(mine), 3),
                }


def comparison_rows(sweep: Sweep) -> Iterator[Row]:
    """One row for each kind: the front of the sweep beside every fixed length, and the marginal rule beside the best
    h and the best length in hindsight."""
    for kind in dict.fromkeys(sweep.kinds):
        lengths, swept = sweep.of_kind(kind, sweep.fixed), sweep.of_kind(kind, sweep.swept)
        marginal = sweep.of_kind(kind, {"": sweep.marginal})[""]
        fixed, front = ([point_of(value, runs) for value, runs in each.items()] for each in (lengths, swept))
        beside = list(outside(fixed, front))
        closest = min(beside, key=lambda found: found[1])
        best_h, best_length = (max(runs, key=lambda value: rate(runs[value])) for runs in (swept, lengths))
        yield {
            "kind": kind,
            "temperature": sweep.temperature,
            "form": sweep.form.name,
            "front_over_closest": round(closest[1], 4),
            "closest_length": closest[0].rule,
            "lengths_compared": len(beside),
            "best_h": best_h,
            "best_h_tokens_per_second": round(rate(swept[best_h]), 3),
            "best_length": best_length,
            "best_length_tokens_per_second": round(rate(lengths[best_length]), 3),
            "marginal_tokens_per_second": round(rate(marginal), 3),
            "marginal_over_best_h": round(rate(marginal) / rate(swept[best_h]), 4),
            "marginal_by_prompt": paired_ratio(rates(marginal), rates(swept[best_h])).as_json(),
        }


def cost_rows(costs: ReplayCosts, temperature: float) -> Iterator[Row]:
    """Medians in milliseconds: drafts by levels, steps by rows."""
    lines: dict[str, dict[int, float]] = {"verifier step by rows": costs.step}
    for form in FORMS:
        for how, shapes in (("fixed length", form.lengths), ("level by level", form.grown)):
            drafts = {levels: costs.draft_us(shape) for levels, shape in enumerate(shapes, 1)}
            lines[f"{form.name}, {how}, by levels"] = drafts
    for what, us in lines.items():
        yield {
            "what": what,
            "temperature": temperature,
            "ms": {str(count): round(each / 1e3, 3) for count, each in us.items()},
        }


async def measure(options: StoppingOptions, begin: Begin) -> dict[str, Any]:
    config = target_config(options.models, COSTLY)
    (target,) = config.targets.values()
    rows, compared, table = list[Row](), list[Row](), list[Row]()
    texts = options.prompts * len(KINDS)
    length = PROMPT_TOKENS + options.tokens + 2 * SPARE + MAX_ROWS
    async with (
        verifier_of(COSTLY, target, length, texts) as verifier,
        drafter_of(options.models / DRAFTER, SIDE_BY_SIDE) as drafter,
    ):
        for temperature in options.temperatures:
            name = f"temperature {temperature:g}"
            step = begin(f"answers and costs, {name}", 2 * (options.repetitions + 1))
            answers = await write_answers(
                verifier, options.models, options.prompts, options.tokens, temperature, options.seed
            )
            ids = answers[0].ids[:PROMPT_TOKENS]
            steps = await measure_steps(verifier, ids, temperature, STEP_ROWS, options.repetitions, step)
            wanted = [shape for form in FORMS for shape in (*form.lengths, *form.grown)]
            drafted = await measure_drafts(drafter, ids, temperature, costed(wanted), options.repetitions, step)
            costs = ReplayCosts(steps, drafted)
            step = begin(f"drafts, {name}", texts * options.tokens)
            grown = await grown_trees(drafter, answers, [form.recorded for form in FORMS], step)
            for form in FORMS:
                drafts = [trees[form.recorded] for trees in grown]
                traces = [StoppedTrace(answer, form, own) for answer, own in zip(answers, drafts, strict=True)]
                sweep = sweep_of(form, temperature, traces, costs)
                rows += rule_rows(sweep)
                compared += comparison_rows(sweep)
            table += cost_rows(costs, temperature)
    return {"plan": {}, "rows": rows, "compared": compared, "costs": table}


STOPPING = Bench(
    "stopping",
    "Compare when drafts stop: after a fixed number of levels, at a fixed chance h that a guess is rejected "
    "(SpecDec++), or by the marginal rule of until(auto,...), for chains and for trees, on code, prose and edits. One "
    "chain and one tree are drafted at every position of the target's answers; every rule is then replayed on these "
    "drafts.",
    "Under a minute: one prompt of each kind, short answers.",
    StoppingOptions,
    measure,
    facts=(
        f"Drafts of {DRAFTER} in {DRAFTER_DTYPE}, after prompts of {PROMPT_TOKENS} tokens: "
        + " and ".join(f"{form.name}s within {form.marginal}" for form in FORMS),
        "Discard rate: guesses discarded per emitted token; verification rate: verifications per emitted token. The "
        "marginal rule is judged in its second pass over the answers",
        "Tokens per second are predicted: tokens over the round times of measured costs, without router, hops and "
        "queues. A chain of fixed length is drafted in one call for all levels, where the drafter is fused; a draft "
        "that may stop takes a call a level",
    ),
    tables=(
        ReportTable(
            "Fixed lengths, the sweep of h and the marginal rule",
            "compared",
            "form; kind; T = temperature:g; closest length's verifications over the sweep's = front_over_closest:.3f; "
            "closest length = closest_length; best h = best_h; tokens/s = best_h_tokens_per_second:.1f; best length = "
            "best_length; tokens/s = best_length_tokens_per_second:.1f; marginal rule, tokens/s = "
            "marginal_tokens_per_second:.1f; over the best h = marginal_over_best_h:.3f; by prompt = "
            "marginal_by_prompt:.3f",
        ),
        ReportTable(
            "Every rule: {form}s, {kind}, temperature {temperature:g}",
            "rows",
            "rule; value; discard rate = discard_rate:.3f; verification rate = verification_rate:.3f; tokens/s = "
            "tokens_per_second:.1f",
        ),
        ReportTable("Costs in ms, {what}", "costs", "T = temperature:g; * = ms/*:.2f"),
    ),
    aims=(
        Aim(
            "verifications of the closest fixed length over the sweep's, {form}, {kind}, temperature {temperature:g}",
            "compared",
            "front_over_closest",
            least=1.0,
            why="closest is length {closest_length}; {lengths_compared} lengths were compared",
        ),
        Aim(
            "marginal rule over the best h, {form}, {kind}, temperature {temperature:g}",
            "compared",
            "marginal_over_best_h",
            least=0.99,
            why="the best h is {best_h}",
        ),
    ),
    plots=(
        Plot(
            "rows",
            "discard rate = discard_rate",
            "verification rate = verification_rate",
            line="{rule}",
            panel="{form}s, {kind}, temperature {temperature:g}",
        ),
    ),
    code=("cluster/policies/stopping.py", "drafter_service/grow.py"),
)
bench_stopping = STOPPING.command()
