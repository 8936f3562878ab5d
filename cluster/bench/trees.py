"""`dendro bench trees`: the report's rows, computed from recorded answers and the cost table."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from dendro.shapes import OFF, BeamShape, DynamicShape, LevelShape, NodeShape, ProposedShape, TreeShape

from cluster.bench.costs import ReplayCosts
from cluster.bench.replay import ReplayedAnswer, run_fixed, run_stream, shares
from cluster.bench.traces import Trace, is_static, trimmed, walk
from cluster.measure.measurement import Step
from cluster.measure.report import Row
from cluster.measure.statistics import median_estimate, paired_ratio
from cluster.policies import POLICIES

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
LIKELIEST = ((8, 8), (15, 8), (15, 16))
"""Most levels, and most children of a row, of the likeliest static trees; as deep and as wide as the dynamic trees."""
WIDE = LevelShape((4, 2, 2, 1, 1))
"""The static tree that is reranked by value: static growth, dynamic rerank."""
PASSES = 2
"""Passes over all answers: the first starts with an empty experience, the second is judged."""
WINDOW = 16
"""Rounds per point in the plot of arm shares."""
ALL = "all"
CONFIGURED, PAPERS = "configured", "paper"


def dynamic_shapes(rows: int) -> tuple[DynamicShape, ...]:
    """The dynamic trees of `rows` rows."""
    return tuple(DynamicShape(k, depth, rows - 1) for k, depth in GROWN)


def fixed_arms(configured: Sequence[TreeShape]) -> tuple[TreeShape, ...]:
    """Every arm that is measured, each once."""
    dynamic = [shape for rows in SIZES for shape in dynamic_shapes(rows)]
    return tuple(dict.fromkeys([*NAMED, *PAPER, *configured, *BEAMS, *dynamic]))


def grown_arms(configured: Sequence[TreeShape]) -> tuple[TreeShape, ...]:
    """The shapes of which the drafter grows trees at every position: MASTERS instead of the dynamic trees trimmed from
    them. Rounds of static shapes follow from ranks, so of these only WIDE and the configured arms, from whose values
    policies learn."""
    known = LevelShape | NodeShape | ProposedShape
    cut = {shape for rows in SIZES for shape in dynamic_shapes(rows)}
    others = [shape for shape in fixed_arms(configured) if not isinstance(shape, known) and shape not in cut]
    valued = [shape for shape in configured if shape.drafted and is_static(shape)]
    return (*MASTERS, *others, WIDE, *valued)


def cut_trees(trace: Trace) -> None:
    """Add the dynamic trees of all sizes to a trace that has the masters."""
    for (k, depth), master in zip(GROWN, MASTERS, strict=True):
        for rows in SIZES:
            trace.trees[DynamicShape(k, depth, rows - 1)] = [trimmed(tree, rows) for tree in trace.trees[master]]


@dataclass(frozen=True, slots=True, eq=False)
class TreesRecord:
    """All measurements; the report is computed from them."""

    traces: Mapping[tuple[str, float], Sequence[Trace]]  # by drafter and temperature, in the order of the stream
    costs: Mapping[tuple[str, float], ReplayCosts]  # of served drafters, by drafter and temperature
    drafter: str  # whose trees were grown
    arms: tuple[TreeShape, ...]  # the configured ones; policies choose among them

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(temperature for _, temperature in self.traces))

    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(trace.answer.kind for traces in self.traces.values() for trace in traces))


def of_kind(kind: str, traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if kind in (ALL, trace.answer.kind)]


def emitted_per_round(counts: Sequence[Sequence[int]]) -> float:
    """Mean N over all rounds of all answers."""
    return sum(map(sum, counts)) / sum(map(len, counts))


def lengths(shape: TreeShape, traces: Sequence[Trace]) -> list[list[int]]:
    """N of every round of every answer, if all rounds have this shape."""
    return [[emitted for _, emitted in trace.rounds(shape)] for trace in traces]


# (i) Arms
def arm_rows(recorded: TreesRecord) -> Iterator[Row]:
    """One row for each kind, temperature, drafter and arm; arms that are not static only for the main drafter."""
    for (drafter, temperature), traces in recorded.traces.items():
        costs = recorded.costs.get((drafter, temperature))
        for kind in (*recorded.kinds(), ALL):
            mine = of_kind(kind, traces)
            off = {(index, 0): 1e6 / costs.round_us(OFF) for index in range(len(mine))} if costs else {}
            for shape in fixed_arms(recorded.arms):
                if drafter != recorded.drafter and not is_static(shape):
                    continue
                row: Row = {
                    "kind": kind,
                    "temperature": temperature,
                    "drafter": drafter,
                    "arm": str(shape),
                    "tree_rows": shape.rows,
                    "prompts": len(mine),
                    "emitted_per_round": round(emitted_per_round(lengths(shape, mine)), 4),
                    "draft_ms": None,
                    "verify_ms": None,
                    "tokens_per_second": None,
                    "over_off": None,
                }
                if costs:
                    runs = [run_fixed(shape, trace, costs) for trace in mine]
                    rates = {(index, 0): run.tokens_per_second for index, run in enumerate(runs)}
                    draft_us = costs.draft_us(shape)
                    row |= {
                        "draft_ms": round(draft_us / 1e3, 3),
                        "verify_ms": round(fmean(p.took_us - draft_us for run in runs for p in run.rounds) / 1e3, 3),
                        "tokens_per_second": median_estimate(list(rates.values())).as_json(),
                        "over_off": paired_ratio(rates, off).as_json(),
                    }
                yield row


# (ii) Static trees, and the ablation of dynamic ones
def level_shapes_up_to(rows: int, deepest: int = 8) -> list[LevelShape]:
    """Trees whose widths never increase, of at most `rows` rows and `deepest` levels."""
    found = []

    def widen(widths: tuple[int, ...], last: int, used: int) -> None:
        for width in range(1, last + 1):
            level = last_level(widths) * width
            if used + level <= rows:
                found.append(LevelShape((*widths, width)))
                if len(widths) + 1 < deepest:
                    widen((*widths, width), width, used + level)

    def last_level(widths: tuple[int, ...]) -> int:
        return LevelShape(widths).levels[-1] if widths else 1

    widen((), 8, 1)
    return found


def acceptance(traces: Sequence[Trace], depths: int, children: int) -> np.ndarray:
    """[depths, children] the probability that the j-th child of a row of depth d has the target's token, given that the
    text's path includes that row; over all positions, along ranks below `children`."""
    counts = np.zeros((depths, children + 1))
    for trace in traces:
        ranks = np.minimum(trace.guesses.ranks, children)
        for offset in range(trace.answer.tokens):
            for depth in range(depths):
                rank = ranks[offset + depth]
                counts[depth, rank] += 1
                if rank == children:
                    break
    chances: np.ndarray = counts[:, :children] / np.maximum(counts.sum(1, keepdims=True), 1)
    return chances


def likeliest_tree(accept: np.ndarray, rows: int) -> NodeShape:
    """The static tree of `rows` rows with the greatest N, if a child's acceptance depends on depth and rank alone.

    A row adds its probability of being reached, which is at most its parent's and, with children in order of
    probability, its previous sibling's. So the rows of greatest probability form a tree, and no other has a greater N.
    """
    depths, children = accept.shape
    accept = np.minimum.accumulate(accept, axis=1)
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-accept[0, 0], (0,))]
    while heap and len(paths) < rows - 1:
        chance, path = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if depth < depths:
            heapq.heappush(heap, (chance * accept[depth, 0], (*path, 0)))
        if rank + 1 < children:
            above = chance / accept[depth - 1, rank] if accept[depth - 1, rank] else 0.0
            heapq.heappush(heap, (above * accept[depth - 1, rank + 1], (*path[:-1], rank + 1)))
    paths.sort(key=lambda path: (len(path), path))
    counts = Counter(path[:-1] for path in paths)
    children_of = [counts[path] for path in [(), *paths]]
    while children_of and not children_of[-1]:
        children_of.pop()
    return NodeShape(tuple(children_of))


def best_static(traces: Sequence[Trace], rows: int) -> TreeShape:
    """Of the level shapes and the likeliest trees of at most `rows` rows, the one with the greatest mean N here."""
    likeliest = [likeliest_tree(acceptance(traces, *most), rows) for most in LIKELIEST]
    candidates: list[TreeShape] = [*level_shapes_up_to(rows), *likeliest]
    return max(candidates, key=lambda shape: emitted_per_round(lengths(shape, traces)))


@dataclass(frozen=True, slots=True)
class GrowthResult:
    """One way to grow a tree, and its results."""

    name: str
    shape: str
    counts: list[list[int]]  # N of every round of every answer

    @property
    def emitted(self) -> float:
        return emitted_per_round(self.counts)

    def by_answer(self) -> dict[tuple[int, int], float]:
        return {(index, 0): fmean(counts) for index, counts in enumerate(self.counts)}


STATIC, FITTED, STATIC_VALUE = "static levels", "static, the best in hindsight", "static growth, reranked by value"
NO_RERANK, FULL = "dynamic growth, not reranked", "dynamic growth, reranked"


def ways(traces: Sequence[Trace], rows: int) -> Iterator[GrowthResult]:
    """EAGLE-2's ablation at one number of tree rows: growth by value or not, rerank by value or not."""
    named = [shape for shape in (*NAMED, *PAPER) if 1 < shape.rows <= rows]
    levels = max(named, key=lambda shape: emitted_per_round(lengths(shape, traces)))
    yield GrowthResult(STATIC, str(levels), lengths(levels, traces))
    static = best_static(traces, rows)
    yield GrowthResult(FITTED, str(static), lengths(static, traces))

    def cut(trace: Trace) -> Callable[[int], int]:
        ids, begin = trace.answer.ids, trace.answer.begin
        return lambda base: len(walk(trimmed(trace.trees[WIDE][base - begin], rows), ids[base:]))

    kept = [[emitted for _, emitted in trace.answer.rounds(cut(trace))] for trace in traces]
    yield GrowthResult(STATIC_VALUE, f"{WIDE}, {rows - 1} kept", kept)
    for beam in BEAMS:
        if beam.rows == rows:
            yield GrowthResult(NO_RERANK, str(beam), lengths(beam, traces))
    dynamic = max(dynamic_shapes(rows), key=lambda shape: emitted_per_round(lengths(shape, traces)))
    yield GrowthResult(FULL, str(dynamic), lengths(dynamic, traces))


def ablation_rows(recorded: TreesRecord) -> Iterator[Row]:
    """One row for each temperature, number of rows and way; over all prompts."""
    for temperature in recorded.temperatures:
        traces = recorded.traces[recorded.drafter, temperature]
        for rows in SIZES:
            found = list(ways(traces, rows))
            best = max((way for way in found if way.name in (STATIC, FITTED)), key=lambda way: way.emitted)
            for way in found:
                yield {
                    "temperature": temperature,
                    "tree_rows": rows,
                    "way": way.name,
                    "shape": way.shape,
                    "emitted_per_round": round(way.emitted, 4),
                    "over_best_static": paired_ratio(way.by_answer(), best.by_answer()).as_json(),
                    "best_static": best.shape,
                }


# Policies
@dataclass(frozen=True, slots=True, eq=False)
class PolicyReplay:
    """The replays of one policy with one set of arms at one temperature."""

    arms_name: str
    arms: tuple[TreeShape, ...]
    policy: str
    temperature: float
    passes: tuple[list[ReplayedAnswer], ...]

    def runs(self, kind: str, which: int) -> list[ReplayedAnswer]:
        return [run for run in self.passes[which] if kind in (ALL, run.trace.answer.kind)]


def streams(recorded: TreesRecord, step: Step) -> Iterator[PolicyReplay]:
    """Every policy, on the configured arms and on the paper's, at every temperature."""
    for temperature in recorded.temperatures:
        costs = recorded.costs[recorded.drafter, temperature]
        for arms_name, arms in ((CONFIGURED, recorded.arms), (PAPERS, PAPER)):
            for policy in POLICIES:
                passes = run_stream(policy, arms, recorded.traces[recorded.drafter, temperature], costs, PASSES)
                yield PolicyReplay(arms_name, arms, policy, temperature, tuple(passes))
                step()


def rate(runs: Sequence[ReplayedAnswer]) -> float:
    """Tokens a second over all rounds of all answers."""
    rounds = [played for run in runs for played in run.rounds]
    return 1e6 * sum(played.emitted for played in rounds) / sum(played.took_us for played in rounds)


def _rates(runs: Sequence[ReplayedAnswer]) -> dict[tuple[int, int], float]:
    return {(index, 0): run.tokens_per_second for index, run in enumerate(runs)}


def best_arm(arms: Sequence[TreeShape], traces: Sequence[Trace], costs: ReplayCosts) -> TreeShape:
    """The fixed arm of the greatest rate on these answers."""
    return max(arms, key=lambda arm: rate([run_fixed(arm, trace, costs) for trace in traces]))


def policy_rows(recorded: TreesRecord, played: Sequence[PolicyReplay]) -> Iterator[Row]:
    """One row for each policy, set of arms, kind and temperature; all figures but `cold_regret` are of the last pass.

    Rates are medians over prompts, as for fixed arms; regrets are over all rounds of all answers.
    """
    for stream in played:
        costs = recorded.costs[recorded.drafter, stream.temperature]
        for kind in (*recorded.kinds(), ALL):
            runs = stream.runs(kind, -1)
            traces = [run.trace for run in runs]
            best = best_arm(stream.arms, traces, costs)
            fixed = [run_fixed(best, trace, costs) for trace in traces]
            off = [run_fixed(OFF, trace, costs) for trace in traces]
            chosen: Counter[TreeShape] = sum((run.arms for run in runs), Counter())
            yield {
                "kind": kind,
                "temperature": stream.temperature,
                "arms": stream.arms_name,
                "policy": stream.policy,
                "tokens_per_second": median_estimate(list(_rates(runs).values())).as_json(),
                "emitted_per_round": round(emitted_per_round([[p.emitted for p in run.rounds] for run in runs]), 4),
                "best_arm": str(best),
                "best_arm_tokens_per_second": median_estimate(list(_rates(fixed).values())).as_json(),
                "best_arm_share": round(chosen[best] / chosen.total(), 4),
                "regret": round(1 - rate(runs) / rate(fixed), 4),
                "over_best": paired_ratio(_rates(runs), _rates(fixed)).as_json(),
                "over_off": paired_ratio(_rates(runs), _rates(off)).as_json(),
                "cold_regret": round(1 - rate(stream.runs(kind, 0)) / rate(fixed), 4),
                "chosen": {str(arm): round(count / chosen.total(), 4) for arm, count in chosen.most_common()},
            }


def best_policy(rows: Sequence[Row], temperature: float) -> str:
    """The policy whose worst kind has the best ratio over the best fixed arm, on the configured arms."""
    worst: dict[str, float] = {}
    for row in rows:
        if (row["temperature"], row["arms"]) == (temperature, CONFIGURED) and row["kind"] != ALL:
            worst[row["policy"]] = min(worst.get(row["policy"], 1e9), row["over_best"]["median"])
    return max(worst, key=worst.__getitem__)


def share_rows(recorded: TreesRecord, played: Sequence[PolicyReplay], rows: Sequence[Row]) -> Iterator[Row]:
    """The best policy's arm shares by windows of rounds, for each kind, over all passes."""
    for stream in played:
        if stream.arms_name != CONFIGURED or stream.policy != best_policy(rows, stream.temperature):
            continue
        runs = [run for one in stream.passes for run in one]
        for kind in recorded.kinds():
            yield {
                "kind": kind,
                "temperature": stream.temperature,
                "policy": stream.policy,
                "window_rounds": WINDOW,
                "second_pass_from_round": sum(len(run.rounds) for run in stream.runs(kind, 0)),
                "shares": shares([run for run in runs if run.trace.answer.kind == kind], WINDOW),
            }
