"""The plan of a tuning: what is measured in which order, and the rows computed from it.

Prompts are of three kinds, so that nothing is judged by what it was chosen by: on those *learned from*, the target
writes and the drafter's ranks are counted; on some of these, shapes are timed for the cost lines; on *held out* ones,
the configured arms and the trees found are run in turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dendro.client import Asking
from dendro.shapes import OFF, LevelShape, NodeShape, TreeShape
from dendro.text import Sampling

from cluster.bench.statistics import median_estimate
from cluster.policies import leviathan
from cluster.policies.sequoia import Accept, best_tree, expected_tokens
from cluster.tune.measuring import (
    LinearCosts,
    Ranker,
    Timed,
    Told,
    accepted,
    costs_of,
    replayed,
    tell,
    whole_rounds,
)

PROBES = (LevelShape((1,) * 8), LevelShape((8,)), LevelShape((6, 3, 2)))
"""Timed beside the arms: deep, wide and large, so that the lines reach as far as the program does."""
WARM_TOKENS = 8
"""Of the answers that are not timed."""
Row = dict[str, Any]
Begin = Callable[[str, int], Callable[[], None]]
"""begin(title, steps) begins a progress bar and returns its step."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Of the trees that are looked for."""

    max_rows: int
    max_depth: int
    max_children: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of the prompts, by what they are for."""

    learned: tuple[tuple[int, ...], ...]
    timed: int  # so many of the learned ones
    held_out: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TunePlan:
    """One target and its drafter."""

    target: str
    arms: tuple[TreeShape, ...]  # those configured that a drafter makes, and `off` if it is
    prompts: Prompts
    tokens: int  # of every answer
    temperatures: tuple[float, ...]
    probes: tuple[LevelShape, ...]  # timed beside the arms
    limits: SearchLimits
    drafter_share: float | None  # parameters of the drafter over the target's; None: not known
    seed: int

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        return tuple(arm for arm in self.arms if not arm.off)

    @property
    def timed(self) -> tuple[TreeShape, ...]:
        """Shapes for the cost lines: `off`, arms of fixed form, and probes."""
        fixed = [arm for arm in self.trees if isinstance(arm, LevelShape)]
        return tuple(dict.fromkeys([OFF, *fixed, *self.probes]))

    def sampling(self, temperature: float, prompt: Sequence[int]) -> Sampling:
        """One seed for all that is asked of a prompt: the tokens must be the same."""
        return Sampling(temperature=temperature, seed=random.Random(f"{self.seed}/{prompt}").getrandbits(32))


@dataclass(slots=True)
class Tuned:
    """What came of one temperature."""

    temperature: float
    accept: Accept
    costs: LinearCosts
    found: tuple[TreeShape, ...]  # the best chain and the best tree
    traces: list[list[int]]  # of the held-out prompts
    first_rank: float  # share of tokens that the drafter ranks first, on the prompts learned from
    told: dict[TreeShape, list[Told]] = field(default_factory=dict)  # on the held-out prompts
    differences: list[str] = field(default_factory=list)


class Tuning:
    """A plan at work on a running cluster."""

    def __init__(self, plan: TunePlan, client: Asking, ranker: Ranker, begin: Begin) -> None:
        self.plan = plan
        self._client = client
        self._ranker = ranker
        self._begin = begin

    async def at(self, temperature: float) -> Tuned:
        """Learn, find, and run what was found."""
        plan, prompts = self.plan, self.plan.prompts
        name = f"temperature {temperature:g}"
        step = self._begin(f"{name}: the target writes", len(prompts.learned) + len(prompts.held_out))
        learned = [await self._trace(prompt, temperature, step) for prompt in prompts.learned]
        held_out = [await self._trace(prompt, temperature, step) for prompt in prompts.held_out]
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
        tuned = Tuned(temperature, accept, costs, tuple(dict.fromkeys(found)), held_out, flat.count(0) / len(flat))
        await self._run(tuned, name)
        return tuned

    async def _tell(self, prompt: Sequence[int], temperature: float, shape: TreeShape, most: int | None = None) -> Told:
        plan = self.plan
        tokens = min(plan.tokens, most or plan.tokens)
        return await tell(self._client, plan.target, prompt, plan.sampling(temperature, prompt), tokens, str(shape))

    async def _trace(self, prompt: Sequence[int], temperature: float, step: Callable[[], None]) -> list[int]:
        told = await self._tell(prompt, temperature, OFF)
        step()
        return self._ranker.ranks(prompt, told.tokens, self.plan.sampling(temperature, prompt))

    async def _costs(self, temperature: float, name: str) -> LinearCosts:
        plan = self.plan
        prompts = plan.prompts.learned[: plan.prompts.timed]
        step = self._begin(f"{name}: what rows cost", len(plan.timed) * (1 + len(prompts)))
        answers: dict[TreeShape, list[Told]] = {shape: [] for shape in plan.timed}
        for shape in plan.timed:  # the first round of a size pays for cold memory
            await self._tell(prompts[0], temperature, shape, WARM_TOKENS)
            step()
        for prompt in prompts:
            for shape in self._shuffled(plan.timed, temperature, prompt):
                answers[shape].append(await self._tell(prompt, temperature, shape))
                step()
        timed = {shape: Timed.of(told) for shape, told in answers.items()}
        return costs_of({shape: each for shape, each in timed.items() if each is not None})

    async def _run(self, tuned: Tuned, name: str) -> None:
        """Everything on the held-out prompts, in turn."""
        shapes = tuple(dict.fromkeys([OFF, *self.plan.arms, *tuned.found]))
        step = self._begin(f"{name}: the trees are run", len(shapes) * len(self.plan.prompts.held_out))
        tuned.told = {shape: [] for shape in shapes}
        for number, prompt in enumerate(self.plan.prompts.held_out):
            for shape in self._shuffled(shapes, tuned.temperature, prompt):
                tuned.told[shape].append(await self._tell(prompt, tuned.temperature, shape))
                step()
            plain = tuned.told[OFF][-1].tokens
            for shape in shapes:
                if tuned.told[shape][-1].tokens != plain:
                    tuned.differences.append(f"{shape}, {name}, held-out prompt {number + 1}: other tokens than `off`")

    def _shuffled(self, shapes: Sequence[TreeShape], temperature: float, prompt: Sequence[int]) -> list[TreeShape]:
        """In an order of chance that the seed fixes: none is always run after the same other one."""
        order = list(shapes)
        random.Random(f"{self.plan.seed}/{temperature}/{prompt}").shuffle(order)
        return order


def as_arm(shape: NodeShape) -> TreeShape:
    """The same tree by its levels' widths, where all rows of a level have as many children.

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
    """One object for each shape that was run: predicted from what was learned, beside what held-out prompts gave."""
    rows = []
    for shape, answers in tuned.told.items():
        row: Row = {
            "temperature": tuned.temperature,
            "name": str(shape),
            "found": shape in tuned.found,
            "configured": shape in plan.arms,
            "rows": shape.rows,
            "depth": shape.depth,
            "predicted": None,
            "replayed_emitted_per_round": None,
            "measured": _measured(shape, answers),
        }
        if isinstance(shape, LevelShape | NodeShape) and shape.width <= plan.limits.max_children:
            emitted, round_us = expected_tokens(shape, tuned.accept), tuned.costs.round_us(shape)
            row["predicted"] = {
                "emitted_per_round": round(emitted, 4),
                "round_ms": round(round_us / 1e3, 4),
                "tokens_per_second": round(1e6 * emitted / round_us, 3),
            }
            again = replayed(tuned.traces, shape)
            row["replayed_emitted_per_round"] = None if again is None else round(again, 4)
        rows.append(row)
    return rows


def _measured(shape: TreeShape, answers: Sequence[Told]) -> Row | None:
    """What rounds gave; None where the drafter grew no tree of this shape, or answers had no second round."""
    drafted = sum(told.speculation.drafted_tokens for told in answers)
    lengths = [length for told in answers for length in whole_rounds(told, shape)]
    timed = Timed.of(answers)
    if timed is None or not lengths or (not shape.off and not drafted):
        return None
    rounds = sum(told.speculation.rounds for told in answers)
    return {
        "emitted_per_round": round(fmean(lengths), 4),
        "rounds": len(lengths),
        "round_ms": round(timed.round_us / 1e3, 4),
        "draft_ms": round(timed.draft_us / 1e3, 4),
        "verify_ms": round(timed.verify_us / 1e3, 4),
        "late_share": round(sum(told.speculation.late_drafts for told in answers) / rounds, 4),
        "tokens_per_second": median_estimate(
            [told.tokens_per_second for told in answers if told.round_us is not None]
        ).as_json(),
    }


def chains_of(plan: TunePlan, tuned: Tuned) -> list[Row]:
    """What Leviathan's formulas make of every chain that was run, beside what it did."""
    acceptance, cost = tuned.first_rank, tuned.costs.cost_ratio
    plain = _measured(OFF, tuned.told[OFF])
    rows = []
    for shape, answers in tuned.told.items():
        if not is_chain(shape):
            continue
        guesses, measured = shape.depth, _measured(shape, answers)
        row: Row = {
            "temperature": tuned.temperature,
            "name": str(shape),
            "guesses": guesses,
            "acceptance": round(acceptance, 4),
            "cost_ratio": round(cost, 4),
            "pays": leviathan.pays(acceptance, cost),
            "best_guesses": leviathan.best_guesses(acceptance, cost, plan.limits.max_depth),
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
            if plain is not None:
                rates = (each["tokens_per_second"]["median"] for each in (measured, plain))
                row["measured_gain"] = round(next(rates) / next(rates), 4)
            if share is not None:
                row["measured_operations"] = round((guesses * share + guesses + 1) / emitted, 4)
        rows.append(row)
    return rows


def costs_row(tuned: Tuned) -> Row:
    """The cost lines, in milliseconds."""
    costs = tuned.costs
    return {
        "temperature": tuned.temperature,
        "draft_ms": round(costs.draft_us / 1e3, 4),
        "level_ms": round(costs.level_us / 1e3, 4),
        "level_ms_per_row": round(costs.row_us / 1e3, 5),
        "step_ms": round(costs.step_us / 1e3, 4),
        "step_ms_per_row": round(costs.step_row_us / 1e3, 5),
        "hops_ms": round(costs.hops_us / 1e3, 4),
        "off_hops_ms": round(costs.off_hops_us / 1e3, 4),
    }


def arms_of(configured: Sequence[TreeShape], tuned: Sequence[Tuned]) -> list[str]:
    """Arms for a configuration: `off`, the proposals that it has, and the trees that were found at each temperature."""
    kept = [OFF, *(arm for arm in configured if not arm.drafted)]
    return list(dict.fromkeys(str(shape) for shape in [*kept, *(shape for each in tuned for shape in each.found)]))
