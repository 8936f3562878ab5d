"""A request and its answer as clients see them: options, events, and how an answer whose stream broke is resumed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict, cast

import grpc.aio

from dendro.errors import BadRequest, Conflict, DendroError, EngineFailed, PeerLost, error_for
from dendro.text import Finish
from dendro.v1 import generation_pb2 as pb

REASON_KEY = "dendro-reason"
"""Trailing metadata that our own errors carry: a proxy's NOT_FOUND is told from ours by its absence."""
REASON_MARK = " [dendro: "
"""What the same reason follows in the details, since Serve's proxy loses the trailing metadata of an error."""

BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,  # the proxy or the router is gone
        grpc.StatusCode.CANCELLED,  # a replica was killed behind HAProxy
        grpc.StatusCode.INTERNAL,  # a replica was killed behind the Python proxy
        grpc.StatusCode.NOT_FOUND,  # the proxy is back, its routes are not
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes that, without our own reason beside them, mean that the stream broke on its way."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Mode(StrEnum):
    """Whether an answer is guessed at."""

    AUTO = "auto"  # a policy picks a shape for every round
    OFF = "off"
    FIXED = "fixed"  # every round has the shape that the request names


MODES = {
    Mode.AUTO: pb.Speculation.MODE_AUTO,
    Mode.OFF: pb.Speculation.MODE_OFF,
    Mode.FIXED: pb.Speculation.MODE_FIXED,
}
FINISHES = {
    pb.FINISH_REASON_END_OF_TEXT: Finish.END_OF_TEXT,
    pb.FINISH_REASON_LENGTH: Finish.LENGTH,
}


@dataclass(frozen=True, slots=True)
class Started:
    """The request was taken: what it is called, and what its noise is drawn from."""

    request_id: str
    model: str
    seed: int
    prompt_tokens: int
    prompt_digest: int  # of the tokens before the answer
    target: str  # digest of what the answer's tokens depend on beside the text: weights, dtype, exactness and others


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens of one round, and what they add to the text."""

    offset: int  # tokens of the answer before it
    token_ids: tuple[int, ...]
    text: str
    shape: str  # "off", "(3,2,1)"; empty where an answer was told from its record


@dataclass(frozen=True, slots=True)
class OpeningStats:
    """What opening the text took at a drafter or verifier."""

    restored_tokens: int
    processed_tokens: int
    open_us: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an answer may be guessed at; it changes no token. The server refuses what contradicts itself, by name.

    >>> Speculation.parse("auto", max_nodes=8) == Speculation(max_nodes=8)
    True
    >>> Speculation.parse("3,2,1") == Speculation(Mode.FIXED, "3,2,1")
    True
    """

    mode: Mode = Mode.AUTO
    shape: str = ""  # with FIXED: "(3,2,1)", "nodes(2,1)", "beam(4,3)", "dynamic(6,5,24)", "proposed(7)"
    policy: str = ""  # with AUTO, what picks the shapes; empty: the server's
    max_nodes: int | None = None  # guesses of a round at most; None: what the target takes
    deadline_ms: int | None = None  # how long a round waits for its draft at most; None: the server's limit

    @classmethod
    def parse(
        cls, text: str, policy: str = "", max_nodes: int | None = None, deadline_ms: int | None = None
    ) -> Speculation:
        """Read `auto` (or nothing), `off` or a shape; a text that is none of these is the server's to refuse."""
        word = text.strip()
        if word in ("", Mode.AUTO, Mode.OFF):
            return cls(Mode(word or Mode.AUTO), "", policy, max_nodes, deadline_ms)
        return cls(Mode.FIXED, text, policy, max_nodes, deadline_ms)


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """An answer's account of its rounds; of a resumed answer, of those since the last resume."""

    policy: str = ""  # what picked the shapes; "off" or "fixed" where the request left no choice
    rounds: int = 0
    pulls: dict[str, int] = field(default_factory=dict)  # how often each shape was asked for
    emitted: dict[int, int] = field(default_factory=dict)  # rounds that emitted N tokens, by N
    emitted_tokens: int = 0
    cut_tokens: int = 0  # of the last round, past the answer's end
    drafted_tokens: int = 0  # guesses of the trees that came in time
    accepted_tokens: int = 0
    discarded_tokens: int = 0
    trimmed_tokens: int = 0  # of the discarded, those that the verifier had no room for
    late_drafts: int = 0  # rounds whose tree was wanted and did not come
    rounds_us: int = 0  # what the rounds took: the sum of the five below
    draft_us: int = 0
    verify_us: int = 0
    queue_us: int = 0
    hop_us: int = 0  # the rest of all rounds but the first
    opening_us: int = 0  # the first round's rest: its wait for the text to be opened
    decode_tokens: int = 0  # emitted after the first round, ...
    decode_us: int = 0  # ... and the time from its end to the last one's
    verifier_moves: int = 0

    @property
    def contradictions(self) -> tuple[str, ...]:
        """What in the account does not add up; empty for every answer of a server that counts right."""
        cut = 1 if self.cut_tokens else 0
        parts_us = self.draft_us + self.verify_us + self.queue_us + self.hop_us + self.opening_us
        sums = (
            ("rounds, by shape", sum(self.pulls.values()), self.rounds),
            ("rounds, by emitted tokens", sum(self.emitted.values()), self.rounds),
            ("emitted_tokens", sum(tokens * rounds for tokens, rounds in self.emitted.items()), self.emitted_tokens),
            ("accepted_tokens, and one each round", self.accepted_tokens + self.rounds - cut, self.emitted_tokens),
            ("drafted_tokens", self.accepted_tokens + self.discarded_tokens, self.drafted_tokens),
            ("trimmed_tokens", min(self.trimmed_tokens, self.discarded_tokens), self.trimmed_tokens),
            ("rounds_us", parts_us, self.rounds_us),
        )
        return tuple(f"{name}: {found}, not {said}" for name, found, said in sums if found != said)

    @property
    def emitted_per_round(self) -> float:
        return self.emitted_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second once the text was processed."""
        return 1e6 * self.decode_tokens / self.decode_us if self.decode_us else 0.0


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of an answer, and its only proof."""

    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    session: str  # empty: none was asked for, or the store could not keep it
    speculation: SpeculationStats
    drafter: OpeningStats | None
    target: OpeningStats | None


Event = Started | Round | Complete


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    started: Started
    rounds: tuple[Round, ...]
    complete: Complete


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served."""

    name: str
    vocabulary: int
    max_length: int
    dtype: str
    drafters: tuple[str, ...]


class Options(TypedDict, total=False):
    """What a request may say beside its prompt; what is left out is the server's default."""

    model: str  # the target's name; default: the first
    temperature: float | None  # default 0: greedy
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None  # default: the session's, or one that the server draws and reports
    sample_index: int | None
    max_new_tokens: int | None
    ignore_end: bool  # go on past the end-of-text token
    session: str  # go on with this session
    keep_session: bool  # begin one
    speculation: Speculation | str  # a text as `Speculation.parse` reads it; default "auto"
    request_id: str  # default: random


def build_request(
    prompt: str | Sequence[int],
    *,
    model: str = "",
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    sample_index: int | None = None,
    max_new_tokens: int | None = None,
    ignore_end: bool = False,
    session: str = "",
    keep_session: bool = False,
    speculation: Speculation | str = "auto",
    request_id: str = "",
) -> pb.GenerateRequest:
    """The request's message. A number that its field cannot hold raises BadRequest; the rest the server checks."""
    request = pb.GenerateRequest(
        request_id=request_id or secrets.token_hex(16),
        model=model,
        ignore_end=ignore_end,
        session=session,
        keep_session=keep_session,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        for index, token in enumerate(prompt):
            if not 0 <= token < 1 << 32:
                raise BadRequest(f"prompt.token_ids[{index}]", f"{token} is no token id")
        request.token_ids.ids.extend(prompt)
    asked = Speculation.parse(speculation) if isinstance(speculation, str) else speculation
    request.speculation.mode = MODES[asked.mode]
    request.speculation.shape = asked.shape
    request.speculation.policy = asked.policy
    numbers = (
        (request.sampling, "temperature", temperature),
        (request.sampling, "top_k", top_k),
        (request.sampling, "top_p", top_p),
        (request.sampling, "min_p", min_p),
        (request.sampling, "seed", seed),
        (request.sampling, "sample_index", sample_index),
        (request, "max_new_tokens", max_new_tokens),
        (request.speculation, "speculation.max_nodes", asked.max_nodes),
        (request.speculation, "speculation.deadline_ms", asked.deadline_ms),
    )
    for message, name, value in numbers:
        if value is not None:
            try:
                setattr(message, name.removeprefix("speculation."), value)
            except (ValueError, TypeError):
                raise BadRequest(name, f"{value!r} is outside what the field holds") from None
    return request


class AnswerProgress:
    """How far an answer has come, and what to do when its stream breaks. Shared by all clients; does no I/O."""

    def __init__(self, request: pb.GenerateRequest, timeout_s: float, attempts: int) -> None:
        self.request = request
        self.timeout_s = timeout_s
        self.attempts = attempts
        self.token_ids: list[int] = []
        self.started: Started | None = None
        self.finished = False
        self._deadline = time.monotonic() + timeout_s
        self._failures = 0  # since the last token

    @property
    def remaining_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise PeerLost(f"no complete answer within {self.timeout_s:g} s")
        return left

    def next_request(self) -> pb.GenerateRequest:
        """The request as it stands: from the second call on it goes on after the tokens that we have."""
        if self.started is None:
            return self.request
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        request.resume.SetInParent()
        request.resume.token_ids.extend(self.token_ids)
        request.resume.seed = self.started.seed
        request.resume.prompt_tokens = self.started.prompt_tokens
        request.resume.prompt_digest = self.started.prompt_digest
        request.resume.target = self.started.target
        return request

    def take(self, response: pb.GenerateResponse) -> Event | None:
        """Check one message and say what it is; None for what the caller has had already."""
        kind = response.WhichOneof("event")
        if kind == "started":
            first = self.started is None
            said = response.started
            if said.offset != len(self.token_ids):
                raise EngineFailed(f"stream resumes at {said.offset}, not at {len(self.token_ids)}")
            begun = Started(said.request_id, said.model, said.seed, said.prompt_tokens, said.prompt_digest, said.target)
            self._check_begun(begun)
            self.started = begun
            return self.started if first else None
        if kind == "chunk":
            chunk = response.chunk
            if chunk.offset != len(self.token_ids):
                raise EngineFailed(f"chunk at offset {chunk.offset}, expected {len(self.token_ids)}")
            self.token_ids.extend(chunk.token_ids)
            self._failures = 0
            return Round(chunk.offset, tuple(chunk.token_ids), chunk.text, chunk.shape)
        if kind == "complete":
            complete = _complete(response.complete)
            if complete.completion_tokens != len(self.token_ids):
                raise EngineFailed(f"complete after {complete.completion_tokens} tokens, not {len(self.token_ids)}")
            self.finished = True
            return complete
        raise EngineFailed("stream holds an event that this client does not know")

    def _check_begun(self, begun: Started) -> None:
        """Raise Conflict where a resumed stream starts with other facts than the first one: its tokens would continue
        another text, or be another target's."""
        if (first := self.started) is None:
            return
        names = ["model", "seed", "prompt_tokens", "prompt_digest", *(["target"] if self.token_ids else [])]
        differ = [name for name in names if getattr(begun, name) != getattr(first, name)]
        if differ:
            raise Conflict(f"resume: the answer began with another {', '.join(differ)}; begin the turn again")

    def pause_after(self, error: grpc.RpcError | None) -> float:
        """Seconds to wait before the next call; raises, from the family, when there is to be none."""
        self._failures += 1
        if error is not None:
            meant = _meaning(error, self.timeout_s)
            if meant is not None:
                raise meant from error
        if self._failures >= self.attempts:
            said = f": {error.details()}" if error is not None else ""
            raise PeerLost(f"the stream broke {self._failures} times without a token{said}") from error
        return min(FIRST_PAUSE_S * 2 ** (self._failures - 1), LONGEST_PAUSE_S, self.remaining_s)


def _meaning(error: grpc.RpcError, timeout_s: float) -> DendroError | None:
    """The error that a status stands for, or None where the stream merely broke and the call may be made again."""
    code: grpc.StatusCode = error.code()
    said: str = error.details() or ""
    details, mark, _ = said.partition(REASON_MARK)
    trailing = cast(Sequence[tuple[str, str | bytes]], error.trailing_metadata() or ())
    ours = bool(mark) or any(key == REASON_KEY for key, _ in trailing)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerLost(f"no complete answer within {timeout_s:g} s")
    if code is grpc.StatusCode.UNAVAILABLE or (code in BROKEN and not ours):
        return None
    return error_for(code, details)


def _opening(said: pb.OpeningStats) -> OpeningStats:
    return OpeningStats(said.restored_tokens, said.processed_tokens, said.open_us)


def _complete(said: pb.GenerateComplete) -> Complete:
    finish = FINISHES.get(said.finish_reason)
    if finish is None:
        raise EngineFailed(f"stream ends for a reason that this client does not know: {said.finish_reason}")
    stats = said.speculation
    return Complete(
        finish=finish,
        prompt_tokens=said.usage.prompt_tokens,
        completion_tokens=said.usage.completion_tokens,
        session=said.session,
        speculation=SpeculationStats(
            policy=stats.policy,
            rounds=stats.rounds,
            pulls=dict(stats.pulls),
            emitted=dict(sorted(stats.emitted.items())),
            emitted_tokens=stats.emitted_tokens,
            cut_tokens=stats.cut_tokens,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            discarded_tokens=stats.discarded_tokens,
            trimmed_tokens=stats.trimmed_tokens,
            late_drafts=stats.late_drafts,
            rounds_us=stats.rounds_us,
            draft_us=stats.draft_us,
            verify_us=stats.verify_us,
            queue_us=stats.queue_us,
            hop_us=stats.hop_us,
            opening_us=stats.opening_us,
            decode_tokens=stats.decode_tokens,
            decode_us=stats.decode_us,
            verifier_moves=stats.verifier_moves,
        ),
        drafter=_opening(said.drafter) if said.HasField("drafter") else None,
        target=_opening(said.target) if said.HasField("target") else None,
    )


def models_of(said: pb.GetServerInfoResponse) -> tuple[ModelInfo, ...]:
    return tuple(
        ModelInfo(model.name, model.vocabulary, model.max_length, model.dtype, tuple(model.drafters))
        for model in said.models
    )


def collect(events: Sequence[Event]) -> Completion:
    """The whole answer of a stream that ended."""
    started, complete = events[0], events[-1]
    assert isinstance(started, Started) and isinstance(complete, Complete)
    rounds = tuple(event for event in events if isinstance(event, Round))
    return Completion(
        text="".join(part.text for part in rounds),
        token_ids=tuple(token for part in rounds for token in part.token_ids),
        started=started,
        rounds=rounds,
        complete=complete,
    )
