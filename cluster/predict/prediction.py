"""Predicts an arm's gain over `off`, from ranks and prices.

On every prompt, a drafter's ranks of the target's tokens determine the rounds of a tree of fixed form. On a few of them
the arms are run: how long a round takes over one of `off` on the same prompt is the arm's price, and the tokens of
those rounds over those by ranks correct for guesses that proposers add and for late drafts. Arms whose rounds ranks do
not determine are run on every prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from dendro.shapes import LevelShape, NodeShape, TreeShape
from dendro.tree import RANKED

from cluster.arms import Arm
from cluster.drafter_figures import accepted
from cluster.measure.report import Row
from cluster.measure.statistics import Estimate, median_estimate
from cluster.policies.replay import static_path
from cluster.policies.sequoia import best_tree
from cluster.tune.measuring import RunAnswer, Timed

Answers = Mapping[int, RunAnswer]
"""Answers by the prompt's number."""
Lengths = Sequence[int]
"""Tokens of each round of an answer."""
DEEPEST = 10
"""Most levels of a tree that is looked for."""


def ranks_determine(arm: Arm) -> bool:
    """True if an arm's rounds follow from its drafter's ranks."""
    return arm.drafted and isinstance(arm.shape, LevelShape | NodeShape)


def replayed_lengths(shape: TreeShape, ranks: Sequence[int]) -> list[int]:
    """The rounds of an answer whose tokens have these ranks; the answer's end cuts the last one."""
    lengths, position = [], 0
    while position < len(ranks):
        path = static_path(shape, ranks[position : position + shape.depth])
        lengths.append(min(len(path), len(ranks) - position))
        position += lengths[-1]
    return lengths


def emitted_of(answers: Sequence[Lengths]) -> float:
    """Tokens of a round after the first, over all answers; NaN where none has two rounds."""
    rounds = sum(len(lengths) - 1 for lengths in answers if len(lengths) > 1)
    return sum(sum(lengths[1:]) for lengths in answers if len(lengths) > 1) / rounds if rounds else math.nan


@dataclass(frozen=True, slots=True)
class RoundPrice:
    """Time of an arm's rounds."""

    over_off: float  # the median over prompts of a round's time over that of a round of `off`
    parts: Timed  # medians of the parts of a round's time

    @classmethod
    def of(cls, answers: Answers, off: Answers) -> RoundPrice | None:
        """The price of an arm's rounds from answers to the same prompts with it and with `off`; None if no prompt has
        two rounds in both."""
        pairs = [(answers[prompt].round_us, off[prompt].round_us) for prompt in answers.keys() & off.keys()]
        ratios = [took / plain for took, plain in pairs if took is not None and plain is not None]
        parts = Timed.of(list(answers.values()))
        return cls(median(ratios), parts) if ratios and parts is not None else None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted gain of one arm."""

    arm: Arm
    by_ranks: bool
    emitted: float  # tokens of a round
    price: RoundPrice
    over_off: dict[int, float] = field(repr=False)  # tokens a second over those of `off`, by prompt

    @property
    def estimate(self) -> Estimate:
        return median_estimate(list(self.over_off.values()))


def predict_by_ranks(arm: Arm, ranks: Sequence[Sequence[int]], answers: Answers, off: Answers) -> Prediction | None:
    """Predict an arm's rate over `off` by replaying ranks. None where no timed answer has two rounds.

    ranks: the drafter's ranks of every prompt's answer   answers, off: the arm's and `off`'s to the timed prompts
    """
    price = RoundPrice.of(answers, off)
    replays = [replayed_lengths(arm.shape, each) for each in ranks]
    played = emitted_of([answer.lengths for answer in answers.values()])
    replayed = emitted_of([replays[prompt] for prompt in answers])
    if price is None or math.isnan(played) or math.isnan(replayed):
        return None
    correction = played / replayed
    by_prompt = {
        prompt: correction * emitted / price.over_off
        for prompt, lengths in enumerate(replays)
        if not math.isnan(emitted := emitted_of([lengths]))
    }
    return Prediction(arm, True, correction * emitted_of(replays), price, by_prompt)


def predict_by_runs(arm: Arm, answers: Answers, off: Answers) -> Prediction | None:
    """Predict an arm's gain from answers to every prompt with the arm and with `off`; None if they do not suffice."""
    price, over = RoundPrice.of(answers, off), over_off(answers, off)
    if price is None or not over:
        return None
    return Prediction(arm, False, emitted_of([answer.lengths for answer in answers.values()]), price, over)


def over_off(answers: Answers, off: Answers) -> dict[int, float]:
    """Measured tokens a second after the first round, over those of `off` on the same prompt."""
    return {
        prompt: answer.tokens_per_second / plain
        for prompt, answer in answers.items()
        if answer.tokens_per_second and (plain := off[prompt].tokens_per_second)
    }


def longest_trees(ranks: Sequence[Sequence[int]], guesses: int) -> list[tuple[NodeShape, float]]:
    """The best tree of fixed form and at most `guesses` guesses for each half of the answers, with its tokens a round
    on the other half: on the half that it was chosen on, a tree seems better than it is.

    ranks: the drafter's ranks of each answer's tokens; RANKED: the token is not among its RANKED best
    """
    found = []
    for chosen, other in ((ranks[::2], ranks[1::2]), (ranks[1::2], ranks[::2])):
        deepest = min(guesses, DEEPEST)
        table = accepted(chosen, deepest, RANKED)
        shape = best_tree(table, lambda rows: 0.0, lambda rows: 1.0, max_rows=1 + guesses, max_depth=deepest).shape
        found.append((shape, emitted_of([replayed_lengths(shape, each) for each in other])))
    return found


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that a choice among these arms, or a drafter of their price, could give over `off`."""

    best_by_prompt: Estimate  # gain with the best arm, or `off`, for every prompt
    always_right: float  # gain with every guess right, in the arm that gains most by that
    always_right_arm: str


def ceiling_of(predictions: Sequence[Prediction]) -> Ceiling | None:
    """None where nothing was predicted."""
    prompts = {prompt for each in predictions for prompt in each.over_off}
    drafted = [each for each in predictions if each.arm.drafted]
    if not prompts or not drafted:
        return None
    best = [max(1.0, *(each.over_off.get(prompt, 1.0) for each in predictions)) for prompt in sorted(prompts)]
    right = max(drafted, key=lambda each: (each.arm.depth + 1) / each.price.over_off)
    return Ceiling(median_estimate(best), (right.arm.depth + 1) / right.price.over_off, str(right.arm))


def row_of(prediction: Prediction, off: Timed, name: str) -> Row:
    """A report's row: `off` is a round without guesses."""
    price, parts = prediction.price, prediction.price.parts
    return {
        "name": name,
        "from": "ranks" if prediction.by_ranks else "runs",
        "prompts": len(prediction.over_off),
        "emitted_per_round": round(prediction.emitted, 4),
        "needed_per_round": round(price.over_off, 4),
        "over_off": prediction.estimate.as_json(),
        "round_ms": {
            "total": round(parts.round_us / 1e3, 3),
            "draft": round(parts.draft_us / 1e3, 3),
            "first_row": round(min(off.verify_us, parts.verify_us) / 1e3, 3),
            "further_rows": round(max(parts.verify_us - off.verify_us, 0.0) / 1e3, 3),
            "rest": round((parts.hops_us + parts.queue_us) / 1e3, 3),
        },
        "measured": None,
    }
