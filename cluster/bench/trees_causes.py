"""Why one tree emits more than another: depth, width and reranking, and how well confidences are calibrated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.shapes import DynamicShape, TreeShape

from cluster.bench.traces import Trace
from cluster.bench.trees import FULL, Row, TreesRecord
from drafter_service.confidence import Calibration

BINS = 10


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
