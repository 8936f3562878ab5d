"""What is measured of one answer, and the names of what is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

GENERATE = "transformers generate"
LOOKUP = "transformers prompt lookup"
ASSISTED = "transformers assisted"
BATCH = "transformers batch"
CONTINUOUS = "transformers generate_batch"
OFF = "off"
AUTO = "auto"
BASELINES = (GENERATE, LOOKUP, ASSISTED)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where the time of an answer's mean round went, as router and peers counted it. In milliseconds."""

    total_ms: float  # of a round after the first, which waits for the prefill
    draft_ms: float  # the drafter was busy or queued with it
    verify_ms: float  # the verifier was busy with it
    queue_ms: float  # it waited at the verifier
    shapes: Mapping[str, int]  # how often each was asked for

    @property
    def hop_ms(self) -> float:
        """The round less the time in which either peer says it was busy or queued with it."""
        return self.total_ms - self.draft_ms - self.verify_ms - self.queue_ms


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer of one contender."""

    tokens: tuple[int, ...]
    seconds: float  # from the request to the last token
    first_seconds: float  # from the request to the first tokens
    first_tokens: int  # that came together
    round_count: int  # times that tokens were emitted
    rounds: RoundTimes | None = None  # of ours alone

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The rate after the first tokens, which the prefill is part of; None where all came together."""
        if len(self.tokens) <= self.first_tokens:
            return None
        return (len(self.tokens) - self.first_tokens) / (self.seconds - self.first_seconds)


class Contender(Protocol):
    """Answers a prompt in one of its ways."""

    async def answer(
        self, row: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int
    ) -> TimedAnswer: ...
