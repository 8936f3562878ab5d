"""Why rounds of dynamic trees end, compared with static trees; how well confidences are calibrated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.shapes import DynamicShape, TreeShape

from cluster.bench.traces import Trace
from cluster.bench.trees import FULL, TreesRecord
from cluster.measure.report import Row
from drafter_service.confidence import Calibration

BINS = 10


# Why rounds of dynamic trees end
@dataclass(slots=True)
class Causes:
    """Why the rounds of one dynamic tree ended, and how its N compares with a static tree's at the same positions."""

    shape: str
    static: str
    rounds: int = 0
    depth_reached: int = 0  # rounds with an accepted guess at every level
    past_candidates: int = 0  # the next token was not among the k candidates of its row
    left_out: int = 0  # it was a candidate, but its value was too low for growth or rerank
    lost_left_out: int = 0  # more tokens of those rounds if all rows had their k candidates
    ended_at: Counter[int] = field(default_factory=Counter)  # depth of the last accepted guess -> rounds
    positions: int = 0
    static_too: int = 0  # positions where both have the same N
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
            "static_emits_as_many": round(self.static_too / self.positions, 4),
            "static_emits_more": round(self.static_more / self.positions, 4),
            "dynamic_emits_more": round(self.dynamic_more / self.positions, 4),
        }


def causes_of(dynamic: DynamicShape, static: TreeShape, traces: Sequence[Trace]) -> Causes:
    """Why a dynamic tree's rounds end, and how its N compares with a static tree's at every position."""
    causes = Causes(str(dynamic), str(static))
    for trace in traces:
        begin, ranks = trace.answer.begin, trace.guesses.ranks
        for base, emitted in trace.rounds(dynamic):
            causes.rounds += 1
            causes.ended_at[emitted - 1] += 1
            below = ranks[base - begin : base - begin + dynamic.depth]
            # leading tokens that are all candidates
            within = int(np.argmax(np.append(below >= dynamic.k, True)))
            if emitted - 1 == dynamic.depth:
                causes.depth_reached += 1
            elif emitted - 1 >= within:
                causes.past_candidates += 1
            else:
                causes.left_out += 1
                causes.lost_left_out += within - (emitted - 1)
        for base in range(begin, trace.answer.end):
            more = trace.emitted(dynamic, base) - trace.emitted(static, base)
            causes.positions += 1
            causes.static_too += more == 0
            causes.static_more += more < 0
            causes.dynamic_more += more > 0
    return causes


def causes_rows(recorded: TreesRecord, ablation: Sequence[Row]) -> Iterator[Row]:
    """One row for each temperature and tree size: the ablation's dynamic tree against its best static one."""
    for row in ablation:
        if row["way"] != FULL:
            continue
        dynamic, static = TreeShape.parse(row["shape"]), TreeShape.parse(row["best_static"])
        assert isinstance(dynamic, DynamicShape)
        traces = recorded.traces[recorded.drafter, row["temperature"]]
        found = causes_of(dynamic, static, traces).as_json()
        yield {"temperature": row["temperature"], "tree_rows": row["tree_rows"]} | found


def three_causes(causes: Row) -> str:
    """The three largest causes as text, with their shares."""
    texts = {
        f"from {causes['static_emits_as_many']:.0%} of positions the static tree emits as many "
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
    return "; ".join(sorted(texts, key=texts.__getitem__, reverse=True)[:3])


# (iii) Calibration
def confidences(trace: Trace, calibration: Calibration) -> tuple[dict[str, np.ndarray], Calibration]:
    """[positions, candidates] acceptance probabilities of a drafter's candidates, by three estimates.

    `draft law`: softmax of logits / T, as in EAGLE-2. `margin`: softmax of the scores, noise included, over the
    candidates. `calibrated`: our drafter's, learned along the text from `calibration` on; returns the calibration at
    the text's end.
    """
    guesses, count = trace.guesses, trace.answer.tokens
    scores = guesses.scores[:count]
    weights = np.exp(scores - scores[:, :1])
    calibrated = []
    for row, rank in zip(scores, guesses.ranks[:count].tolist(), strict=True):
        calibrated.append(np.exp(calibration.confidences(row[None])[0]))
        calibration = calibration.learn(row, rank)
    estimates = {
        "draft law": np.exp(guesses.chances[:count]),
        "margin": weights / weights.sum(1, keepdims=True),
        "calibrated": np.stack(calibrated),
    }
    return estimates, calibration


def calibration_rows(recorded: TreesRecord) -> Iterator[Row]:
    """One row for each temperature and estimate: share accepted in ten bins of stated probability, mean distance.

    Over all recorded candidates of all positions, given the true text before them.
    """
    for temperature in recorded.temperatures:
        stated: dict[str, list[np.ndarray]] = defaultdict(list)
        hits, calibration = [], Calibration()
        for trace in recorded.traces[recorded.drafter, temperature]:
            estimates, calibration = confidences(trace, calibration)
            for name, chances in estimates.items():
                stated[name].append(chances.ravel())
            ranks = trace.guesses.ranks[: trace.answer.tokens, None]
            hits.append((ranks == np.arange(trace.guesses.scores.shape[1])).ravel())
        accepted = np.concatenate(hits)
        for name, parts in stated.items():
            yield {"temperature": temperature, "confidence": name} | reliability(np.concatenate(parts), accepted)


def reliability(stated: np.ndarray, accepted: np.ndarray) -> Row:
    """Bins of stated probability with the share accepted, and the expected calibration error: their mean distance,
    weighted by counts."""
    bin_of = np.minimum((stated * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for number in range(BINS):
        here = bin_of == number
        count = int(here.sum())
        if not count:
            continue
        mean, share = float(stated[here].mean()), float(accepted[here].mean())
        error += count / len(stated) * abs(mean - share)
        bins.append({"from": number / BINS, "stated": round(mean, 4), "accepted": round(share, 4), "guesses": count})
    return {"expected_error": round(error, 5), "bins": bins}
