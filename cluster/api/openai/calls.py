"""Calls of tools, in the format that a chat template writes them: Hermes and Qwen, Llama 3, or Mistral."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from dendro.errors import BadRequest
from dendro.structure import Structure

from cluster.api.openai.answers import ChatForm, Choice
from cluster.api.openai.found_calls import CallMarks
from cluster.router.tokenizer import Tokenizer

PROBE = {
    "id": "probe0000",  # Mistral's templates want 9 letters and digits
    "type": "function",
    "function": {"name": "probe", "arguments": {"key": "value"}},
}
PROBED: Sequence[Mapping[str, Any]] = [
    {"role": "user", "content": "A question."},
    {"role": "assistant", "content": "", "tool_calls": [PROBE]},
]
"""A conversation with a call, which shows the format of a template."""
PROBED_TWICE: Sequence[Mapping[str, Any]] = [PROBED[0], {**PROBED[1], "tool_calls": [PROBE, PROBE]}]
"""A conversation whose answer has two calls, which not all templates write."""
DESCRIBED: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A function.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]
"""What the conversation can call, since templates may write no calls where no function is described."""
PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may or may not write this special token before a call, so it marks none."""
_NAME, _VALUE = r'(?P<head>\{"name": ?)"probe"', r'\{"key": ?"value"\}'
_ID = r'(?:, ?"id": ?"probe0000")?'
_FORMATS = tuple(
    re.compile(pattern)
    for pattern in (
        rf'(?P<marker><tool_call>)(?P<opening>\s*){_NAME}(?P<middle>, ?"arguments": ?){_VALUE}'
        r"(?P<closing>\}\s*</tool_call>)",
        rf'(?P<marker>\[TOOL_CALLS\])(?P<opening>\s*\[){_NAME}(?P<middle>, ?"arguments": ?){_VALUE}'
        rf"{_ID}(?P<closing>\}}\])",
        rf'(?P<marker>(?:{re.escape(PYTHON_TAG)})?)(?P<opening>){_NAME}(?P<middle>, ?"parameters": ?){_VALUE}'
        r"(?P<closing>\})",
    )
)
"""Hermes and Qwen, Mistral, Llama 3."""
ID_CHARACTERS = 9
"""Length of a call's id: Mistral's templates take no other."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts around the name and the arguments of a call."""

    marker: str  # ends the prompt; may be a special token, which no structure has
    opening: str  # text from the marker to the name in its quotes
    middle: str  # text between the name and the arguments
    closing: str  # text after the arguments
    between: str | None  # text between the arguments of a call and the next name; None: an answer has one call

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallFormat:
        """The format of a target's chat template, which is looked for once. Raises BadRequest where it writes another,
        or there is no template."""
        if tokenizer not in _FOUND:
            found = cls._written_in(tokenizer.chat(PROBED, False, None, DESCRIBED))
            _FOUND[tokenizer] = found and found._of_several(tokenizer)
        if (found := _FOUND[tokenizer]) is None:
            raise BadRequest(
                "tools",
                "the target's chat template writes calls in none of the formats of Hermes, Qwen, Llama 3 and Mistral",
            )
        return found

    @classmethod
    def _written_in(cls, text: str) -> CallFormat | None:
        for each in _FORMATS:
            if found := each.search(text):
                opening = found["opening"] + found["head"]
                return cls(found["marker"], opening, found["middle"], found["closing"], None)
        return None

    def _of_several(self, tokenizer: Tokenizer) -> CallFormat:
        """The format with what the template writes between two calls, where it writes two."""
        try:
            text = tokenizer.chat(PROBED_TWICE, False, None, DESCRIBED)
        except BadRequest:
            return self
        one = re.escape(f'{self.opening}"probe"{self.middle}') + _VALUE + _ID
        found = re.search(one + r'(?P<between>.{1,200}?)"probe"' + re.escape(self.middle), text, re.DOTALL)
        return self if found is None else replace(self, between=found["between"])

    @property
    def marks(self) -> CallMarks:
        """The texts by which calls are found in an answer."""
        return CallMarks("" if self.marker == PYTHON_TAG else self.marker, self.closing.strip("}] \n"))

    def structure(self, schemas: Mapping[str, str]) -> Structure:
        """A call of one of these functions, after the marker. schemas: of their arguments as JSON, by name"""
        rules = ["start: " + " | ".join(f"call_{index}" for index in range(len(schemas)))]
        for index, (name, schema) in enumerate(schemas.items()):
            before = json.dumps(f'{self.opening}"{name}"{self.middle}')
            rules += [f"call_{index}: {before} arguments_{index} {json.dumps(self.closing)}"]
            rules += [f"arguments_{index}: %json {schema}"]
        return Structure.grammar("\n".join(rules))

    def structure_of_several(self, schemas: Mapping[str, str]) -> Structure:
        """One or more calls of these functions. Raises BadRequest where the template writes one alone."""
        if self.between is None:
            raise BadRequest("parallel_tool_calls", "is true, but the target's chat template writes one call an answer")
        opening, between, closing = map(json.dumps, (self.opening, self.between, self.closing))
        rules = [f"start: {opening} call ({between} call)* {closing}"]
        rules += ["call: " + " | ".join(f"call_{index}" for index in range(len(schemas)))]
        for index, (name, schema) in enumerate(schemas.items()):
            before = json.dumps(f'"{name}"{self.middle}')
            rules += [f"call_{index}: {before} arguments_{index}", f"arguments_{index}: %json {schema}"]
        return Structure.grammar("\n".join(rules))

    def structure_or(self, schemas: Mapping[str, str], several: bool, answer: str) -> Structure:
        """A call of one of these functions with its marker, or several where the template writes them, or an answer.
        answer: the right side of its rule, which comes last"""
        made = self.structure_of_several if several and self.between is not None else self.structure
        start, *rules = made(schemas).texts[0].split("\n")
        called = f"{json.dumps(self.marker) if self.marks.marker else ''} ({start.removeprefix('start: ')})"
        return Structure.grammar("\n".join([f"start: answer | {called}", *rules, f"answer: {answer}"]))

    def parsed(self, text: str) -> Call | None:
        """The call in the text of an answer so far; None before its name is whole."""
        found = re.match(re.escape(self.opening) + r'"([\w-]+)"' + re.escape(self.middle), text)
        return found and Call(found[1], text[found.end() :], self.closing)


_FOUND: WeakKeyDictionary[Tokenizer, CallFormat | None] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Call:
    """A call, as far as it has come."""

    name: str
    rest: str  # the arguments and what follows
    closing: str

    @property
    def whole(self) -> str | None:
        """The arguments; None where they are cut off."""
        try:
            _, end = json.JSONDecoder().raw_decode(self.rest)
        except (ValueError, RecursionError):
            return None
        return self.rest[:end] if self.rest.startswith(self.closing, end) else None

    @property
    def arguments(self) -> str:
        """The arguments, or what there is of them."""
        return self.rest if self.whole is None else self.whole


def described_call(request_id: str, choice: int, number: int, name: str, arguments: str) -> dict[str, Any]:
    """A call as it is sent. number: among the choice's calls"""
    named = hashlib.sha256(f"{request_id} {choice} {number}".encode()).hexdigest()[:ID_CHARACTERS]
    return {"id": named, "type": "function", "function": {"name": name, "arguments": arguments}}


class CallForm(ChatForm):
    """Answers of one request that are calls."""

    def __init__(self, form: CallFormat, request_id: str) -> None:
        self._format = form
        self._request_id = request_id
        self._tails: dict[int, str] = {}  # by choice: text after its name that was not sent, as it may be the closing

    def beginning(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": None}}

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        begun = choice.index in self._tails
        call = None if begun else self._format.parsed(choice.text)
        if not begun and call is None:
            return {"delta": {}}
        unsent = self._tails[choice.index] + text if call is None else call.rest
        ready = max(len(unsent) - len(self._format.closing), 0)
        self._tails[choice.index] = unsent[ready:]
        return self._delta(choice, call, unsent[:ready])

    def end(self, choice: Choice) -> dict[str, Any]:
        call = self._format.parsed(choice.text)
        if call is None:
            return {"delta": {}}
        if choice.index not in self._tails:
            return self._delta(choice, call, call.arguments)
        return self._delta(choice, None, call.arguments[len(call.rest) - len(self._tails[choice.index]) :])

    def _delta(self, choice: Choice, call: Call | None, arguments: str) -> dict[str, Any]:
        """More of the arguments. call: where its name was not sent yet"""
        if call is not None:
            return {"delta": {"tool_calls": [{"index": 0, **self._described(choice, call, arguments)}]}}
        if not arguments:
            return {"delta": {}}
        return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}}

    def message(self, choice: Choice) -> dict[str, Any]:
        call = self._format.parsed(choice.text)
        calls = {"tool_calls": [self._described(choice, call, call.arguments)]} if call is not None else {}
        return {"message": {"role": "assistant", "content": None, "refusal": None} | calls}

    def _described(self, choice: Choice, call: Call, arguments: str) -> dict[str, Any]:
        return described_call(self._request_id, choice.index, 0, call.name, arguments)

    def finish(self, choice: Choice) -> str:
        call = self._format.parsed(choice.text)
        return super().finish(choice) if call is None or call.whole is None else "tool_calls"
