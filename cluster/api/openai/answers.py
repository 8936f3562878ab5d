"""Writes the events of a request as the objects of OpenAI's API, one by one or as a whole."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dendro.answer import complete_from
from dendro.v1 import generation_pb2 as pb

from cluster.api.openai.errors import to_json
from cluster.api.openai.fields import EXTENSION
from cluster.explaining import round_fields
from cluster.router.token_texts import TokenOffsets, VocabularyTexts

FINISHES = {
    pb.FINISH_REASON_END_OF_TEXT: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_STOP_TOKEN: "stop",
    pb.FINISH_REASON_STRUCTURE: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}

LEAST_LOGPROB = -9999.0
"""The log-probability of a chance of 0, as in OpenAI's API: JSON has no infinities."""


@dataclass
class Choice:
    """An answer as far as it has arrived."""

    index: int
    texts: list[str] = field(default_factory=list)
    offsets: TokenOffsets | None = None  # places of a completion's tokens; None before the first log-probability
    logprobs: list[Mapping[str, bytes | None]] = field(default_factory=list)  # parts, as `_encoded`; none of a stream
    tokens: list[int] = field(default_factory=list)  # tokens of the answer
    complete: pb.GenerateComplete | None = None

    def append(self, text: str) -> None:
        """Add a part of the text."""
        self.texts.append(text)

    def offsets_of(self, tokens: Sequence[int], texts: VocabularyTexts, shows_special: bool, begins: bool) -> list[int]:
        """The places of the next tokens in the text (`TokenOffsets`)."""
        self.offsets = self.offsets or TokenOffsets(texts, shows_special, begins)
        return self.offsets.of(tokens)

    @property
    def text(self) -> str:
        """The text so far."""
        self.texts = ["".join(self.texts)]
        return self.texts[0]


class AnswerForm(Protocol):
    """Makes the JSON objects of an endpoint."""

    prefix: str  # beginning of all ids
    whole: str  # the type of a whole answer
    part: str  # the type of a part of one

    def beginning(self) -> dict[str, Any] | None:
        """Fields of a choice in a first part of its stream, before any text; None: there is no such part."""
        ...

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        """Fields of a choice in a part with more text."""
        ...

    def end(self, choice: Choice) -> dict[str, Any]:
        """Fields of a choice in its last part of a stream."""
        ...

    def message(self, choice: Choice) -> dict[str, Any]:
        """Fields of a whole choice, outside streams."""
        ...

    def finish(self, choice: Choice) -> str:
        """OpenAI's word for how a choice ended."""
        ...

    def reasoning_tokens(self, choice: Choice) -> int:
        """The number of the answer's tokens that are reasoning, its markers counted."""
        ...

    def logprobs(
        self, choice: Choice, tokens: Sequence[int], given: Sequence[pb.TokenLogprobs], texts: VocabularyTexts
    ) -> dict[str, Any]:
        """Log-probabilities of tokens, which come after the choice's. The first token of a text has none."""
        ...


class _TextForm:
    def finish(self, choice: Choice) -> str:
        assert choice.complete is not None
        return FINISHES[choice.complete.finish_reason]

    def reasoning_tokens(self, choice: Choice) -> int:
        return 0


class ChatForm(_TextForm):
    """`/v1/chat/completions`."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def beginning(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def end(self, choice: Choice) -> dict[str, Any]:
        return {"delta": {}}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def logprobs(
        self, choice: Choice, tokens: Sequence[int], given: Sequence[pb.TokenLogprobs], texts: VocabularyTexts
    ) -> dict[str, Any]:
        def described(token: int, logprob: float) -> dict[str, Any]:
            return {
                "token": texts.text(token),
                "logprob": max(logprob, LEAST_LOGPROB),
                "bytes": list(texts.bytes_of(token)),
            }

        content = [
            described(token, each.logprob)
            | {"top_logprobs": [described(*top) for top in zip(each.top_ids, each.top_logprobs, strict=True)]}
            for token, each in zip(tokens, given, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionForm(_TextForm):
    """`/v1/completions`."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self, shows_special: bool = False, before: str | Sequence[int] | None = None) -> None:
        """shows_special: whether texts have special tokens   before: the prompt; None: it continues a session"""
        self._shows_special = shows_special
        self._before = before

    def beginning(self) -> dict[str, Any] | None:
        return None

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": text}

    def end(self, choice: Choice) -> dict[str, Any]:
        return {"text": ""}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def logprobs(
        self, choice: Choice, tokens: Sequence[int], given: Sequence[pb.TokenLogprobs], texts: VocabularyTexts
    ) -> dict[str, Any]:
        missing = len(tokens) - len(given)  # 1 where these are a prompt's first
        begins = missing > 0
        if choice.offsets is None and not begins and self._before is not None:
            begins = not texts.give_text(self._before, self._shows_special)
        return {
            "tokens": [texts.text(token) for token in tokens],
            "token_logprobs": [None] * missing + [max(each.logprob, LEAST_LOGPROB) for each in given],
            "top_logprobs": [None] * missing + [_by_text(each, texts) for each in given],
            "text_offset": choice.offsets_of(tokens, texts, self._shows_special, begins),
        }


def _by_text(given: pb.TokenLogprobs, texts: VocabularyTexts) -> dict[str, float]:
    """The likeliest tokens' log-probabilities by text. Of tokens with one text, such as bytes that are no whole
    character, the likeliest one's."""
    found: dict[str, float] = {}
    for token, logprob in zip(given.top_ids, given.top_logprobs, strict=True):
        found.setdefault(texts.text(token), max(logprob, LEAST_LOGPROB))
    return found


class ObjectWriter:
    """Takes the events of one request, in order."""

    def __init__(self, form: AnswerForm, texts: VocabularyTexts | None, include_usage: bool, streams: bool) -> None:
        """texts: None where no log-probabilities are asked for   streams: True if parts are sent as they come, so that
        there is no `whole` answer"""
        self._form = form
        self._texts = texts
        self._include_usage = include_usage
        self._streams = streams
        self._started = pb.GenerateStarted()
        self._created = int(time.time())
        self._choices: dict[int, Choice] = {}

    def take(self, event: pb.GenerateResponse) -> Iterator[dict[str, Any]]:
        """Yield the parts that a stream has for an event."""
        choice = self._choices.setdefault(event.sample, Choice(event.sample))
        match event.WhichOneof("event"):
            case "started":
                self._started = event.started
                if (beginning := self._form.beginning()) is not None:
                    yield self._part(choice, beginning)
            case "prompt":
                yield self._piece(choice, event.prompt.text, event.prompt.token_ids, event.prompt.logprobs)
            case "chunk":
                chunk = event.chunk
                choice.tokens += chunk.token_ids
                if chunk.text or chunk.logprobs or chunk.HasField("tree"):
                    piece = self._piece(choice, chunk.text, chunk.token_ids, chunk.logprobs)
                    yield piece | (_round(choice, chunk) if chunk.HasField("tree") else {})
            case "complete":
                choice.complete = event.complete
                last = self._part(choice, self._form.end(choice), finish=self._form.finish(choice))
                yield last | self._extension([choice])

    def _piece(
        self, choice: Choice, text: str, tokens: Sequence[int], given: Sequence[pb.TokenLogprobs]
    ) -> dict[str, Any]:
        logprobs = None
        if self._texts is not None and tokens:  # the only token of a prompt has no log-probability
            logprobs = self._form.logprobs(choice, tokens, given, self._texts)
        choice.append(text)
        if logprobs is not None and not self._streams:
            choice.logprobs.append(_encoded(logprobs))
        return self._part(choice, self._form.piece(choice, text), logprobs)

    def _part(
        self, choice: Choice, has: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        choices = [{"index": choice.index, **has, "logprobs": logprobs, "finish_reason": finish}]
        return self._envelope(self._form.part) | {"choices": choices} | usage

    def last(self) -> dict[str, Any]:
        """The part of a stream that has the usage, after all others."""
        return self._envelope(self._form.part) | {"choices": [], "usage": self.usage}

    def whole(self) -> bytes:
        """The whole answer as JSON, once all events were taken."""
        found = [self._choices[index] for index in sorted(self._choices)]
        choices = []
        for each in found:
            if each.complete is not None:
                fields = {"index": each.index, **self._form.message(each), "finish_reason": self._form.finish(each)}
                choices.append(_object(fields, logprobs=_joined(each.logprobs)))
        fields = self._envelope(self._form.whole) | {"usage": self.usage} | self._extension(found)
        return _object(fields, choices=b"[" + b",".join(choices) + b"]")

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._form.prefix + self._started.request_id,
            "object": kind,
            "created": self._created,
            "model": self._started.model,
            "system_fingerprint": self._started.target,
        }

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all answers together; the prompt counts once."""
        ended = [each.complete for each in self._choices.values() if each.complete is not None]
        prompt, answers = ended[0].usage.prompt_tokens, sum(each.usage.completion_tokens for each in ended)
        cached = prompt - 1 - ended[0].target.processed_tokens if ended[0].HasField("target") else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": max(cached, 0), "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": sum(map(self._form.reasoning_tokens, self._choices.values())),
                "audio_tokens": 0,
                "accepted_prediction_tokens": sum(each.usage.accepted_prediction_tokens for each in ended),
                "rejected_prediction_tokens": sum(each.usage.rejected_prediction_tokens for each in ended),
            },
        }

    def _extension(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Fields that OpenAI's API lacks: seed, session, and the statistics of the rounds."""
        found = []
        for each in choices:
            assert each.complete is not None
            complete = complete_from(each.complete)
            found.append(
                {
                    "index": each.index,
                    "finish": str(complete.finish),
                    "stop_string": complete.stop_string,
                    "session": complete.session,
                    "speculation": dataclasses.asdict(complete.speculation),
                }
            )
        return {EXTENSION: {"seed": self._started.seed, "mode": self._started.mode, "choices": found}}


def _round(choice: Choice, chunk: pb.GenerateChunk) -> dict[str, Any]:
    """Fields of a part's round, if the request asks for trees. A round's text may be in a later part."""
    return {EXTENSION: {"round": {"index": choice.index, **round_fields(chunk)}}}


def _encoded(logprobs: Mapping[str, Any]) -> dict[str, bytes | None]:
    """A part's log-probabilities as they are kept: each list as JSON without its brackets. The values themselves would
    take several times the memory."""
    return {name: None if value is None else to_json(value)[1:-1] for name, value in logprobs.items()}


def _joined(parts: Sequence[Mapping[str, bytes | None]]) -> bytes:
    """Log-probabilities of all parts of an answer as JSON; null where there are none."""
    if not parts:
        return b"null"
    lists = {name: b",".join(filter(None, (part[name] for part in parts))) for name in parts[0]}
    return _object({}, **{name: b"null" if parts[0][name] is None else b"[%b]" % lists[name] for name in lists})


def _object(fields: Mapping[str, Any], **others: bytes) -> bytes:
    """An object as JSON. others: fields that are JSON already"""
    made = {name: to_json(value) for name, value in fields.items()} | others
    return b"{" + b",".join(to_json(name) + b":" + value for name, value in made.items()) + b"}"
