"""What one API key may use at a router: requests and tokens a minute, answers at once, lengths, structures.

A request over a limit does not wait: it is refused, with the time to wait where that is known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from dendro.clock import Clock
from dendro.errors import BadRequest, LimitReached

WINDOW_S = 60
"""Seconds over which a limit per minute counts. Amounts are kept by whole second, so WINDOW_S + 1 of them at most."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key over all routers. None: only those that all requests have."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    answers: int | None = None  # answers that run at once
    prompt_tokens: int | None = None  # length of the text before an answer, a session's included
    new_tokens: int | None = None  # length of one answer
    structures: bool = True  # True if answers may have structures

    def given(self) -> dict[str, int | bool]:
        """The limits that differ from those that all requests have, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None and value is not True}

    def share_of(self, routers: int) -> KeyLimits:
        """The limits at one of several routers. All shares together are at most the limit, or 1 each."""

        def part(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // routers)

        return replace(
            self,
            requests_per_minute=part(self.requests_per_minute),
            tokens_per_minute=part(self.tokens_per_minute),
            answers=part(self.answers),
        )


class MinuteCount:
    """Amounts taken in the last minute. The sum over any 60 seconds is at most the limit given to `take`."""

    def __init__(self, name: str, clock: Clock) -> None:
        """name: name of the limit in errors"""
        self.name = name
        self._clock = clock
        self._taken: deque[list[int]] = deque()  # [second, amount], seconds rising

    def take(self, amount: int, limit: int) -> int:
        """Take an amount, at most `limit`. Returns the second in which it counts. Raises LimitReached."""
        now = self._clock()
        second = int(now)
        while self._taken and self._taken[0][0] < second - WINDOW_S:
            self._taken.popleft()
        over = sum(each for _, each in self._taken) + amount - limit
        if over > 0:
            raise LimitReached.of(self.name, limit, self._free_after(over) - now)
        if not self._taken or self._taken[-1][0] != second:
            self._taken.append([second, 0])
        self._taken[-1][1] += amount
        return second

    def give_back(self, amount: int, second: int) -> None:
        """Give back the unused part of an amount. second: as `take` returned it"""
        for entry in self._taken:
            if entry[0] == second:
                entry[1] -= min(amount, entry[1])

    def _free_after(self, over: int) -> float:
        """The time, on the clock, from which on at least `over` of the amounts taken no longer count."""
        for second, amount in self._taken:
            over -= amount
            if over <= 0:
                return second + WINDOW_S + 1
        raise AssertionError("an amount over the limit itself is refused before")


class Allowance:
    """What a key has left at this router. Not thread-safe: bound to one event loop."""

    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        """limits: this router's share of the key's limits"""
        self.limits = limits
        self._requests = MinuteCount("requests_per_minute", clock)
        self._tokens = MinuteCount("tokens_per_minute", clock)
        self._answers = 0

    def take_request(self) -> None:
        """Count a request. Raises LimitReached."""
        if self.limits.requests_per_minute is not None:
            self._requests.take(1, self.limits.requests_per_minute)

    @contextmanager
    def request(self) -> Iterator[RequestShare]:
        """Context of a running request. Yields its share of the allowance; on exit the request's answers no longer
        count, and its unused tokens are given back."""
        share = RequestShare(self)
        try:
            yield share
        finally:
            share.end()

    def check_structure(self) -> None:
        """Raise BadRequest where the key's answers may have no structure."""
        if not self.limits.structures:
            raise BadRequest("structure", "is refused: this key's limit `structures` is off")

    def check_prompt(self, tokens: int) -> None:
        """Raise BadRequest for a text before the answer that is too long for the key."""
        limit = self.limits.prompt_tokens
        if limit is not None and tokens > limit:
            raise BadRequest("prompt", f"makes a text of {tokens} tokens; this key's limit `prompt_tokens` is {limit}")

    def most_new_tokens(self, limit: int) -> int:
        """Most new tokens of one of the key's answers. limit: the router's own limit, which holds for all keys"""
        return limit if self.limits.new_tokens is None else min(limit, self.limits.new_tokens)

    def within_minute(self, length: int, prompt: int, answers: int) -> int:
        """The default length of answers, in tokens, cut so that prompt and answers fit in the key's tokens of a minute;
        at least 1. prompt: number of its tokens"""
        limit = self.limits.tokens_per_minute
        return length if limit is None else max(1, min(length, (limit - prompt) // answers))

    def take_answers(self, answers: int) -> None:
        """Count answers that begin. Raises LimitReached, or BadRequest for more answers than the limit."""
        limit = self.limits.answers
        if limit is not None and answers > limit:
            raise BadRequest("n", f"is {answers}; this key's limit `answers` is {limit} at this router")
        if limit is not None and self._answers + answers > limit:
            raise LimitReached.of("answers", limit)
        self._answers += answers

    def leave_answers(self, answers: int) -> None:
        """Count answers that ended."""
        self._answers -= answers

    def take_tokens(self, prompt: int, new: int) -> int:
        """Take the tokens of a prompt, and the most that its answers may have. Returns the second in which they count.
        Raises LimitReached, or BadRequest for more tokens than the limit."""
        limit = self.limits.tokens_per_minute
        if limit is None:
            return 0
        named = f"this key's limit `tokens_per_minute` is {limit} at this router"
        if prompt + min(new, 1) > limit:
            raise BadRequest("prompt", f"makes a text of {prompt} tokens; {named}")
        if prompt + new > limit:
            raise BadRequest("max_new_tokens", f"makes {prompt + new} tokens with the prompt; {named}")
        return self._tokens.take(prompt + new, limit)

    def give_back_tokens(self, tokens: int, second: int) -> None:
        """Give back unused tokens. second: as `take_tokens` returned it"""
        self._tokens.give_back(tokens, second)


class RequestShare:
    """What a running request has taken of its key's allowance."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._answers = self._unused = self._second = 0

    def take_answers(self, answers: int) -> None:
        self._allowance.take_answers(answers)
        self._answers = answers

    def take_tokens(self, prompt: int, new: int) -> None:
        self._second = self._allowance.take_tokens(prompt, new)
        self._unused = new

    def use(self, tokens: int) -> None:
        """Count tokens that the request's answers have emitted."""
        self._unused -= tokens

    def end(self) -> None:
        self._allowance.leave_answers(self._answers)
        self._allowance.give_back_tokens(self._unused, self._second)
