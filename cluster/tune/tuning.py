"""The plan of a tuning: the measurements in their order, and the report's rows.

No tree is evaluated on the prompts that it was chosen with. On the *learned* prompts the drafter's ranks of the
target's tokens are counted, and on some of these shapes are timed to fit the costs. On the *held-out* prompts the
configured arms and the trees found are run in turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from dendro.errors import BadRequest
from dendro.shapes import OFF, LevelShape, NodeShape, TreeShape
from dendro.text import Sampling

from cluster.arms import OFF_ARM, Arm
from cluster.drafter_figures import accepted
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.measure.statistics import Estimate, median_estimate, paired_ratio
from cluster.policies.sequoia import Accept, best_tree, expected_tokens
from cluster.policies.step_time import TargetSteps
from cluster.tune import leviathan
from cluster.tune.measuring import (
    LinearCosts,
    Ranker,
    RunAnswer,
    Strangers,
    Timed,
    costs_of,
    replayed,
    whole_rounds,
)

PROBES = (LevelShape((1,) * 8), LevelShape((8,)), LevelShape((6, 3, 2)))
"""Shapes timed beside the arms: deep, wide and large, so that the fitted costs cover the sizes of the search."""
WARM_TOKENS = 8
"""Tokens of the warm-up answers, which are not timed."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits of the trees that are searched."""

    max_rows: int
    max_depth: int
    max_children: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of the prompts, by their use."""

    source: str
    learned: tuple[tuple[int, ...], ...]
    timed: int  # the first so many of the learned ones
    held_out: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TunePlan:
    """The measurements of one target and one of its drafters."""

    target: str
    drafter: str
    arms: tuple[TreeShape, ...]  # the drafter's configured shapes, and `off` if that is configured
    prompts: Prompts
    tokens: int  # most tokens of an answer
    temperatures: tuple[float, ...]
    probes: tuple[LevelShape, ...]  # timed beside the arms
    limits: SearchLimits
    drafter_share: float | None  # parameters of the drafter over the target's; None: unknown
    seed: int

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        return tuple(arm for arm in self.arms if not arm.off)

    @property
    def timed(self) -> tuple[TreeShape, ...]:
        """Shapes timed to fit the costs: `off`, arms of fixed form, and probes."""
        fixed = [arm for arm in self.trees if isinstance(arm, LevelShape)]
        return tuple(dict.fromkeys([OFF, *fixed, *self.probes]))

    def sampling(self, temperature: float, prompt: Sequence[int]) -> Sampling:
        """A prompt has one seed, as its tokens must be the same under every shape."""
        return Sampling(temperature=temperature, seed=random.Random(f"{self.seed}/{prompt}").getrandbits(32))


@dataclass(slots=True)
class Tuned:
    """The results of one drafter at one temperature."""

    drafter: str
    temperature: float
    accept: Accept
    costs: LinearCosts
    found: tuple[TreeShape, ...]  # the best chain and the best tree
    traces: list[list[int]]  # traces of ranks on the held-out prompts
    first_rank: float  # share of tokens that the drafter ranks first, on the prompts learned from
    answers: dict[TreeShape, list[RunAnswer]] = field(default_factory=dict)  # answers to the held-out prompts, by shape
    differences: list[str] = field(default_factory=list)

    def over_off(self, shape: TreeShape) -> Estimate | None:
        """Ratio of the shape's tokens a second to those of `off`, paired by held-out prompt; None if no answer had two
        rounds."""
        rates, plain = (
            {
                (number, 0): answer.tokens_per_second
                for number, answer in enumerate(self.answers[each])
                if answer.tokens_per_second
            }
            for each in (shape, OFF)
        )
        both = rates.keys() & plain.keys()
        return paired_ratio({key: rates[key] for key in both}, {key: plain[key] for key in both}) if both else None

    def best(self, shapes: Iterable[TreeShape]) -> tuple[TreeShape, Estimate] | None:
        """The shape among these that was fastest over `off`; None if none was measured."""
        measured = [(shape, over) for shape in shapes if not shape.off and (over := self.over_off(shape)) is not None]
        return max(measured, key=lambda each: each[1].median, default=None)

    @property
    def paying(self) -> tuple[TreeShape, ...]:
        """The trees found that were not slower than `off`; and the configured tree that was faster than all of them."""
        best = self.best(self.answers)
        trees = dict.fromkeys([*self.found, *([best[0]] if best is not None else [])])
        return tuple(shape for shape in trees if (over := self.over_off(shape)) is not None and over.median >= 1)


class Tuning:
    """Runs a plan on a running cluster."""

    def __init__(self, plan: TunePlan, strangers: Strangers, ranker: Ranker, begin: Begin) -> None:
        self.plan = plan
        self._strangers = strangers
        self._ranker = ranker
        self._begin = begin

    async def at(self, temperature: float) -> Tuned:
        """Count ranks, time shapes, search the best trees, and run them."""
        plan, prompts = self.plan, self.plan.prompts
        name = f"{plan.drafter}, temperature {temperature:g}"
        step = self._begin(f"{name}: the target's answers", len(prompts.learned) + len(prompts.held_out))
        learned = [await self._trace(prompt, temperature, step) for prompt in prompts.learned]
        held_out = [await self._trace(prompt, temperature, step) for prompt in prompts.held_out]
        if not any(learned):
            raise BadRequest("prompts", f"the target ends its answer to each of {len(learned)} with no token")
        costs = await self._costs(temperature, name)
        limits = plan.limits
        accept = accepted(learned, limits.max_depth, limits.max_children)
        found = [
            as_arm(
                best_tree(
                    accept,
                    costs.level,
                    costs.step,
                    fixed_us=costs.fixed_us,
                    max_rows=limits.max_rows,
                    max_depth=limits.max_depth,
                    max_children=children,
                ).shape
            )
            for children in dict.fromkeys((1, limits.max_children))
        ]
        flat = [rank for trace in learned for rank in trace]
        first_rank = flat.count(0) / len(flat)
        tuned = Tuned(plan.drafter, temperature, accept, costs, tuple(dict.fromkeys(found)), held_out, first_rank)
        await self._run(tuned, name)
        return tuned

    async def _answer(
        self, prompt: Sequence[int], temperature: float, shape: TreeShape, most: int | None = None
    ) -> RunAnswer:
        plan = self.plan
        tokens = min(plan.tokens, most or plan.tokens)
        sampling = plan.sampling(temperature, prompt)
        speculation = Arm.of(plan.drafter, shape).name(names_drafter=True)
        return await self._strangers.answer(plan.target, prompt, sampling, tokens, speculation)

    async def _trace(self, prompt: Sequence[int], temperature: float, step: Step) -> list[int]:
        answer = await self._answer(prompt, temperature, OFF)
        step()
        return self._ranker.ranks(prompt, answer.tokens, self.plan.sampling(temperature, prompt))

    async def _costs(self, temperature: float, name: str) -> LinearCosts:
        plan = self.plan
        prompts = plan.prompts.learned[: plan.prompts.timed]
        step = self._begin(f"{name}: the costs of rounds", len(plan.timed) * (1 + len(prompts)))
        answers: dict[TreeShape, list[RunAnswer]] = {shape: [] for shape in plan.timed}
        for shape in plan.timed:  # warm-up, as the first round of a size is slower
            await self._answer(prompts[0], temperature, shape, WARM_TOKENS)
            step()
        for prompt in prompts:
            for shape in self._shuffled(plan.timed, temperature, prompt):
                answers[shape].append(await self._answer(prompt, temperature, shape))
                step()
        timed = {shape: Timed.of(of_shape) for shape, of_shape in answers.items()}
        target = TargetSteps(next(each.speculation.step_sizes for of_shape in answers.values() for each in of_shape))
        return costs_of({shape: each for shape, each in timed.items() if each is not None}, target)

    async def _run(self, tuned: Tuned, name: str) -> None:
        """Run all shapes on each held-out prompt, and note answers that differ from that of `off`."""
        shapes = tuple(dict.fromkeys([OFF, *self.plan.arms, *tuned.found]))
        step = self._begin(f"{name}: runs of the trees", len(shapes) * len(self.plan.prompts.held_out))
        tuned.answers = {shape: [] for shape in shapes}
        for number, prompt in enumerate(self.plan.prompts.held_out):
            for shape in self._shuffled(shapes, tuned.temperature, prompt):
                tuned.answers[shape].append(await self._answer(prompt, tuned.temperature, shape))
                step()
            plain = tuned.answers[OFF][-1].tokens
            for shape in shapes:
                if tuned.answers[shape][-1].tokens != plain:
                    tuned.differences.append(f"{shape}, {name}, held-out prompt {number + 1}: other tokens than `off`")

    def _shuffled(self, shapes: Sequence[TreeShape], temperature: float, prompt: Sequence[int]) -> list[TreeShape]:
        """The shapes in a seeded random order, so that no shape is always run after the same other shape."""
        order = list(shapes)
        random.Random(f"{self.plan.seed}/{temperature}/{prompt}").shuffle(order)
        return order


def as_arm(shape: NodeShape) -> TreeShape:
    """Convert a tree to a `LevelShape` if all rows of a level have the same number of children; else leave it.

    >>> str(as_arm(NodeShape((2, 1, 1)))), str(as_arm(NodeShape((2, 1))))
    ('(2,1)', 'nodes(2,1)')
    """
    widths, start, stop = [], 0, 1
    counts = shape.children + (0,) * (shape.rows - len(shape.children))
    while below := sum(counts[start:stop]):
        if len(set(counts[start:stop])) > 1:
            return shape
        widths.append(counts[start])
        start, stop = stop, stop + below
    return LevelShape(tuple(widths))


def is_chain(shape: TreeShape) -> bool:
    return isinstance(shape, LevelShape) and set(shape.widths) == {1}


def rows_of(plan: TunePlan, tuned: Tuned) -> list[Row]:
    """One row for each shape that was run: predicted from the learned prompts, replayed and measured on the others. The
    fastest by prediction is first."""
    rows = []
    for shape, answers in tuned.answers.items():
        row: Row = {
            "drafter": tuned.drafter,
            "temperature": tuned.temperature,
            "name": str(shape),
            "found": shape in tuned.found,
            "configured": shape in plan.arms,
            "rows": shape.rows,
            "depth": shape.depth,
            "predicted": None,
            "replayed_emitted_per_round": None,
            "measured": _measured(shape, answers),
            "over_off": None,
            "pays": shape in tuned.paying,
        }
        if row["measured"] is not None and (over := tuned.over_off(shape)) is not None:
            row["over_off"] = over.as_json()
        if isinstance(shape, LevelShape | NodeShape) and shape.width <= plan.limits.max_children:
            emitted, round_us = expected_tokens(shape, tuned.accept), tuned.costs.round_us(shape)
            row["predicted"] = {
                "emitted_per_round": round(emitted, 4),
                "round_ms": round(round_us / 1e3, 4),
                "tokens_per_second": round(1e6 * emitted / round_us, 3),
            }
            again = replayed(tuned.traces, shape)
            row["replayed_emitted_per_round"] = None if again is None else round(again, 4)
        row["marks"] = ", ".join(mark for mark, of_it in (("found", row["found"]), ("pays", row["pays"])) if of_it)
        rows.append(row)
    return sorted(rows, key=lambda row: -(row["predicted"] or {}).get("tokens_per_second", 0))


def _measured(shape: TreeShape, answers: Sequence[RunAnswer]) -> Row | None:
    """Measured values; None if the drafter grew no tree of this shape, or no answer had a whole or a second round."""
    drafted = sum(answer.speculation.drafted_tokens for answer in answers)
    lengths = [length for answer in answers for length in whole_rounds(answer, shape)]
    timed = Timed.of(answers)
    if timed is None or not lengths or (not shape.off and not drafted):
        return None
    rounds = sum(answer.speculation.rounds for answer in answers)
    return {
        "emitted_per_round": round(fmean(lengths), 4),
        "rounds": len(lengths),
        "round_ms": round(timed.round_us / 1e3, 4),
        "draft_ms": round(timed.draft_us / 1e3, 4),
        "verify_ms": round(timed.verify_us / 1e3, 4),
        "late_share": round(sum(answer.speculation.late_drafts for answer in answers) / rounds, 4),
        "tokens_per_second": median_estimate(
            [answer.tokens_per_second for answer in answers if answer.round_us is not None]
        ).as_json(),
    }


def verdicts_of(tuned: Sequence[Tuned]) -> list[Row]:
    """One row for each drafter and temperature: the fastest tree on the held-out prompts, and whether it pays."""
    rows = []
    for each in tuned:
        best = each.best(each.answers)
        row: Row = {"drafter": each.drafter, "temperature": each.temperature, "best": None, "over_off": None}
        if best is not None:
            row |= {"best": str(best[0]), "over_off": best[1].as_json()}
        rows.append(row | {"pays": bool(each.paying), "paying": [str(shape) for shape in each.paying]})
    return rows


def chains_of(plan: TunePlan, tuned: Tuned) -> list[Row]:
    """One row for each chain that was run: Leviathan's formulas beside the measurement."""
    acceptance, cost = tuned.first_rank, tuned.costs.cost_ratio
    rows = []
    for shape, answers in tuned.answers.items():
        if not is_chain(shape):
            continue
        guesses, measured = shape.depth, _measured(shape, answers)
        row: Row = {
            "drafter": tuned.drafter,
            "temperature": tuned.temperature,
            "name": str(shape),
            "guesses": guesses,
            "acceptance": round(acceptance, 4),
            "cost_ratio": round(cost, 4),
            "emitted_per_round": round(leviathan.emitted(acceptance, guesses), 4),
            "gain": round(leviathan.gain(acceptance, guesses, cost), 4),
            "operations": None,
            "measured_emitted_per_round": None,
            "measured_gain": None,
            "measured_operations": None,
        }
        share = plan.drafter_share
        if share is not None:
            row["operations"] = round(leviathan.operations(acceptance, guesses, share), 4)
        if measured is not None:
            emitted = measured["emitted_per_round"]
            row["measured_emitted_per_round"] = emitted
            if (over := tuned.over_off(shape)) is not None:
                row["measured_gain"] = round(over.median, 4)
            if share is not None:
                row["measured_operations"] = round((guesses * share + guesses + 1) / emitted, 4)
        rows.append(row)
    return rows


def costs_row(tuned: Tuned) -> Row:
    """The fitted costs, in milliseconds."""
    costs = tuned.costs
    return {
        "drafter": tuned.drafter,
        "temperature": tuned.temperature,
        "draft_ms": round(costs.draft_us / 1e3, 4),
        "level_ms": round(costs.level_us / 1e3, 4),
        "level_ms_per_row": round(costs.row_us / 1e3, 5),
        "step_ms": round(costs.step_us / 1e3, 4),
        "step_ms_per_row": round(costs.step_row_us / 1e3, 5),
        "hops_ms": round(costs.hops_us / 1e3, 4),
        "off_hops_ms": round(costs.off_hops_us / 1e3, 4),
    }


def arms_of(configured: Sequence[Arm], tuned: Sequence[Tuned]) -> list[str]:
    """Arms for a configuration: `off`, its arms that need no drafter, and the trees of each drafter that pay at a
    temperature. They name their drafter where several were tuned."""
    several = len({each.drafter for each in tuned}) > 1
    kept = [OFF_ARM, *(arm for arm in configured if not arm.drafted)]
    found = [Arm(each.drafter, shape) for each in tuned for shape in each.paying]
    return list(dict.fromkeys(arm.name(several) for arm in [*kept, *found]))
