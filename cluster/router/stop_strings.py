"""Stop strings: found in the text of an answer as it grows, across the borders of tokens and rounds.

Matching begins with the answer's first character, and compares code points of the decoded text: no normal forms, no
upper and lower case. The stop string that ends first counts; of several that end with the same character, the longest.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

from dendro.text import Finish, StopStrings, Verdict

from cluster.router.tokenizer import TextStream, Tokenizer

PART_TOKENS = 64
"""Tokens of a resumed answer that are decoded at once. A part with a stop string is decoded again token by token."""


class StopAutomaton:
    """The automaton of Aho and Corasick (1975): finds any of several strings in time linear in the text.

    A state is the longest end of the text that begins one of the strings; state 0 is the empty one. Immutable.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.ends: list[str] = [""]  # by state: the longest string that ends the state; empty: none
        self.length: list[int] = [0]  # by state: number of characters
        self._next: list[dict[str, int]] = [{}]  # by state: the next state, by character
        self._shorter: list[int] = [0]  # by state: the longest shorter state that ends it
        for string in strings:
            self._add(string)
        waiting = deque(self._next[0].values())
        while waiting:  # shorter states first
            state = waiting.popleft()
            for character, longer in self._next[state].items():
                self._shorter[longer] = self.after(self._shorter[state], character)
                self.ends[longer] = self.ends[longer] or self.ends[self._shorter[longer]]
                waiting.append(longer)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            longer = self._next[state].setdefault(character, len(self._next))
            if longer == len(self._next):
                self.ends.append("")
                self.length.append(self.length[state] + 1)
                self._next.append({})
                self._shorter.append(0)
            state = longer
        self.ends[state] = string

    def after(self, state: int, character: str) -> int:
        """State after one more character. A whole text takes at most two steps per character."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)


class StopSearch:
    """Divides a growing text into a part that may be sent and an end that could begin a stop string.

    The returned text depends on the whole text alone and not on how it was divided, so a resumed answer continues at
    the right character.

    >>> search = StopSearch(StopAutomaton(["END"]), included=False)
    >>> [search.push(part) for part in ("an E", "nd EN", "D more")], search.found
    (['an ', 'End ', ''], 'END')
    """

    def __init__(self, automaton: StopAutomaton, included: bool) -> None:
        """included: True if the stop string that is found is returned, too"""
        self.found = ""  # the stop string, once its last character was pushed
        self._automaton = automaton
        self._included = included
        self._state = 0
        self._held = ""  # the end of the text, not returned yet: the state's characters

    def push(self, text: str) -> str:
        """Append characters. Returns the text that may be sent: all but the longest end that could begin a stop string.
        Once a stop string is found, the rest up to it; then nothing more."""
        if self.found:
            return ""
        known, waiting = len(self._held), self._held + text
        for end, character in enumerate(text, known + 1):
            self._state = self._automaton.after(self._state, character)
            if found := self._automaton.ends[self._state]:
                self.found, self._held = found, ""
                return waiting[: end if self._included else end - len(found)]
        place = len(waiting) - self._automaton.length[self._state]
        self._held = waiting[place:]
        return waiting[:place]

    def flush(self) -> str:
        """Return the text that was held back. Called after the last character."""
        text, self._held, self._state = self._held, "", 0
        return text


class StoppedText:
    """The text of an answer that a stop string may end. A round is decoded in `cut`, before the next one, as there is
    none after the stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: StopStrings, before: Sequence[int] = ()) -> None:
        """before: the text that the answer continues"""
        self.length = 0  # tokens of the answer that were appended, up to the one that completes the stop string
        self._stream = TextStream(tokenizer, before)
        self._search = StopSearch(StopAutomaton(stops.strings), stops.included)
        self._decoded: deque[str] = deque()  # texts of the rounds after which `text_of` was not called yet

    def copy(self) -> StoppedText:
        """A copy that continues independently from here, with the same automaton. Called before `cut`."""
        other = copy.copy(self)
        other._stream, other._search, other._decoded = self._stream.copy(), copy.copy(self._search), deque()
        return other

    @property
    def found(self) -> str:
        """The stop string that ended the answer; empty where none did."""
        return self._search.found

    def append(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add to what may be sent. Tokens after a stop string are ignored."""
        parts = []
        for start in range(0, len(tokens), PART_TOKENS):
            if self.found:
                break
            parts.append(self._searched(tokens[start : start + PART_TOKENS]))
        return "".join(parts)

    def _searched(self, tokens: Sequence[int]) -> str:
        stream, again = self._stream.copy(), copy.copy(self._search)
        text = self._search.push(self._stream.append(tokens))
        if not self.found:
            self.length += len(tokens)
            return text
        for token in tokens:  # find the token that completes the stop string
            self.length += 1
            again.push(stream.append([token]))
            if again.found:
                break
        return text

    def finish(self) -> str:
        """Return the text that was held back. Called after the last token. A stop string may end in it: the replacement
        characters of an incomplete character are part of the text."""
        return self._search.push(self._stream.finish()) + self._search.flush()

    def cut(self, verdict: Verdict) -> Verdict:
        """The round's verdict, up to the token that completes a stop string. Called once a round, in order."""
        before = self.length
        text = self.append(verdict.tokens)
        self._decoded.append(text + self.finish() if verdict.finished else text)
        return verdict.cut(self.length - before, Finish.STOP_STRING) if self.found else verdict

    def text_of(self, verdict: Verdict) -> str:
        """The text that a round's chunk adds. Called once a round, in order."""
        return self._decoded.popleft()


AnswerText = TextStream | StoppedText
"""The text of an answer: without stop strings, or with some."""
