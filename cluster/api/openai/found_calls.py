"""Finds the calls of tools in an answer that may have text, too. Each character is looked at once, as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

MOST_DEPTH = 64
"""Objects and arrays in each other, in a call."""
MOST_BLANK = 128
"""Whitespace at which a call may begin or close."""
ARGUMENTS = ("arguments", "parameters")
"""Keys of a call's arguments."""
_BETWEEN = re.compile(r"[\s,:0-9+\-.eEtrufalsn]*")  # JSON outside of texts and brackets
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_CLOSES = {"}": "{", "]": "["}


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call of a function that the request describes."""

    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Texts between which a model writes a call."""

    marker: str  # stands before a call, or a list of them; empty: a call begins a line
    end_marker: str  # stands after a call; may be empty


class JsonScanner:
    """Finds where a JSON object or array ends in a text that comes in parts. What it takes may still be no JSON."""

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets
        self._in_string = self._escapes = False
        self.ended = self.broken = False

    def take(self, text: str) -> int:
        """Read text. Returns how many characters are of the value: all, unless it `ended` or is `broken` after them."""
        at = 0
        while at < len(text) and not (self.ended or self.broken):
            at = self._take_string(text, at) if self._in_string else self._take_between(text, at)
        return at

    def _take_string(self, text: str, at: int) -> int:
        if self._escapes:
            self._escapes = False
            return at + 1
        match = _IN_STRING.match(text, at)
        assert match is not None
        at = match.end()
        if at == len(text):
            return at
        self.broken = text[at] < " "
        self._in_string, self._escapes = text[at] != '"', text[at] == "\\"
        return at if self.broken else at + 1

    def _take_between(self, text: str, at: int) -> int:
        if not self._open:  # it has not begun
            at += len(text[at:]) - len(text[at:].lstrip())
        else:
            match = _BETWEEN.match(text, at)
            assert match is not None
            at = match.end()
        if at == len(text):
            return at
        found = text[at]
        if found == '"' and self._open:
            self._in_string = True
        elif found in "{[" and len(self._open) < MOST_DEPTH:
            self._open.append(found)
        elif self._open and self._open[-1] == _CLOSES.get(found):
            self._open.pop()
            self.ended = not self._open
        else:
            self.broken = True
        return at if self.broken else at + 1


def begun_at_end(text: str, marker: str) -> int:
    """Characters at the end of a text with which a marker begins."""
    most = min(len(marker) - 1, len(text))
    return next((count for count in range(most, 0, -1) if text.endswith(marker[:count])), 0)


class CallFinder:
    """Divides the text of one answer into text and calls. What begins as a call and is none is text: its brackets do
    not close, it is no JSON, or it calls no function of `names` with an object."""

    def __init__(self, marks: CallMarks, names: Collection[str]) -> None:
        self._marks = marks
        self._names = names
        line = rf"(?m)^[ \t;]{{0,{MOST_BLANK - 1}}}(?=\{{)"
        self._begins = re.compile(re.escape(marks.marker) if marks.marker else line)
        self._fresh = True  # nothing since the last line's end, the last call, or the answer's beginning
        self._held = ""  # text that may begin a call
        self._scanner: JsonScanner | None = None  # reads the call that has begun
        self._parts: list[str] = []  # text of that call, from its marker on
        self._after = ""  # text after its JSON
        self._json: list[str] = []

    def push(self, text: str) -> list[str | FoundCall]:
        """Take the answer's next text; return the parts that it completes."""
        found: list[str | FoundCall] = []
        while text:
            text = self._outside(text, found) if self._scanner is None else self._inside(self._scanner, text, found)
        return found

    def end(self) -> list[str | FoundCall]:
        """Return the parts that are left at the answer's end. A whole call may lack its end marker."""
        if self._scanner is None:
            held, self._held = self._held, ""
            return [held] if held else []
        found: list[str | FoundCall] = []
        if self._scanner.ended and self._marks.end_marker.startswith(self._after.strip()):
            self._close(found)
        else:
            self._reject(found)
        return found

    def _outside(self, text: str, found: list[str | FoundCall]) -> str:
        """Take text up to where a call may begin. Returns the rest."""
        text, self._held = self._held + text, ""
        for match in self._begins.finditer(text):
            if self._marks.marker or self._fresh or match.start():
                self._say(text[: match.start()], found)
                self._scanner = JsonScanner()
                self._parts, self._json, self._after = [match[0]], [], ""
                return text[match.end() :]
        kept = len(text) - self._may_begin(text)
        self._say(text[:kept], found)
        self._held = text[kept:]
        return ""

    def _may_begin(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of a call."""
        marker = self._marks.marker
        if marker:
            return begun_at_end(text, marker)
        line = text.rpartition("\n")[2]
        begins_line = self._fresh or len(line) < len(text)
        return len(line) if begins_line and len(line) < MOST_BLANK and not line.strip(" \t;") else 0

    def _inside(self, scanner: JsonScanner, text: str, found: list[str | FoundCall]) -> str:
        """Take text of a call. Returns the rest."""
        if not scanner.ended:
            taken = scanner.take(text)
            self._json.append(text[:taken])
            text = text[taken:]
            if scanner.broken:
                self._reject(found)
                return text
            if not scanner.ended or (self._marks.end_marker and not text):
                return ""
        end_marker = self._marks.end_marker
        self._after += text
        begun = self._after.lstrip() if end_marker else self._after
        near = len(self._after) - len(begun) <= MOST_BLANK
        if near and begun.startswith(end_marker):
            rest = begun[len(end_marker) :]
            self._after = self._after[: len(self._after) - len(rest)]
            self._close(found)
            return rest
        if not (near and end_marker.startswith(begun)):
            rest, self._after = self._after, ""
            self._reject(found)
            return rest
        return ""

    def _close(self, found: list[str | FoundCall]) -> None:
        """The call's text is whole."""
        calls = _calls_of("".join(self._json), self._names)
        if calls is None:
            self._reject(found)
            return
        found += calls
        self._scanner, self._fresh = None, True

    def _reject(self, found: list[str | FoundCall]) -> None:
        """Turn what began as a call into text."""
        self._scanner = None
        self._say("".join([*self._parts, *self._json, self._after]), found)

    def _say(self, text: str, found: list[str | FoundCall]) -> None:
        if text:
            found.append(text)
            self._fresh = text.endswith("\n")


def _calls_of(text: str, names: Collection[str]) -> list[FoundCall] | None:
    """The calls in a JSON object or array; None where it has others, or has none."""
    try:
        given = json.loads(text, parse_constant=_no_constant)
        found = list(_each_call(given if isinstance(given, list) else [given], names))
    except (ValueError, RecursionError):
        return None
    return found or None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _each_call(given: list[Any], names: Collection[str]) -> Iterator[FoundCall]:
    """Raises ValueError for what is no call."""
    for each in given:
        if not isinstance(each, dict) or each.get("name") not in list(names):
            raise ValueError("no call of a described function")
        keys = [key for key in ARGUMENTS if key in each]
        if len(keys) != 1 or not isinstance(each[keys[0]], dict):
            raise ValueError("no object of arguments")
        arguments = json.dumps(each[keys[0]], ensure_ascii=False, allow_nan=False)
        arguments.encode()  # half a surrogate pair is no text
        yield FoundCall(each["name"], arguments)
