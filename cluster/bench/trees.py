"""`dendro bench trees`: ways to guess, on answers that were recorded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from dendro.errors import BadRequest
from dendro.shapes import MAX_ROWS, OFF, BeamShape, DynamicShape, LevelShape, TreeShape

from cluster.bench.replay import LEVEL_ROWS, STEP_ROWS, ReplayCosts, by_answer, costed, rates, run_fixed
from cluster.bench.traces import (
    SIDE_BY_SIDE,
    SPARE,
    Trace,
    TracedAnswer,
    grown_trees,
    is_static,
    trimmed,
    walk,
    write_answers,
)
from cluster.config import DrafterConfig
from cluster.demo.kinds import KINDS
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, models, option, seed, temperatures
from cluster.measure.engine_times import measure_drafts, measure_steps
from cluster.measure.in_process import DRAFTER_DTYPE, drafter_of, verifier_of
from cluster.measure.measurement import Begin, Step
from cluster.measure.options import KIND_PROMPTS
from cluster.measure.report import Row
from cluster.measure.statistics import paired_ratio
from cluster.measure.targets import COSTLY, target_config
from cluster.measure.turns import estimate
from cluster.policies.sequoia import longest_trees
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS
from cluster.tune.measuring import Ranker

SIZES = (16, 25, 49)
"""Rows at which ways to grow a tree are compared: those of (3,2,1), beam(6,4) and (3,3,2,1)."""
PAPER = tuple(map(TreeShape.parse, ("(3,3,2,1)", "(3,2,2,1,1)", "(2,2,2,1,1,1)")))
"""The arms of the Mamba-drafters paper."""
NAMED = tuple(
    map(
        TreeShape.parse,
        ("off", "(1,1)", "(1,1,1,1)", f"({','.join('1' * 15)})", "(2,1,1)", "(3,2,1)", "(4,2,1,1)", "(3,2,2,1)"),
    )
)
BEAMS = (BeamShape(5, 3), BeamShape(6, 4), BeamShape(8, 6))
GROWN = ((4, 5), (8, 8), (16, 15))
"""k and depth of the dynamic trees."""
MASTERS = tuple(DynamicShape(k, depth, 63) for k, depth in GROWN)
"""Grown once; smaller dynamic trees are trimmed from them."""
LIKELIEST = ((8, 8), (15, 8), (15, 15))
"""Most levels, and most children of a row, of the likeliest static trees; as deep and as wide as the dynamic trees."""
WIDE = LevelShape((4, 2, 2, 1, 1))
"""The static tree that is reranked by value: static growth, dynamic rerank."""
RANKS = 16
"""Candidates among which the target's tokens are ranked."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class TreesOptions:
    prompts: int = option(KIND_PROMPTS, 8, 1, least=1)
    tokens: int = option("New tokens of every answer.", ANSWER_TOKENS, 16, least=1)
    repetitions: int = option("Measurements of each cost.", 15, 3, least=1)
    temperatures: tuple[float, ...] = temperatures()
    drafters: tuple[str, ...] = option(
        "Folders beside the target. All arms are measured with the first, static trees alone with others.",
        ("mamba2", "mamba", "llama"),
        ("mamba2",),
    )
    seed: int = seed()
    models: Path = models()

    def __post_init__(self) -> None:
        for name in self.drafters:
            if self.drafters.count(name) > 1 or not (self.models / name / "config.json").exists():
                raise BadRequest("drafters", f"{self.models / name} holds no checkpoint or is named twice")


# Arms
def dynamic_shapes(rows: int) -> tuple[DynamicShape, ...]:
    return tuple(DynamicShape(k, depth, rows - 1) for k, depth in GROWN)


def fixed_arms(configured: Sequence[TreeShape]) -> tuple[TreeShape, ...]:
    """Every arm that is measured, each once."""
    dynamic = [shape for rows in SIZES for shape in dynamic_shapes(rows)]
    return tuple(dict.fromkeys([*NAMED, *PAPER, *configured, *BEAMS, *dynamic]))


def grown_arms(configured: Sequence[TreeShape]) -> tuple[TreeShape, ...]:
    """The shapes of which the drafter grows trees at every position: MASTERS instead of the dynamic trees trimmed from
    them. Rounds of static shapes follow from ranks, so of these only WIDE, which is reranked by value."""
    cut = {shape for rows in SIZES for shape in dynamic_shapes(rows)}
    others = [shape for shape in fixed_arms(configured) if not is_static(shape) and shape not in cut]
    return (*MASTERS, *others, WIDE)


def cut_trees(trace: Trace) -> None:
    """Add the dynamic trees of all sizes to a trace that has the masters."""
    for (k, depth), master in zip(GROWN, MASTERS, strict=True):
        for rows in SIZES:
            trace.trees[DynamicShape(k, depth, rows - 1)] = [trimmed(tree, rows) for tree in trace.trees[master]]


# The record
@dataclass(frozen=True, slots=True, eq=False)
class TreesRecord:
    """All measurements; the report is computed from them."""

    traces: Mapping[tuple[str, float], Sequence[Trace]]  # (drafter, temperature) -> answers
    costs: Mapping[tuple[str, float], ReplayCosts]  # (drafter, temperature) -> measured costs
    drafter: str  # the drafter that grew trees
    arms: tuple[TreeShape, ...]  # the configured ones

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(temperature for _, temperature in self.traces))

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*dict.fromkeys(trace.answer.kind for traces in self.traces.values() for trace in traces), ALL)


async def measure(options: TreesOptions, begin: Begin) -> dict[str, Any]:
    config = target_config(options.models, COSTLY)
    (target,) = config.targets.values()
    arms = tuple(arm.shape for arm in config.arms_of(COSTLY) if arm.shape.drafted)
    main = options.drafters[0]
    traces: dict[tuple[str, float], list[Trace]] = {}
    costs: dict[tuple[str, float], ReplayCosts] = {}
    texts = options.prompts * len(KINDS)
    async with verifier_of(COSTLY, target, PROMPT_TOKENS + options.tokens + 2 * SPARE + MAX_ROWS, texts) as verifier:
        answers: dict[float, list[TracedAnswer]] = {}
        steps: dict[float, dict[int, float]] = {}
        for each in options.temperatures:
            step = begin(f"answers and steps, temperature {each:g}", options.repetitions + 1)
            answers[each] = await write_answers(
                verifier, options.models, options.prompts, options.tokens, each, options.seed
            )
            ids = answers[each][0].ids[:PROMPT_TOKENS]
            steps[each] = await measure_steps(verifier, ids, each, STEP_ROWS, options.repetitions, step)
        for name in options.drafters:
            ranker = Ranker(DrafterConfig(checkpoint=options.models / name, dtype="float32"), "cpu", RANKS)
            shapes = costed([each for each in (*fixed_arms(arms), WIDE) if name == main or is_static(each)])
            async with drafter_of(options.models / name, SIDE_BY_SIDE) as drafter:
                for temperature, written in answers.items():
                    mine = [Trace(each, ranker.ranks(*each.parts, each.sampling)) for each in written]
                    traces[name, temperature] = mine
                    step = begin(f"costs of {name}, temperature {temperature:g}", options.repetitions + 1)
                    drafts = await measure_drafts(drafter, ids, temperature, shapes, options.repetitions, step)
                    costs[name, temperature] = ReplayCosts(steps[temperature], drafts)
                    if name != main:
                        continue
                    step = begin(f"trees of {name}, temperature {temperature:g}", texts * options.tokens)
                    await grow_trees(drafter, mine, arms, step)
    recorded = TreesRecord(traces, costs, main, arms)
    return {
        "plan": {},
        "rows": list(arm_rows(recorded)),
        "ablation": list(ablation_rows(recorded)),
        "costs": list(cost_rows(recorded)),
    }


async def grow_trees(drafter: Any, traces: Sequence[Trace], arms: Sequence[TreeShape], step: Step) -> None:
    """Record a tree of each grown shape at every position of these answers."""
    grown = await grown_trees(drafter, [trace.answer for trace in traces], grown_arms(arms), step)
    for trace, trees in zip(traces, grown, strict=True):
        trace.trees |= trees
        cut_trees(trace)


# Rows
def of_kind(kind: str, traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if kind in (ALL, trace.answer.kind)]


def emitted_per_round(counts: Sequence[Sequence[int]]) -> float:
    """Mean N over all rounds of all answers."""
    return sum(map(sum, counts)) / sum(map(len, counts))


def lengths(shape: TreeShape, traces: Sequence[Trace]) -> list[list[int]]:
    """N of every round of every answer, if all rounds have this shape."""
    return [[emitted for _, emitted in trace.rounds(shape)] for trace in traces]


def arm_rows(recorded: TreesRecord) -> Iterator[Row]:
    """One row for each kind, temperature, drafter and arm; arms that are not static only for the main drafter."""
    for (drafter, temperature), traces in recorded.traces.items():
        costs = recorded.costs[drafter, temperature]
        for kind in recorded.kinds:
            mine = of_kind(kind, traces)
            off = rates([run_fixed(OFF, trace, costs) for trace in mine])
            for shape in fixed_arms(recorded.arms):
                if drafter != recorded.drafter and not is_static(shape):
                    continue
                runs, draft_us = [run_fixed(shape, trace, costs) for trace in mine], costs.draft_us(shape)
                steps_us = [played.took_us - draft_us for run in runs for played in run.rounds]
                yield {
                    "kind": kind,
                    "temperature": temperature,
                    "drafter": drafter,
                    "arm": str(shape),
                    "tree_rows": shape.rows,
                    "emitted_per_round": round(emitted_per_round(lengths(shape, mine)), 4),
                    "draft_ms": round(draft_us / 1e3, 3),
                    "verify_ms": round(fmean(steps_us) / 1e3, 3),
                    "tokens_per_second": estimate(list(rates(runs).values())),
                    "over_off": paired_ratio(rates(runs), off).as_json(),
                }


def acceptance(traces: Sequence[Trace], depths: int, children: int) -> np.ndarray:
    """[depths, children] the probability that the j-th child of a row of depth d has the target's token, given that the
    text's path includes that row; over all positions, along ranks below `children`."""
    counts = np.zeros((depths, children + 1))
    for trace in traces:
        for offset in range(trace.answer.tokens):
            for depth, rank in enumerate(trace.ranks[offset : offset + depths]):
                counts[depth, min(rank, children)] += 1
                if rank >= children:
                    break
    chances: np.ndarray = counts[:, :children] / np.maximum(counts.sum(1, keepdims=True), 1)
    return chances


def best_static(traces: Sequence[Trace], rows: int) -> TreeShape:
    """The likeliest trees of at most `rows` rows by acceptance on these answers: the one with the greatest mean N."""
    found = {
        shape
        for depths, children in LIKELIEST
        for shape, _ in longest_trees(acceptance(traces, depths, children), rows, depths, children)
    }
    return max(sorted(found, key=str), key=lambda shape: emitted_per_round(lengths(shape, traces)))


STATIC, FITTED, STATIC_VALUE = "static levels", "static, the best in hindsight", "static growth, reranked by value"
NO_RERANK, FULL = "dynamic growth, not reranked", "dynamic growth, reranked"


def ways(traces: Sequence[Trace], rows: int) -> Iterator[tuple[str, str, list[list[int]]]]:
    """EAGLE-2's ablation at one number of tree rows: growth by value or not, rerank by value or not. Yields the way,
    its shape and N of every round of every answer."""

    def best(shapes: Sequence[TreeShape]) -> TreeShape:
        return max(shapes, key=lambda shape: emitted_per_round(lengths(shape, traces)))

    def cut(trace: Trace) -> Callable[[int], int]:
        ids, begin = trace.answer.ids, trace.answer.begin
        return lambda base: len(walk(trimmed(trace.trees[WIDE][base - begin], rows), ids[base:]))

    levels = best([shape for shape in (*NAMED, *PAPER) if 1 < shape.rows <= rows])
    yield STATIC, str(levels), lengths(levels, traces)
    static = best_static(traces, rows)
    yield FITTED, str(static), lengths(static, traces)
    kept = [[emitted for _, emitted in trace.answer.rounds(cut(trace))] for trace in traces]
    yield STATIC_VALUE, f"{WIDE}, {rows - 1} kept", kept
    for beam in BEAMS:
        if beam.rows == rows:
            yield NO_RERANK, str(beam), lengths(beam, traces)
    dynamic = best(dynamic_shapes(rows))
    yield FULL, str(dynamic), lengths(dynamic, traces)


def ablation_rows(recorded: TreesRecord) -> Iterator[Row]:
    """One row for each temperature, number of rows and way; over all prompts."""
    for temperature in recorded.temperatures:
        for rows in SIZES:
            found = list(ways(recorded.traces[recorded.drafter, temperature], rows))
            static = max((counts for way, _, counts in found if way in (STATIC, FITTED)), key=emitted_per_round)
            for way, shape, counts in found:
                over = paired_ratio(by_answer(list(map(fmean, counts))), by_answer(list(map(fmean, static))))
                yield {
                    "temperature": temperature,
                    "tree_rows": rows,
                    "way": way,
                    "shape": shape,
                    "emitted_per_round": round(emitted_per_round(counts), 4),
                    "over_best_static": over.as_json(),
                }


def cost_rows(recorded: TreesRecord) -> Iterator[Row]:
    """Milliseconds by rows: steps of the target, levels of the drafters."""
    for (name, temperature), costs in recorded.costs.items():
        if name == recorded.drafter:
            ms = {str(rows): round(us / 1e3, 3) for rows, us in costs.step.items()}
            yield {"what": "verifier step", "temperature": temperature, "ms": ms}
        ms = {str(rows): round(costs.level_us(rows) / 1e3, 3) for rows in LEVEL_ROWS}
        yield {"what": f"level of {name}", "temperature": temperature, "ms": ms}


TREES = Bench(
    "trees",
    "Compare ways to guess: chains, static trees, beams and dynamic trees, on code, prose and repetitive edits. The "
    "target generates each answer once, and a drafter's guesses are recorded at "
    "every position. As speculation changes no token, all ways are then replayed on the same answers, with round times "
    "from a table of measured costs of a costly target.",
    "Under a minute: one prompt of each kind, short answers, one drafter.",
    TreesOptions,
    measure,
    facts=(
        f"Prompts of {PROMPT_TOKENS} tokens of each kind ({', '.join(KINDS)}); the drafters in {DRAFTER_DTYPE}",
        "Tokens per second are predicted: tokens over the round times of the cost table, without router, hops and "
        "queues. Trees of a drafter are replayed without the proposals that the router would merge into them",
    ),
    tables=(
        ReportTable(
            "Every arm: {kind}, temperature {temperature:g}, {drafter}",
            "rows",
            "arm; rows = tree_rows; emitted per round = emitted_per_round:.2f; draft ms = draft_ms:.2f; verify ms = "
            "verify_ms:.2f; tokens/s = tokens_per_second:.1f; over off = over_off:.3f",
        ),
        ReportTable(
            "What makes a dynamic tree: {tree_rows} rows, temperature {temperature:g} (EAGLE-2's ablation)",
            "ablation",
            "way; tree = shape; emitted per round = emitted_per_round:.3f; over the best static = over_best_static:.3f",
        ),
        ReportTable("Costs in ms by rows, temperature {temperature:g}", "costs", "what; * = ms/*:.2f"),
    ),
    aims=(
        Aim(
            "dynamic tree over the best static one, emitted per round, {tree_rows} rows, temperature {temperature:g}",
            "ablation",
            "over_best_static",
            least=1.1,
            where=lambda row: row["way"] == FULL,
        ),
    ),
    plots=(
        Plot(
            "ablation",
            "rows of the tree = tree_rows",
            "tokens per round = emitted_per_round",
            line="{way}",
            panel="temperature {temperature:g}",
        ),
    ),
    code=("cluster/policies/sequoia.py", "drafter_service/grow.py"),
)
bench_trees = TREES.command()
