"""Answers of chats that may have calls of tools beside text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.api.openai.answers import ChatForm, Choice
from cluster.api.openai.calls import described_call
from cluster.api.openai.found_calls import CallFinder, FoundCall


class AnswerParts:
    """The content and the calls of one answer. Whitespace between text and a call is dropped."""

    def __init__(self, finder: CallFinder, most_calls: int | None) -> None:
        """most_calls: later ones are left out"""
        self._finder = finder
        self._most_calls = most_calls
        self._blank = ""  # whitespace that was not given yet, as a call may follow
        self._contents: list[str] = []
        self.calls: list[FoundCall] = []

    @property
    def content(self) -> str:
        """All text."""
        return "".join(self._contents)

    def push(self, text: str) -> tuple[str, list[FoundCall]]:
        """The content and the calls that the answer's next text adds."""
        return self._taken(self._finder.push(text))

    def end(self) -> tuple[str, list[FoundCall]]:
        """The content and the calls that are left at the answer's end."""
        content, calls = self._taken(self._finder.end())
        if not self.calls:
            content += self._blank
            self._contents.append(self._blank)
        return content, calls

    def _taken(self, found: list[str | FoundCall]) -> tuple[str, list[FoundCall]]:
        contents: list[str] = []
        calls: list[FoundCall] = []
        for each in found:
            if isinstance(each, FoundCall):
                self._blank = ""
                if self._most_calls is None or len(self.calls) < self._most_calls:
                    self.calls.append(each)
                    calls.append(each)
                continue
            text = self._blank + each
            if self.calls and not (self._contents or contents):
                text = text.lstrip()
            words = text.rstrip()
            self._blank = text[len(words) :]
            if words:
                contents.append(words)
        self._contents += contents
        return "".join(contents), calls


class MixedForm(ChatForm):
    """Answers of one request that may have calls."""

    def __init__(self, request_id: str, most_calls: int | None, finder: Callable[[], CallFinder]) -> None:
        """finder: makes that of a choice"""
        self._request_id = request_id
        self._most_calls = most_calls
        self._finder = finder
        self._parts: dict[int, AnswerParts] = {}  # by choice: what was read

    def _of(self, choice: Choice) -> AnswerParts:
        if choice.index not in self._parts:
            self._parts[choice.index] = AnswerParts(self._finder(), self._most_calls)
        return self._parts[choice.index]

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        return self._delta(choice, *self._of(choice).push(text))

    def end(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, *self._of(choice).end())

    def _delta(self, choice: Choice, content: str, calls: list[FoundCall]) -> dict[str, Any]:
        first = len(self._of(choice).calls) - len(calls)
        listed = [{"index": first + at, **each} for at, each in enumerate(self._described(choice, first, calls))]
        return {"delta": ({"content": content} if content else {}) | ({"tool_calls": listed} if listed else {})}

    def _described(self, choice: Choice, first: int, calls: list[FoundCall]) -> list[dict[str, Any]]:
        return [
            described_call(self._request_id, choice.index, first + at, each.name, each.arguments)
            for at, each in enumerate(calls)
        ]

    def message(self, choice: Choice) -> dict[str, Any]:
        parts = self._of(choice)
        message = {"role": "assistant", "content": parts.content or (None if parts.calls else ""), "refusal": None}
        calls = {"tool_calls": self._described(choice, 0, parts.calls)} if parts.calls else {}
        return {"message": message | calls}

    def finish(self, choice: Choice) -> str:
        ended = super().finish(choice)
        return "tool_calls" if ended == "stop" and self._of(choice).calls else ended
