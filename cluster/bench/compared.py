"""Answers to the same requests in several ways, all of which must have the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from dendro.answer import Completion, SpeculationStats

Way = TypeVar("Way", bound=Hashable)
Answers = Mapping[Way, Sequence[Completion]]
"""Each way -> its answers, in the order of the requests."""


def differing(answers: Answers[Way], plain_of: Callable[[Way], Way]) -> list[str]:
    """A line for each answer whose tokens differ from the plain one. plain_of: the way of plain decoding that a way is
    compared with"""
    return [
        f"{_name(way)}, prompt {number}: other tokens than without speculation"
        for way, own in answers.items()
        for number, (answer, plain) in enumerate(zip(own, answers[plain_of(way)], strict=True), 1)
        if answer.token_ids != plain.token_ids
    ]


def _name(way: Hashable) -> str:
    return ", ".join(map(str, way)) if isinstance(way, tuple) else str(way)


def stats_of(answers: Sequence[Completion]) -> list[SpeculationStats]:
    return [each.complete.speculation for each in answers]


def emitted_per_round(answers: Sequence[Completion]) -> float:
    """Mean number of tokens that a round emits, over all rounds of all answers."""
    stats = stats_of(answers)
    return sum(each.emitted_tokens for each in stats) / sum(each.rounds for each in stats)
