"""Answers of chats that may have reasoning, text and calls of tools."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.api.openai.answers import ChatForm, Choice
from cluster.api.openai.calls import described_call
from cluster.api.openai.found_calls import CallFinder, CallMarks, FoundCall
from cluster.api.openai.reasoning import ReasoningMarkers, ReasoningReader
from cluster.router.tokenizer import Tokenizer

WINDOW = 256
"""Last tokens among which the end of reasoning is looked for, to count it."""


@dataclass(frozen=True, slots=True)
class MixedParts:
    """Kinds of parts that an answer may have beside text."""

    markers: ReasoningMarkers | None  # around reasoning; None: it has none
    begun: bool  # True if the prompt began the reasoning
    marks: CallMarks | None  # around calls; None: it has none
    names: Sequence[str]  # functions that can be called
    most_calls: int | None  # later calls are left out
    tokenizer: Tokenizer  # shows the markers of reasoning
    before: str = ""  # text at the prompt's end that begins a call


@dataclass
class Added:
    """Text, reasoning and calls that a part of an answer adds."""

    reasoning: str
    content: str
    calls: Sequence[FoundCall]


class AnswerParts:
    """The reasoning, the content and the calls of one answer. Whitespace between text and a call is left out."""

    def __init__(self, parts: MixedParts) -> None:
        self._most_calls = parts.most_calls
        self._reader = ReasoningReader(parts.markers, parts.begun) if parts.markers is not None else None
        self._finder = CallFinder(parts.marks, parts.names) if parts.marks is not None else None
        self._blank = ""  # whitespace that was not given yet, as a call may follow
        self._reasonings: list[str] = []
        self._contents: list[str] = []
        self._has_content = False
        self.calls: list[FoundCall] = []
        if self._finder is not None and parts.before:
            self._finder.push(parts.before)

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(self._reasonings)

    @property
    def content(self) -> str:
        """All text but reasoning and calls."""
        return "".join(self._contents)

    @property
    def reasons(self) -> bool:
        """True while reasoning has begun and not ended."""
        return self._reader is not None and self._reader.inside

    @property
    def has_reasoning(self) -> bool:
        """True once reasoning has begun."""
        return self._reader is not None and self._reader.found

    def push(self, text: str) -> Added:
        """Take the answer's next text; return what it adds to text, reasoning and calls."""
        reasoning = ""
        if self._reader is not None:
            reasoning, text = self._reader.push(text)
        return self._added(reasoning, self._found(text))

    def end(self) -> Added:
        """Return the text, reasoning and calls that are left at the answer's end."""
        reasoning, text = self._reader.end() if self._reader is not None else ("", "")
        added = self._added(reasoning, self._found(text) + (self._finder.end() if self._finder is not None else []))
        if not self.calls:  # whitespace at the end belongs to the text
            self._contents.append(self._blank)
            added.content += self._blank
        return added

    def _found(self, text: str) -> list[str | FoundCall]:
        return [text] if self._finder is None else self._finder.push(text)

    def _added(self, reasoning: str, found: list[str | FoundCall]) -> Added:
        contents, calls = [], []
        for each in found:
            if not isinstance(each, FoundCall):
                contents.append(each if self._finder is None else self._content_of(each))
                continue
            self._blank = ""
            if self._most_calls is None or len(self.calls) < self._most_calls:
                calls.append(each)
                self.calls.append(each)
        self._reasonings.append(reasoning)
        self._contents += contents
        return Added(reasoning, "".join(contents), calls)

    def _content_of(self, text: str) -> str:
        """More content, without whitespace at its end."""
        text = self._blank + text
        if self.calls and not self._has_content:
            text = text.lstrip()
        words = text.rstrip()
        self._blank = text[len(words) :]
        self._has_content = self._has_content or bool(words)
        return words


class MixedForm(ChatForm):
    """Answers of one request that may have these parts."""

    def __init__(self, request_id: str, parts: MixedParts) -> None:
        self._request_id = request_id
        self._parts = parts
        self._answers: dict[int, AnswerParts] = {}  # by choice: what was read
        self._reasoned: dict[int, int] = {}  # by choice: tokens up to the end of reasoning

    def _of(self, choice: Choice) -> AnswerParts:
        if choice.index not in self._answers:
            self._answers[choice.index] = AnswerParts(self._parts)
        return self._answers[choice.index]

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        answer = self._of(choice)
        added = answer.push(text)
        if answer.has_reasoning and not answer.reasons and choice.index not in self._reasoned:
            self._reasoned[choice.index] = self._tokens_of_reasoning(choice.tokens)
        return self._delta(choice, added)

    def end(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, self._of(choice).end())

    def _delta(self, choice: Choice, added: Added) -> dict[str, Any]:
        first = len(self._of(choice).calls) - len(added.calls)
        calls = [{"index": first + at, **each} for at, each in enumerate(self._described(choice, first, added.calls))]
        given = {"reasoning_content": added.reasoning, "content": added.content, "tool_calls": calls}
        return {"delta": {name: value for name, value in given.items() if value}}

    def _described(self, choice: Choice, first: int, calls: Sequence[FoundCall]) -> list[dict[str, Any]]:
        return [
            described_call(self._request_id, choice.index, first + at, each.name, each.arguments)
            for at, each in enumerate(calls)
        ]

    def message(self, choice: Choice) -> dict[str, Any]:
        answer = self._of(choice)
        content = answer.content or (None if answer.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.has_reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = self._described(choice, 0, answer.calls)
        return {"message": message}

    def finish(self, choice: Choice) -> str:
        ended = super().finish(choice)
        return "tool_calls" if ended == "stop" and self._of(choice).calls else ended

    def reasoning_tokens(self, choice: Choice) -> int:
        answer = self._of(choice)
        return self._reasoned.get(choice.index, len(choice.tokens) if answer.has_reasoning else 0)

    def _tokens_of_reasoning(self, tokens: Sequence[int]) -> int:
        """The number of tokens up to the marker that ended it, which is among the last."""
        assert self._parts.markers is not None
        end, before = self._parts.markers.end, max(len(tokens) - WINDOW, 0)
        last, decode = tokens[before:], self._parts.tokenizer.decode
        return before + bisect_left(range(len(last) + 1), True, key=lambda count: end in decode(last[:count]))
