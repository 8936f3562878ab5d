"""`dendro bench trees`: the rows and aims that follow from recorded answers and the cost table."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from dendro.shapes import OFF, BeamShape, DynamicShape, LevelShape, NodeShape, ProposedShape, TreeShape

from cluster.bench.costs import ReplayCosts
from cluster.bench.replay import ReplayedAnswer, run_fixed, run_stream, shares
from cluster.bench.statistics import Estimate, median_estimate, paired_ratio
from cluster.bench.traces import Trace, is_static, trimmed, walk
from cluster.policies import POLICIES
from drafter_service.confidence import Calibration

SIZES = (16, 25, 49)
"""Rows at which ways to grow a tree are compared: (3,2,1), beam(6,4) and (3,3,2,1) have exactly these."""
PAPER = tuple(map(TreeShape.parse, ("(3,3,2,1)", "(3,2,2,1,1)", "(2,2,2,1,1,1)")))
"""The arms of the Mamba-drafters paper."""
NAMED = tuple(
    map(
        TreeShape.parse,
        ("off", "(1,1)", "(1,1,1,1)", f"({','.join('1' * 15)})", "(2,1,1)", "(3,2,1)", "(4,2,1,1)", "(3,2,2,1)"),
    )
)
BEAMS = (BeamShape(5, 3), BeamShape(6, 4), BeamShape(8, 6))
GROWN = ((4, 5), (8, 8))
"""k and depth of the dynamic trees."""
MASTERS = tuple(DynamicShape(k, depth, 63) for k, depth in GROWN)
"""Grown once; what fewer guesses would have kept is cut from them."""
WIDE = LevelShape((4, 2, 2, 1, 1))
"""The static tree of which values choose guesses: static growth, dynamic rerank."""
DYNAMIC_BAR, BEST_ARM_BAR, OFF_BAR = 1.2, 0.97, 0.98
PASSES = 2
"""Over all answers: the first with an experience that knows nothing, the second is judged."""
WINDOW = 16
"""Rounds of a point in the plot of arm shares."""
BINS = 10
ALL = "all"
CONFIGURED, PAPERS = "configured", "paper"

Row = dict[str, Any]


def dynamic_shapes(rows: int) -> tuple[DynamicShape, ...]:
    """The dynamic trees of so many rows."""
    return tuple(DynamicShape(k, depth, rows - 1) for k, depth in GROWN)


def fixed_arms(configured: Sequence[TreeShape]) -> tuple[TreeShape, ...]:
    """Every arm that is measured, each once."""
    dynamic = [shape for rows in SIZES for shape in dynamic_shapes(rows)]
    return tuple(dict.fromkeys([*NAMED, *PAPER, *configured, *BEAMS, *dynamic]))


def grown_arms(configured: Sequence[TreeShape]) -> tuple[TreeShape, ...]:
    """Those of which a drafter must grow trees at every place, the masters instead of the dynamic trees cut from
    them. Of static shapes, whose rounds follow from ranks, those that policies choose among: they learn from what
    trees promise."""
    known = LevelShape | NodeShape | ProposedShape
    cut = {shape for rows in SIZES for shape in dynamic_shapes(rows)}
    others = [shape for shape in fixed_arms(configured) if not isinstance(shape, known) and shape not in cut]
    judged = [shape for shape in configured if shape.drafted and is_static(shape)]
    return (*MASTERS, *others, WIDE, *judged)


def cut_trees(trace: Trace) -> None:
    """Add the dynamic trees of all sizes to a trace that has the masters."""
    for (k, depth), master in zip(GROWN, MASTERS, strict=True):
        for rows in SIZES:
            trace.trees[DynamicShape(k, depth, rows - 1)] = [trimmed(tree, rows) for tree in trace.trees[master]]


@dataclass(frozen=True, slots=True, eq=False)
class TreesRecord:
    """All that was measured, from which everything else follows."""

    traces: Mapping[tuple[str, float], Sequence[Trace]]  # by drafter and temperature, in the order of the stream
    costs: Mapping[tuple[str, float], ReplayCosts]  # of the drafters that are served
    drafter: str  # the one whose trees were grown
    arms: tuple[TreeShape, ...]  # the configured ones, which policies choose among

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(temperature for _, temperature in self.traces))

    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(trace.answer.kind for traces in self.traces.values() for trace in traces))


def of_kind(kind: str, traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if kind in (ALL, trace.answer.kind)]


def emitted_per_round(counts: Sequence[Sequence[int]]) -> float:
    """Of all rounds of all answers."""
    return sum(map(sum, counts)) / sum(map(len, counts))


def lengths(shape: TreeShape, traces: Sequence[Trace]) -> list[list[int]]:
    """N of every round of every answer, if all are of this shape."""
    return [[emitted for _, emitted in trace.rounds(shape)] for trace in traces]


# (i) Arms


def arm_rows(recorded: TreesRecord) -> Iterator[Row]:
    """One row for each kind, temperature, drafter and arm; dynamic trees and beams of one drafter alone."""
    for (drafter, temperature), traces in recorded.traces.items():
        costs = recorded.costs.get((drafter, temperature))
        for kind in (*recorded.kinds(), ALL):
            mine = of_kind(kind, traces)
            off = {(place, 0): 1e6 / costs.round_us(OFF) for place in range(len(mine))} if costs else {}
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
                    rates = {(place, 0): run.tokens_per_second for place, run in enumerate(runs)}
                    draft_us = costs.draft_us(shape)
                    row |= {
                        "draft_ms": round(draft_us / 1e3, 3),
                        "verify_ms": round(fmean(p.took_us - draft_us for run in runs for p in run.rounds) / 1e3, 3),
                        "tokens_per_second": median_estimate(list(rates.values())).as_json(),
                        "over_off": paired_ratio(rates, off).as_json(),
                    }
                yield row


# (ii) Static trees, and what makes dynamic ones


def level_shapes_up_to(rows: int, deepest: int = 8) -> list[LevelShape]:
    """Trees of levels that never widen, of at most so many rows."""
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


def acceptance(traces: Sequence[Trace], depths: int = 8, children: int = 8) -> np.ndarray:
    """[depths, children] the chance that the j-th child of a row of depth d carries the target's token, given that the
    text goes through that row; over all places, as far as ranks below `children` lead."""
    counts = np.zeros((depths, children + 1))
    for trace in traces:
        ranks = np.minimum(trace.guesses.ranks, children)
        for place in range(trace.answer.tokens):
            for depth in range(depths):
                rank = ranks[place + depth]
                counts[depth, rank] += 1
                if rank == children:
                    break
    return counts[:, :children] / np.maximum(counts.sum(1, keepdims=True), 1)


def likeliest_tree(accept: np.ndarray, rows: int) -> NodeShape:
    """The static tree of so many rows that emits the most, where a child's chance hangs on depth and rank alone.

    What a row adds is the chance that it is reached, which is no greater than its parent's, nor (children in order of
    chance) its elder sibling's: so the rows of greatest chance make a tree, and no other emits more.
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
    """The static tree of at most so many rows that emits the most per round on these very answers."""
    candidates: list[TreeShape] = [*level_shapes_up_to(rows), likeliest_tree(acceptance(traces), rows)]
    return max(candidates, key=lambda shape: emitted_per_round(lengths(shape, traces)))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to grow a tree of so many rows."""

    name: str
    shape: str
    counts: list[list[int]]  # N of every round of every answer

    @property
    def emitted(self) -> float:
        return emitted_per_round(self.counts)

    def by_answer(self) -> dict[tuple[int, int], float]:
        return {(place, 0): fmean(counts) for place, counts in enumerate(self.counts)}


STATIC, FITTED, STATIC_VALUE = "static levels", "static, the best in hindsight", "static growth, reranked by value"
NO_RERANK, FULL = "dynamic growth, not reranked", "dynamic growth, reranked"


def ways(traces: Sequence[Trace], rows: int) -> Iterator[Way]:
    """EAGLE-2's ablation at one number of rows: growth by value or not, rerank by value or not."""
    named = [shape for shape in (*NAMED, *PAPER) if 1 < shape.rows <= rows]
    levels = max(named, key=lambda shape: emitted_per_round(lengths(shape, traces)))
    yield Way(STATIC, str(levels), lengths(levels, traces))
    static = best_static(traces, rows)
    yield Way(FITTED, str(static), lengths(static, traces))

    def cut(trace: Trace) -> Callable[[int], int]:
        ids, begin = trace.answer.ids, trace.answer.begin
        return lambda base: len(walk(trimmed(trace.trees[WIDE][base - begin], rows), ids[base:]))

    kept = [[emitted for _, emitted in trace.answer.rounds(cut(trace))] for trace in traces]
    yield Way(STATIC_VALUE, f"{WIDE}, {rows - 1} kept", kept)
    for beam in BEAMS:
        if beam.rows == rows:
            yield Way(NO_RERANK, str(beam), lengths(beam, traces))
    dynamic = max(dynamic_shapes(rows), key=lambda shape: emitted_per_round(lengths(shape, traces)))
    yield Way(FULL, str(dynamic), lengths(dynamic, traces))


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


# Why dynamic trees emit no more


@dataclass(slots=True)
class Causes:
    """How the rounds of one dynamic tree ended, and how they compare with a static tree's from the same places."""

    shape: str
    static: str
    rounds: int = 0
    depth_reached: int = 0  # all levels were right
    past_candidates: int = 0  # the token was past the k candidates of its row
    left_out: int = 0  # it was among them, and its value too low for growth or rerank
    lost_left_out: int = 0  # tokens that the k candidates of every row would have given those rounds more
    ended_at: Counter[int] = field(default_factory=Counter)  # depth of the last right guess -> rounds
    places: int = 0
    static_too: int = 0  # places from which both emit as many
    static_more: int = 0
    dynamic_more: int = 0

    def as_json(self) -> Row:
        share = max(self.rounds, 1)
        return {
            "shape": self.shape,
            "static": self.static,
            "rounds": self.rounds,
            "all_levels_right": round(self.depth_reached / share, 4),
            "past_the_candidates": round(self.past_candidates / share, 4),
            "left_out_by_value": round(self.left_out / share, 4),
            "tokens_lost_by_leaving_out": round(self.lost_left_out / share, 4),
            "ended_at_depth": {str(depth): round(n / share, 4) for depth, n in sorted(self.ended_at.items())},
            "static_emits_as_many": round(self.static_too / self.places, 4),
            "static_emits_more": round(self.static_more / self.places, 4),
            "dynamic_emits_more": round(self.dynamic_more / self.places, 4),
        }


def causes_of(dynamic: DynamicShape, static: TreeShape, traces: Sequence[Trace]) -> Causes:
    """Why a dynamic tree's rounds end where they do, and what a static tree makes of the same places."""
    causes = Causes(str(dynamic), str(static))
    for trace in traces:
        begin, ranks = trace.answer.begin, trace.guesses.ranks
        for base, emitted in trace.rounds(dynamic):
            causes.rounds += 1
            causes.ended_at[emitted - 1] += 1
            below = ranks[base - begin : base - begin + dynamic.depth]
            within = int(
                np.argmax(np.append(below >= dynamic.k, True))
            )  # tokens that are candidates, one after another
            if emitted - 1 == dynamic.depth:
                causes.depth_reached += 1
            elif emitted - 1 >= within:
                causes.past_candidates += 1
            else:
                causes.left_out += 1
                causes.lost_left_out += within - (emitted - 1)
        for base in range(begin, trace.answer.end):
            more = trace.emitted(dynamic, base) - trace.emitted(static, base)
            causes.places += 1
            causes.static_too += more == 0
            causes.static_more += more < 0
            causes.dynamic_more += more > 0
    return causes


def causes_rows(recorded: TreesRecord, ablation: Sequence[Row]) -> Iterator[Row]:
    """For each temperature and number of rows, of the dynamic tree and the best static one of the ablation."""
    for row in ablation:
        if row["way"] != FULL:
            continue
        dynamic, static = TreeShape.parse(row["shape"]), TreeShape.parse(row["best_static"])
        assert isinstance(dynamic, DynamicShape)
        traces = recorded.traces[recorded.drafter, row["temperature"]]
        found = causes_of(dynamic, static, traces).as_json()
        yield {"temperature": row["temperature"], "tree_rows": row["tree_rows"]} | found


def three_causes(causes: Row) -> str:
    """The largest causes in words, with their numbers."""
    said = {
        f"from {causes['static_emits_as_many']:.0%} of places the static tree emits as many "
        f"(more from {causes['static_emits_more']:.0%}, fewer from {causes['dynamic_emits_more']:.0%})": causes[
            "static_emits_as_many"
        ],
        f"in {causes['past_the_candidates']:.0%} of rounds the token was past the candidates": causes[
            "past_the_candidates"
        ],
        f"in {causes['left_out_by_value']:.0%} its value was too low to be kept "
        f"({causes['tokens_lost_by_leaving_out']:.2f} tokens a round)": causes["left_out_by_value"],
        f"in {causes['all_levels_right']:.0%} the tree was too shallow": causes["all_levels_right"],
    }
    return "; ".join(sorted(said, key=said.__getitem__, reverse=True)[:3])


# (iii) Calibration


def confidences(trace: Trace, calibration: Calibration) -> tuple[dict[str, np.ndarray], Calibration]:
    """[places, candidates] chances that a drafter's candidates are taken to have, by three accounts.

    `draft law`: softmax of logits / T, as EAGLE-2 has it. `margin`: softmax of the scores, noise included, over the
    candidates. `calibrated`: what our drafter says, fitted while the text is written; it comes with what it knew at the
    text's beginning, and what it knows at the end is returned.
    """
    guesses, places = trace.guesses, trace.answer.tokens
    scores = guesses.scores[:places]
    weights = np.exp(scores - scores[:, :1])
    calibrated = []
    for row, rank in zip(scores, guesses.ranks[:places].tolist(), strict=True):
        calibrated.append(np.exp(calibration.confidences(row[None])[0]))
        calibration = calibration.learn(row, rank)
    said = {
        "draft law": np.exp(guesses.chances[:places]),
        "margin": weights / weights.sum(1, keepdims=True),
        "calibrated": np.stack(calibrated),
    }
    return said, calibration


def calibration_rows(recorded: TreesRecord) -> Iterator[Row]:
    """One row for each temperature and account: accepted over stated chance in ten bins, and their mean distance.

    All recorded candidates of all places, given the true text before them: those of a bin were accepted so often.
    """
    for temperature in recorded.temperatures:
        stated: dict[str, list[np.ndarray]] = defaultdict(list)
        hits, calibration = [], Calibration()
        for trace in recorded.traces[recorded.drafter, temperature]:
            said, calibration = confidences(trace, calibration)
            for name, chances in said.items():
                stated[name].append(chances.ravel())
            ranks = trace.guesses.ranks[: trace.answer.tokens, None]
            hits.append((ranks == np.arange(trace.guesses.scores.shape[1])).ravel())
        accepted = np.concatenate(hits)
        for name, parts in stated.items():
            yield {"temperature": temperature, "confidence": name} | reliability(np.concatenate(parts), accepted)


def reliability(stated: np.ndarray, accepted: np.ndarray) -> Row:
    """Bins of stated chance with the share accepted, and the expected calibration error: their mean distance, weighed
    by counts."""
    place = np.minimum((stated * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for number in range(BINS):
        here = place == number
        count = int(here.sum())
        if not count:
            continue
        mean, share = float(stated[here].mean()), float(accepted[here].mean())
        error += count / len(stated) * abs(mean - share)
        bins.append({"from": number / BINS, "stated": round(mean, 4), "accepted": round(share, 4), "guesses": count})
    return {"expected_error": round(error, 5), "bins": bins}


# Policies


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """What one policy did with one set of arms at one temperature."""

    arms_name: str
    arms: tuple[TreeShape, ...]
    policy: str
    temperature: float
    passes: tuple[list[ReplayedAnswer], ...]

    def runs(self, kind: str, which: int) -> list[ReplayedAnswer]:
        return [run for run in self.passes[which] if kind in (ALL, run.trace.answer.kind)]


def streams(recorded: TreesRecord, step: Callable[[], None]) -> Iterator[Stream]:
    """Every policy, on the configured arms and on the paper's, at every temperature."""
    for temperature in recorded.temperatures:
        costs = recorded.costs[recorded.drafter, temperature]
        for arms_name, arms in ((CONFIGURED, recorded.arms), (PAPERS, PAPER)):
            for policy in POLICIES:
                passes = run_stream(policy, arms, recorded.traces[recorded.drafter, temperature], costs, PASSES)
                yield Stream(arms_name, arms, policy, temperature, tuple(passes))
                step()


def rate(runs: Sequence[ReplayedAnswer]) -> float:
    """Tokens a second over all rounds of all answers."""
    rounds = [played for run in runs for played in run.rounds]
    return 1e6 * sum(played.emitted for played in rounds) / sum(played.took_us for played in rounds)


def _rates(runs: Sequence[ReplayedAnswer]) -> dict[tuple[int, int], float]:
    return {(place, 0): run.tokens_per_second for place, run in enumerate(runs)}


def best_arm(arms: Sequence[TreeShape], traces: Sequence[Trace], costs: ReplayCosts) -> TreeShape:
    """The fixed arm of the greatest rate on these very answers."""
    return max(arms, key=lambda arm: rate([run_fixed(arm, trace, costs) for trace in traces]))


def policy_rows(recorded: TreesRecord, played: Sequence[Stream]) -> Iterator[Row]:
    """One row for each policy, set of arms, kind and temperature; all but `cold_regret` of the second pass.

    Rates are medians over prompts, as those of arms are; regrets are of all rounds of all answers together.
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
    """The policy whose worst kind is the best, on the configured arms."""
    worst: dict[str, float] = {}
    for row in rows:
        if (row["temperature"], row["arms"]) == (temperature, CONFIGURED) and row["kind"] != ALL:
            worst[row["policy"]] = min(worst.get(row["policy"], 1e9), row["over_best"]["median"])
    return max(worst, key=worst.__getitem__)


def share_rows(recorded: TreesRecord, played: Sequence[Stream], rows: Sequence[Row]) -> Iterator[Row]:
    """How the best policy's choices go over the rounds of each kind, both passes."""
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
                "shares": shares(runs, WINDOW, lambda trace, kind=kind: trace.answer.kind == kind),  # type: ignore[misc]
            }


# Aims


def _aim(aim: str, bar: float, found: Estimate | Mapping[str, float], why: str = "") -> Row:
    said = found.as_json() if isinstance(found, Estimate) else found
    few = f"few prompts: the interval covers {said['coverage']:.0%}" if said["coverage"] < 0.9 else ""
    row: Row = {
        "aim": aim,
        "value": said["median"],
        "interval": [said["low"], said["high"]],
        "bar": bar,
        "met": said["median"] >= bar,
    }
    if words := "; ".join(filter(None, (why if not row["met"] else "", few))):
        row["why"] = words
    return row


def aims_of(ablation: Sequence[Row], causes: Sequence[Row], policies: Sequence[Row]) -> list[Row]:
    """The aims, from the rows alone."""
    why = {(row["temperature"], row["tree_rows"]): three_causes(row) for row in causes}
    aims = [
        _aim(
            f"dynamic tree over the best static one, emitted per round, {row['tree_rows']} rows, "
            f"temperature {row['temperature']:g}",
            DYNAMIC_BAR,
            row["over_best_static"],
            why[row["temperature"], row["tree_rows"]],
        )
        for row in ablation
        if row["way"] == FULL
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in policies):
        name = best_policy(policies, temperature)
        for row in policies:
            if (row["temperature"], row["policy"], row["arms"]) != (temperature, name, CONFIGURED) or row[
                "kind"
            ] == ALL:
                continue
            at = f"{row['kind']}, temperature {temperature:g}"
            found = f"it chose {row['best_arm']} in {row['best_arm_share']:.0%} of rounds"
            aims.append(_aim(f"{name} over the best fixed arm, {at}", BEST_ARM_BAR, row["over_best"], found))
            aims.append(_aim(f"{name} over off, {at}", OFF_BAR, row["over_off"]))
    return aims
