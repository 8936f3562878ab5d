"""The guesses that a check's answers verified. Answers without any guess are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from dendro.answer import SpeculationStats

from cluster.arms import maker_and_shape
from cluster.certify.promises import Promise


class GuessCount:
    """Counts the guesses and late drafts of a check's answers, by the arm that their requests fix."""

    def __init__(self, promise: Promise, arms: Sequence[str]) -> None:
        self._promise = promise
        self._guesses, self._late = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0)
        promise.guesses = promise.guesses or 0

    def add(self, way: str, found: SpeculationStats) -> None:
        """Count an answer. way: its fixed arm; guesses of any other way of speculation are added to the total alone"""
        guesses = found.drafted_tokens - found.trimmed_tokens
        self._promise.guesses = (self._promise.guesses or 0) + guesses
        if way in self._guesses:
            self._guesses[way] += guesses
            self._late[way] += found.late_drafts

    def judge(self, each_arm: bool) -> None:
        """Called after all answers. Leaves the promise unchecked where an arm that should have guessed has no verified
        guess; if not `each_arm`, only where no arm has one."""
        arms = [arm for arm, guesses in self._guesses.items() if not guesses and self._should_guess(arm)]
        if arms and (each_arm or not any(self._guesses.values())):
            named = "; ".join(f"{arm}: {self._late[arm]} drafts were late" for arm in arms)
            self._promise.leave_unchecked(f"not one guess was verified ({named})")

    def _should_guess(self, arm: str) -> bool:
        """True if an arm without guesses shows a fault: a draft was late, or its trees always have guesses."""
        _, shape = maker_and_shape(arm)
        return bool(self._late[arm]) or (shape.drafted and not shape.stops)
