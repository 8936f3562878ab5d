"""A request and its answer as clients see them: options and events."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, MutableSequence, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Unpack, cast

from dendro.arguments import fill_number, ids_of, items_of, pairs_of, shown, switch_of, text_of, texts_of
from dendro.chat import Chat, fill_chat
from dendro.errors import BadRequest, EngineFailed
from dendro.logprobs import TokenLogprobs
from dendro.options import OPTIONS, JsonType, Option, Options
from dendro.speculation import Mode, Speculation
from dendro.structure import Structure, fill_structure
from dendro.text import Finish, StopStrings
from dendro.v1 import generation_pb2 as pb

REASON_KEY = "dendro-reason"
"""Trailing metadata of a router's own errors; those of gRPC and of a gateway do not have it."""
RETRY_AFTER_KEY = "dendro-retry-after-s"
"""Trailing metadata of a call that a limit of its key refused: whole seconds after which it may not."""


Prompt = str | Sequence[int] | Chat
"""A text, token ids, or a conversation."""

MODES = {
    Mode.AUTO: pb.Speculation.MODE_AUTO,
    Mode.OFF: pb.Speculation.MODE_OFF,
    Mode.FIXED: pb.Speculation.MODE_FIXED,
}
FINISHES = {
    pb.FINISH_REASON_END_OF_TEXT: Finish.END_OF_TEXT,
    pb.FINISH_REASON_LENGTH: Finish.LENGTH,
    pb.FINISH_REASON_STOP_STRING: Finish.STOP_STRING,
    pb.FINISH_REASON_STOP_TOKEN: Finish.STOP_TOKEN,
    pb.FINISH_REASON_STRUCTURE: Finish.STRUCTURE,
}


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted: its id, its seed, and the facts that a resumed stream must repeat."""

    request_id: str
    model: str
    seed: int
    prompt_tokens: int
    prompt_digest: int  # digest of the tokens before the answer
    target: str  # digest of all that the tokens depend on besides the text: weights, dtype, exactness and others
    mode: str = "coupled"  # the verification mode
    lossy: bool = False  # the answer's tokens do not have the target's law
    sample: int = 0  # the number of the answer, of a request with `n`
    session: str = ""  # the session's token, which exists once `Complete` has come; empty: none was requested


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A part of the request's own prompt, sent if the request asks for an echo."""

    offset: int  # tokens of the text before this part, a session's earlier turns included
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one per token, if asked for; None: the first token of a text
    sample: int = 0  # number of the answer (`Started.sample`)


@dataclass(frozen=True, slots=True)
class ExpectedRound:
    """A policy's expectation of a round of an arm."""

    shape: str  # the name of `Round.shape`
    tokens: float
    spread: float  # distance by which `tokens` may be wrong
    round_us: float  # 0: no round was timed yet

    @property
    def tokens_per_s(self) -> float:
        return 1e6 * self.tokens / self.round_us if self.round_us > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RoundTree:
    """The draft tree of a round, parents first. Row 0 is the last token before the round; the others are guesses."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # the parent's row of each guess
    texts: tuple[str, ...]
    chances: tuple[float, ...]  # estimated probability that each guess is reached; empty: nothing estimated them
    accepted: tuple[int, ...]  # rows of the accepted guesses, from the root down
    proposed: tuple[int, ...]  # rows of a drafter's tree that the router's proposers added
    missed: bool  # a drafter was asked for the tree, and sent none in time
    arms: tuple[ExpectedRound, ...]  # empty: the policy does not estimate them
    draft_us: int
    verify_us: int
    queue_us: int


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens of one round, and their text."""

    offset: int  # tokens of the answer before this round
    token_ids: tuple[int, ...]
    text: str  # text of the tokens; an end that could begin a stop string is sent with a later round
    shape: str  # "off", "(3,2,1)", "small:(3,2,1)" of one of several drafters; empty: sent from the answer's record
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request asks for them
    sample: int = 0  # number of the answer (`Started.sample`)
    tree: RoundTree | None = None  # if the request asks for trees; None where the answer is sent from its record


@dataclass(frozen=True, slots=True)
class OpeningStats:
    """The work and time of opening the text at a drafter or verifier."""

    restored_tokens: int
    processed_tokens: int
    open_us: int


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """One drafter's part in an answer. Guesses that both the drafter and proposers made count as the drafter's."""

    name: str
    rounds: int  # rounds with the drafter's tree
    late_drafts: int  # rounds for which the drafter was asked and its tree did not come
    drafted_tokens: int  # guesses of its rounds
    accepted_tokens: int
    opening: OpeningStats | None  # None: it did not open the text


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Statistics of an answer's rounds; for a resumed answer, of the rounds since the last resume."""

    policy: str = ""  # the policy that picked the shapes; "off" or "fixed": the request set them
    rounds: int = 0
    rounds_by_shape: dict[str, int] = field(default_factory=dict)  # key: requested shape (`Round.shape`)
    rounds_by_tokens: dict[int, int] = field(default_factory=dict)  # key: emitted tokens, after any cut
    emitted_tokens: int = 0
    cut_tokens: int = 0  # tokens of the last round past the answer's end
    drafted_tokens: int = 0  # guesses of the trees that came in time
    accepted_tokens: int = 0
    discarded_tokens: int = 0
    trimmed_tokens: int = 0  # discarded guesses for which the verifier had no room
    late_drafts: int = 0  # rounds whose tree was requested and did not come
    rounds_us: int = 0  # time of the rounds: the sum of the next five
    draft_us: int = 0
    verify_us: int = 0
    queue_us: int = 0
    hop_us: int = 0  # the remaining time of all rounds but the first
    opening_us: int = 0  # the remaining time of the first round: mostly waiting for the text to be opened
    decode_tokens: int = 0  # tokens emitted after the first round
    decode_us: int = 0  # time from the end of the first round to the end of the last
    verifier_moves: int = 0
    ahead_us: int = 0  # time of steps before their rounds began, which no part of `rounds_us` has
    ordered_trees: int = 0  # rounds whose tree went from the drafter straight to the verifier
    step_sizes: tuple[int, ...] = ()  # numbers of rows that the target pads its steps to; empty: multiples of 8

    @property
    def contradictions(self) -> tuple[str, ...]:
        """The sums that do not hold; empty if the server counts correctly."""
        cut = 1 if self.cut_tokens else 0
        emitted = sum(tokens * rounds for tokens, rounds in self.rounds_by_tokens.items())
        parts_us = self.draft_us + self.verify_us + self.queue_us + self.hop_us + self.opening_us
        sums = (
            ("rounds, by shape", sum(self.rounds_by_shape.values()), self.rounds),
            ("rounds, by emitted tokens", sum(self.rounds_by_tokens.values()), self.rounds),
            ("emitted_tokens", emitted, self.emitted_tokens),
            ("accepted_tokens, and one each round", self.accepted_tokens + self.rounds - cut, self.emitted_tokens),
            ("drafted_tokens", self.accepted_tokens + self.discarded_tokens, self.drafted_tokens),
            ("trimmed_tokens", min(self.trimmed_tokens, self.discarded_tokens), self.trimmed_tokens),
            ("rounds_us", parts_us, self.rounds_us),
        )
        return tuple(f"{name}: {total}, not {reported}" for name, total, reported in sums if total != reported)

    @property
    def emitted_per_round(self) -> float:
        return self.emitted_tokens / self.rounds if self.rounds else 0.0

    @property
    def timed_rounds(self) -> int:
        """Rounds that have a step of their own, at least 1. Without a fixed shape the verifier runs the first round in
        the step of the prompt's last rows."""
        return max(self.rounds - (self.policy != Mode.FIXED), 1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first round; 0 for a single round."""
        return 1e6 * self.decode_tokens / self.decode_us if self.decode_us else 0.0


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of an answer. An answer without it is incomplete."""

    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    session: str  # empty: none was requested
    speculation: SpeculationStats
    drafter: OpeningStats | None  # opening at the drafter with the most rounds; None: none opened the text
    target: OpeningStats | None
    stop_string: str = ""  # the stop string that ended the answer; empty: none did
    drafters: tuple[DrafterStats, ...] = ()  # drafters that were asked for trees, in the order of first trees
    sample: int = 0  # number of the answer (`Started.sample`)
    accepted_prediction_tokens: int = 0  # tokens of the answer that its prediction had next
    rejected_prediction_tokens: int = 0  # the prediction's other tokens


Event = Started | EchoedPrompt | Round | Complete


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    started: Started
    rounds: tuple[Round, ...]
    complete: Complete
    prompt: tuple[EchoedPrompt, ...] = ()  # the request's own prompt, where it asks for an echo

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of each token, if the request asks for them."""
        return tuple(each for part in self.rounds for each in part.logprobs)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served."""

    name: str
    vocabulary: int
    max_length: int
    dtype: str
    drafters: tuple[str, ...]


def build_request(prompt: Prompt, **options: Unpack[Options]) -> pb.GenerateRequest:
    """The request's message. Raises BadRequest, naming it, for an argument that its field cannot hold, and for stop
    strings that no server accepts, which may be longer than a message; the server checks the rest."""
    given: dict[str, Any] = {"speculation": "auto", **options}
    request = pb.GenerateRequest()
    request.sampling.SetInParent()
    if isinstance(prompt, str):
        request.text = text_of("prompt", prompt)
    elif isinstance(prompt, Chat):
        fill_chat(request.chat, prompt)
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "prompt.token_ids", prompt)
    for name, value in given.items():
        if name not in OPTIONS:
            raise TypeError(f"a request has no option {name!r}")
        if name in _SPECIAL:
            _SPECIAL[name](request, value)
        else:
            _fill(request, OPTIONS[name], value)
    StopStrings.of(request.stop, request.include_stop)
    request.request_id = request.request_id or secrets.token_hex(16)
    return request


def build_tokenize(prompt: str | Chat, model: str, literal_prompt: bool) -> pb.TokenizeRequest:
    """The message for the tokens of a prompt. Raises BadRequest naming the argument."""
    request = pb.TokenizeRequest(
        model=text_of("model", model), literal_prompt=switch_of("literal_prompt", literal_prompt)
    )
    if isinstance(prompt, Chat):
        fill_chat(request.chat, prompt)
    else:
        request.text = text_of("prompt", prompt)
    return request


def build_detokenize(token_ids: Sequence[int], model: str, show_special_tokens: bool) -> pb.DetokenizeRequest:
    """The message for the text of tokens. Raises BadRequest naming the argument."""
    request = pb.DetokenizeRequest(
        model=text_of("model", model), show_special_tokens=switch_of("show_special_tokens", show_special_tokens)
    )
    _extend(request.token_ids, "token_ids", token_ids)
    return request


def _fill(request: pb.GenerateRequest, option: Option, value: Any) -> None:
    """Write the value of an option that is one field, of the request or of its sampling."""
    name = option.name
    message: Any = request.sampling if name in pb.Sampling.DESCRIPTOR.fields_by_name else request
    match option.json_type:
        case JsonType.BOOLEAN:
            setattr(message, name, switch_of(name, value))
        case JsonType.STRING:
            setattr(message, name, text_of(name, value))
        case JsonType.ARRAY:
            _extend(getattr(message, name), name, value)
        case _:
            if value is not None:
                fill_number(message, name, value)


def _fill_stop(request: pb.GenerateRequest, stop: Any) -> None:
    request.stop.extend(StopStrings.of(texts_of("stop", stop), False).strings)


def _fill_prediction(request: pb.GenerateRequest, prediction: Any) -> None:
    request.prediction.extend(texts_of("prediction", prediction))


def _fill_structure(request: pb.GenerateRequest, structure: Any) -> None:
    if structure is None:
        return
    if not isinstance(structure, Structure):
        raise BadRequest("structure", f"must be a Structure; got {shown(structure)}")
    fill_structure(request.structure, structure)


def _fill_bad_words(request: pb.GenerateRequest, bad_words: Any) -> None:
    for index, word in enumerate(items_of("bad_words", bad_words)):
        if isinstance(word, str):
            request.bad_word_texts.append(text_of(f"bad_words[{index}]", word))
        else:
            _extend(request.sampling.bad_words.add().ids, f"bad_words[{index}]", word)


def _fill_logit_bias(request: pb.GenerateRequest, logit_bias: Any) -> None:
    for token, bias in pairs_of("logit_bias", logit_bias):
        try:
            if isinstance(token, str):
                request.logit_bias_texts[text_of(f"logit_bias[{shown(token)}]", token)] = bias
            else:
                request.sampling.logit_bias[token] = bias
        except BadRequest:
            raise
        except Exception:  # protobuf's, or of the value's own class
            raise BadRequest(f"logit_bias[{shown(token)}]", f"{shown(bias)} is no bias of a token id") from None


def _fill_speculation(request: pb.GenerateRequest, speculation: Any) -> None:
    options = Speculation.parse(speculation) if isinstance(speculation, str) else speculation
    if not isinstance(options, Speculation):
        raise BadRequest("speculation", f"must be a text or a Speculation; got {shown(options)}")
    if not isinstance(options.mode, str) or options.mode not in MODES:
        raise BadRequest("speculation.mode", f"{shown(options.mode)} is none of {', '.join(MODES)}")
    request.speculation.mode = MODES[options.mode]
    request.speculation.shape = text_of("speculation.shape", options.shape)
    request.speculation.policy = text_of("speculation.policy", options.policy)
    for name, value in (("max_nodes", options.max_nodes), ("deadline_ms", options.deadline_ms)):
        if value is not None:
            fill_number(request.speculation, name, value, f"speculation.{name}")


_SPECIAL: Mapping[str, Callable[[pb.GenerateRequest, Any], None]] = {
    "stop": _fill_stop,
    "prediction": _fill_prediction,
    "structure": _fill_structure,
    "bad_words": _fill_bad_words,
    "logit_bias": _fill_logit_bias,
    "speculation": _fill_speculation,
}
"""Writes the options whose values are several fields, or are checked before they are copied."""


def sendable(request: pb.GenerateRequest, limit: int) -> pb.GenerateRequest:
    """The request itself. Raises BadRequest, naming its largest field, if its message has more than `limit` bytes."""
    size = request.ByteSize()
    if size <= limit:
        return request
    largest, least = "request", size
    for each, _ in request.ListFields():
        rest = pb.GenerateRequest()
        rest.CopyFrom(request)
        rest.ClearField(cast(Any, each.name))
        if (left := rest.ByteSize()) < least:
            largest, least = each.name, left
    name = "prompt" if largest in ("text", "token_ids") else largest
    raise BadRequest(name, f"has {size - least} bytes of a message of {size}; a message has at most {limit}")


def count_of_answers(request: pb.GenerateRequest) -> int:
    """Number of answers that a request asks for. Raises BadRequest for a number of answers that no server gives, and
    for several where there can be only one."""
    if request.HasField("n"):
        OPTIONS["n"].check(request.n)
    if request.n > 1:
        _check_several(request)
    return max(request.n, 1)


def _check_several(request: pb.GenerateRequest) -> None:
    """Raise BadRequest if a request that asks for several answers can have only one."""
    for name in ("session", "keep_session"):
        if getattr(request, name):
            raise BadRequest("n", f"is {request.n}, but a session continues with one answer; ask without {name}")
    if request.HasField("resume"):
        raise BadRequest(
            "n", f"is {request.n} in a resume; resume each answer by a request of its own, with its sample_index"
        )
    first = request.sampling.sample_index
    if first + request.n > 1 << 32:
        raise BadRequest("sample_index", f"is {first}; {request.n} answers from there on exceed 32 bits")


def request_of_sample(request: pb.GenerateRequest, sample: int) -> pb.GenerateRequest:
    """A request of its own for one of several answers. It is a copy of the whole message."""
    one = pb.GenerateRequest()
    one.CopyFrom(request)
    one.ClearField("n")
    one.echo = request.echo and not sample
    one.sampling.sample_index = request.sampling.sample_index + sample
    return one


def one_answer(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return the request. Raises BadRequest if it asks for several answers."""
    if request.n > 1:
        raise BadRequest("n", f"is {request.n}, but this call returns one answer; use generate_samples or generate")
    return request


def _extend(field: MutableSequence[int], name: str, tokens: Iterable[int]) -> None:
    field.extend(ids_of(name, tokens))


def fields_of(kind: type[Started | OpeningStats | DrafterStats | SpeculationStats], message: object) -> dict[str, Any]:
    """The fields of a message that have the names of a dataclass's; `sample` is that of the response."""
    names = (each.name for each in dataclasses.fields(kind) if each.name != "sample")
    return {name: getattr(message, name) for name in names}


def tree_from(message: pb.RoundTree) -> RoundTree:
    """The draft tree of a round. Raises EngineFailed where it is no tree."""
    rows = len(message.token_ids)
    guesses = range(1, rows)
    if (
        not rows
        or len(message.texts) != rows
        or len(message.parents) != len(guesses)
        or len(message.chances) not in (0, len(guesses))
        or any(parent >= row for row, parent in zip(guesses, message.parents, strict=True))
        or any(row not in guesses for row in (*message.accepted, *message.proposed))
    ):
        raise EngineFailed("chunk: its tree is malformed")
    return RoundTree(
        token_ids=tuple(message.token_ids),
        parents=tuple(message.parents),
        texts=tuple(message.texts),
        chances=tuple(message.chances),
        accepted=tuple(message.accepted),
        proposed=tuple(message.proposed),
        missed=message.missed,
        arms=tuple(ExpectedRound(each.shape, each.tokens, each.spread, each.round_us) for each in message.arms),
        draft_us=message.draft_us,
        verify_us=message.verify_us,
        queue_us=message.queue_us,
    )


def complete_from(message: pb.GenerateComplete, sample: int = 0) -> Complete:
    """The end of an answer. Raises EngineFailed for an unknown finish reason. sample: the number of the answer"""
    finish = FINISHES.get(message.finish_reason)
    if finish is None:
        raise EngineFailed(f"stream ends with an unknown finish reason: {message.finish_reason}")
    stats = message.speculation
    counts: dict[str, Any] = {
        "rounds_by_shape": dict(stats.rounds_by_shape),
        "rounds_by_tokens": dict(sorted(stats.rounds_by_tokens.items())),
        "step_sizes": tuple(stats.step_sizes),
    }
    return Complete(
        finish=finish,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        session=message.session,
        speculation=SpeculationStats(**fields_of(SpeculationStats, stats) | counts),
        drafter=_opening_from(message.drafter) if message.HasField("drafter") else None,
        target=_opening_from(message.target) if message.HasField("target") else None,
        stop_string=message.stop_string,
        accepted_prediction_tokens=message.usage.accepted_prediction_tokens,
        rejected_prediction_tokens=message.usage.rejected_prediction_tokens,
        drafters=tuple(_drafter_from(each) for each in message.drafters),
        sample=sample,
    )


def _opening_from(message: pb.OpeningStats) -> OpeningStats:
    return OpeningStats(**fields_of(OpeningStats, message))


def _drafter_from(message: pb.DrafterStats) -> DrafterStats:
    opening = _opening_from(message.opening) if message.HasField("opening") else None
    return DrafterStats(**fields_of(DrafterStats, message) | {"opening": opening})


def models_of(response: pb.GetServerInfoResponse) -> tuple[ModelInfo, ...]:
    return tuple(
        ModelInfo(model.name, model.vocabulary, model.max_length, model.dtype, tuple(model.drafters))
        for model in response.models
    )


async def collect_stream(
    events: AsyncGenerator[Event, None], each: Callable[[Event], object] = lambda event: None
) -> Completion:
    """The whole answer, from its stream. `each` is called with every event when it comes; the stream ends where that
    raises."""
    received: list[Event] = []
    async with aclosing(events):
        async for event in events:
            received.append(event)
            each(event)
    return collect(received)


def collect(events: Sequence[Event]) -> Completion:
    """The whole answer, from all events of its stream."""
    started, complete = events[0], events[-1]
    assert isinstance(started, Started) and isinstance(complete, Complete)
    rounds = tuple(event for event in events if isinstance(event, Round))
    return Completion(
        text="".join(part.text for part in rounds),
        token_ids=tuple(token for part in rounds for token in part.token_ids),
        started=started,
        rounds=rounds,
        complete=complete,
        prompt=tuple(event for event in events if isinstance(event, EchoedPrompt)),
    )


def collect_samples(events: Sequence[Event]) -> tuple[Completion, ...]:
    """The answers of a request with `n`, from all events of its stream."""
    answers: dict[int, list[Event]] = {}
    for event in events:
        answers.setdefault(event.sample, []).append(event)
    return tuple(collect(answers[sample]) for sample in sorted(answers))
