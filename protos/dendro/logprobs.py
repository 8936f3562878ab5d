"""Log-probabilities of an answer's tokens, from the target's raw logits, as natural logarithms in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from dendro.errors import BadRequest
from dendro.internal.v1 import calls_pb2
from dendro.options import MAX_ECHOED, MAX_TOP_LOGPROBS, OPTIONS
from dendro.v1 import generation_pb2

NUMBER_BYTES = 4
_FLOAT, _ID = np.dtype("<f4"), np.dtype("<u4")
"""Types of numbers on the wire between router and verifier."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at the place of one token, given the text before it. Raises ValueError for numbers that are
    none: positive, or not a number."""

    logprob: float  # the token's log-probability
    top: tuple[tuple[int, float], ...] = ()  # likeliest tokens, in order, ties by id; need not include the token

    def __post_init__(self) -> None:
        for value in (self.logprob, *(value for _, value in self.top)):
            if not -math.inf <= value <= 0:
                raise ValueError(f"logprobs: {value} is no log-probability")


@dataclass(frozen=True, slots=True, eq=False)
class EchoedLogprobs(Sequence[TokenLogprobs]):
    """Log-probabilities at the places of many tokens, as arrays: a `TokenLogprobs` for each. Raises ValueError for
    invalid log-probabilities, and for shapes that do not agree."""

    logprobs: npt.NDArray[np.float32]  # [tokens]
    top_ids: npt.NDArray[np.uint32]  # [tokens, top]
    top_logprobs: npt.NDArray[np.float32]  # [tokens, top]

    def __post_init__(self) -> None:
        tokens, shape = len(self.logprobs), self.top_ids.shape
        if shape != self.top_logprobs.shape or shape != (tokens, *shape[1:]) or len(shape) != 2:
            raise ValueError(f"logprobs: of {tokens} tokens, ids {shape} and numbers {self.top_logprobs.shape}")
        for values in (self.logprobs, self.top_logprobs):
            if not (values <= 0).all():  # false for one that is not a number
                raise ValueError("logprobs: one is no log-probability")

    @classmethod
    def of(cls, given: Sequence[TokenLogprobs]) -> Self:
        """Convert a sequence to arrays. All entries must have the same number of likeliest tokens."""
        shape = len(given), len(given[0].top) if given else 0
        return cls(
            np.array([each.logprob for each in given], np.float32),
            np.array([token for each in given for token, _ in each.top], np.uint32).reshape(shape),
            np.array([value for each in given for _, value in each.top], np.float32).reshape(shape),
        )

    @property
    def top(self) -> int:
        """Number of likeliest tokens at each place."""
        return int(self.top_ids.shape[1])

    def fit(self, tokens: int, top: int | None, vocabulary: int) -> bool:
        """True if these are the log-probabilities of `tokens` tokens for a request that asks for `top` likeliest
        tokens; None: it asks for no log-probabilities."""
        if top is None or len(self) != tokens:
            return not len(self) and top is None
        return not tokens or (self.top == min(top, vocabulary) and int(self.top_ids.max(initial=0)) < vocabulary)

    def __len__(self) -> int:
        return len(self.logprobs)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> EchoedLogprobs: ...

    def __getitem__(self, place: int | slice) -> TokenLogprobs | EchoedLogprobs:
        logprobs, ids, values = self.logprobs[place], self.top_ids[place], self.top_logprobs[place]
        if isinstance(place, slice):
            return EchoedLogprobs(logprobs, ids, values)
        return TokenLogprobs(float(logprobs), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EchoedLogprobs) and all(
            np.array_equal(ours, theirs)
            for ours, theirs in (
                (self.logprobs, other.logprobs),
                (self.top_ids, other.top_ids),
                (self.top_logprobs, other.top_logprobs),
            )
        )

    def __hash__(self) -> int:
        return hash(self.logprobs.tobytes())


NOT_ECHOED = EchoedLogprobs.of(())
"""Result for a text whose log-probabilities were not asked for."""


def check_logprobs(top: int) -> None:
    """Raise BadRequest for a number of likeliest tokens that no request may ask for."""
    OPTIONS["logprobs"].check(top)


def check_echo(field: str, tokens: int, top: int | None) -> None:
    """Raise BadRequest for a prompt with too many log-probabilities."""
    if top is not None and tokens * (1 + top) > MAX_ECHOED:
        raise BadRequest(
            field, f"has {tokens} tokens with {1 + top} log-probabilities each; at most {MAX_ECHOED} are echoed"
        )


Message = generation_pb2.TokenLogprobs | calls_pb2.TokenLogprobs


def fill_logprobs(message: Message, logprobs: TokenLogprobs) -> None:
    """Write log-probabilities into an empty message."""
    message.logprob = logprobs.logprob
    message.top_ids.extend(token for token, _ in logprobs.top)
    message.top_logprobs.extend(value for _, value in logprobs.top)


def fill_echoed(messages: Any, echoed: EchoedLogprobs) -> None:
    """Append each token's log-probabilities to a field of the public API."""
    rows = zip(echoed.logprobs.tolist(), echoed.top_ids.tolist(), echoed.top_logprobs.tolist(), strict=True)
    for logprob, ids, values in rows:
        messages.add(logprob=logprob, top_ids=ids, top_logprobs=values)


def echoed_message(echoed: EchoedLogprobs) -> calls_pb2.EchoedLogprobs | None:
    """Convert an opening's log-probabilities to a message; None if none were asked for."""
    if not len(echoed):
        return None
    return calls_pb2.EchoedLogprobs(
        logprobs=echoed.logprobs.astype(_FLOAT).tobytes(),
        top=echoed.top,
        top_ids=echoed.top_ids.astype(_ID).tobytes(),
        top_logprobs=echoed.top_logprobs.astype(_FLOAT).tobytes(),
    )


def echoed_from(message: calls_pb2.EchoedLogprobs) -> EchoedLogprobs:
    """Read an opening's log-probabilities. Raises ValueError if they are malformed, or more than a request may ask
    for."""
    given = message.logprobs, message.top_ids, message.top_logprobs
    if max(map(len, given)) > NUMBER_BYTES * MAX_ECHOED or any(len(each) % NUMBER_BYTES for each in given):
        raise ValueError(f"echoed: has {sum(map(len, given))} bytes, which are no numbers of at most {MAX_ECHOED}")
    logprobs, top = np.frombuffer(message.logprobs, _FLOAT), message.top
    shape = len(logprobs), top
    if top > MAX_TOP_LOGPROBS or {len(each) for each in given[1:]} != {NUMBER_BYTES * len(logprobs) * top}:
        raise ValueError(f"echoed: {len(logprobs)} tokens with {top} likeliest ones each are not what it has")
    return EchoedLogprobs(
        logprobs,
        np.frombuffer(message.top_ids, _ID).reshape(shape),
        np.frombuffer(message.top_logprobs, _FLOAT).reshape(shape),
    )


def logprobs_from(messages: Sequence[Message]) -> tuple[TokenLogprobs, ...]:
    """Read the log-probabilities of a few tokens. Raises ValueError if they are malformed."""
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
    """True if these are the log-probabilities of `tokens` tokens for a request that asks for `top` likeliest tokens;
    None: it asks for no log-probabilities."""
    if top is None or len(logprobs) != tokens:
        return not logprobs and top is None
    ids: Iterable[int] = (token for each in logprobs for token, _ in each.top)
    return all(len(each.top) == min(top, vocabulary) for each in logprobs) and max(ids, default=0) < vocabulary
