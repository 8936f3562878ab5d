"""Log-probabilities of an answer's tokens: of the target's raw logits, as natural logarithms in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dendro.errors import BadRequest
from dendro.internal.v1 import calls_pb2
from dendro.v1 import generation_pb2

MAX_TOP_LOGPROBS = 20
"""The most likeliest tokens that a request may ask for at each place."""
MAX_ECHOED = 1 << 17
"""The most log-probabilities of a prompt, those of likeliest tokens included."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at the place of one token, given the text before it. Raises ValueError for numbers that are
    none: positive, or not a number."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...] = ()  # likeliest tokens, in order, ties by id; need not include the token

    def __post_init__(self) -> None:
        for value in (self.logprob, *(value for _, value in self.top)):
            if not -math.inf <= value <= 0:
                raise ValueError(f"logprobs: {value} is no log-probability")


def check_logprobs(top: int | None) -> None:
    """Raise BadRequest for a number of likeliest tokens that no request may ask for. None: it asks for no
    log-probabilities."""
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise BadRequest("logprobs", f"must lie in 0 to {MAX_TOP_LOGPROBS}; got {top}")


def check_echo(field: str, tokens: int, top: int | None) -> None:
    """Raise BadRequest for a prompt with too many log-probabilities."""
    if top is not None and tokens * (1 + top) > MAX_ECHOED:
        raise BadRequest(
            field, f"has {tokens} tokens with {1 + top} log-probabilities each; at most {MAX_ECHOED} are echoed"
        )


Message = generation_pb2.TokenLogprobs | calls_pb2.TokenLogprobs


def fill_logprobs(message: Message, logprobs: TokenLogprobs) -> None:
    """Write them into an empty message."""
    message.logprob = logprobs.logprob
    message.top_ids.extend(token for token, _ in logprobs.top)
    message.top_logprobs.extend(value for _, value in logprobs.top)


def logprobs_from(messages: Sequence[Message]) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of a few tokens. Raises ValueError where they are malformed."""
    return tuple(map(_one_from, messages))


def _one_from(message: Message) -> TokenLogprobs:
    count = len(message.top_ids)
    if count > MAX_TOP_LOGPROBS or count != len(message.top_logprobs):
        raise ValueError(
            f"logprobs: {count} ids and {len(message.top_logprobs)} numbers; must be as many, at most "
            f"{MAX_TOP_LOGPROBS}"
        )
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))


def fit(logprobs: Sequence[TokenLogprobs], tokens: int, top: int | None, vocabulary: int) -> bool:
    """Whether these are what a request for `top` likeliest tokens gets for so many tokens; None: it did not ask."""
    if top is None or len(logprobs) != tokens:
        return not logprobs and top is None
    ids: Iterable[int] = (token for each in logprobs for token, _ in each.top)
    return all(len(each.top) == min(top, vocabulary) for each in logprobs) and max(ids, default=0) < vocabulary
