"""Reasoning that a model writes before its answer, between markers of its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from dendro.errors import BadRequest
from dendro.lark_forms import literal
from dendro.patterns import slashed
from dendro.structure import Structure, StructureForm

from cluster.api.openai.found_calls import begun_at_end
from cluster.distinct_keys import json_of
from cluster.router.tokenizer import Tokenizer

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""Markers that are looked for in templates which read no `reasoning_content`."""
QUESTION, THOUGHT, ANSWER = "A question.", "A thought.", "An answer."
_MARKER = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_WRITTEN = re.compile(rf"{_MARKER}\s*{re.escape(THOUGHT)}\s*{_MARKER}\s*{re.escape(ANSWER)}")


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts before and after reasoning."""

    begin: str
    end: str

    def place(self, prompt: str) -> ReasoningPlace:
        """Where an answer to this prompt has reasoning, by what the prompt ends with."""
        begun = prompt.rfind(self.begin)
        if begun < 0:
            return ReasoningPlace.POSSIBLE
        rest = prompt[begun + len(self.begin) :]
        if not rest.strip():
            return ReasoningPlace.BEGUN
        return ReasoningPlace.ENDED if rest.strip() == self.end else ReasoningPlace.POSSIBLE

    @property
    def closing(self) -> str:
        """The end of reasoning that the prompt began, as templates write it for an answer without any."""
        return f"\n{self.end}\n\n"

    def structure(self, structure: Structure, begun: bool, tokenizer: Tokenizer) -> Structure | None:
        """A structure that begins after the reasoning, which an answer has if it was `begun`, and else may have. None
        where there is no such structure: a marker is a special token, which no structure has, or it is a grammar."""
        if not is_plain(self.begin + self.end, tokenizer) or (answer := rule_of(structure)) is None:
            return None
        begin, end = rf"\s*{literal(self.begin)}", literal(self.end)
        rules = [
            "start: REASONING answer" + ("" if begun else " | answer"),
            rf"REASONING: /{'' if begun else begin}(?s:.*){end}\n{{0,2}}/ & ~/(?s:.*){end}(?s:.*)[^\n](?s:.*)/",
            f"answer: {answer}",
        ]
        return Structure.grammar("\n".join(rules))


def is_plain(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text has no special token, which no structure has either."""
    tokens = tokenizer.encode(text, begins=False)
    return tokenizer.visible(tokens) == tokens


def rule_of(structure: Structure) -> str | None:
    """A structure as the right side of a rule; None for a grammar, which has several. Raises BadRequest for the text of
    a schema that is no JSON: what follows a schema would be read as rules."""
    match structure.form:
        case StructureForm.JSON_SCHEMA:
            try:
                json_of(structure.texts[0])
            except ValueError as error:
                raise BadRequest(structure.field, f"is no JSON schema: {error}") from None
            return f"%json {structure.texts[0]}"
        case StructureForm.REGEX:
            return f"/{slashed(structure.texts[0])}/"
        case StructureForm.CHOICES:
            return f"/{'|'.join(map(literal, structure.texts))}/"
        case StructureForm.GRAMMAR:
            return None


class ReasoningPlace(Enum):
    """Where an answer has reasoning."""

    POSSIBLE = "the answer may begin with it"
    BEGUN = "the prompt began it"
    ENDED = "the prompt ended it; the answer has none"


_FOUND: WeakKeyDictionary[Tokenizer, ReasoningMarkers | None] = WeakKeyDictionary()


def markers_of(tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """The markers of a target's chat template, which are looked for once; None where it has none."""
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = _markers_of(tokenizer)
    return _FOUND[tokenizer]


def _markers_of(tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """The markers that a template writes around the
    `reasoning_content` of an answer, or between which it leaves text of an earlier answer out, or the one that it
    begins an answer with, or both where it begins an answer without reasoning."""
    asked = {"role": "user", "content": QUESTION}
    reasoned = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    if found := _WRITTEN.search(_rendered(tokenizer, [asked, reasoned], False)):
        return ReasoningMarkers(found[1], found[2])
    for begin, end in KNOWN:
        earlier = {"role": "assistant", "content": f"{begin}\n{THOUGHT}\n{end}\n\n{ANSWER}"}
        text = _rendered(tokenizer, [asked, earlier, asked], False)
        opening = _rendered(tokenizer, [asked], True)
        closed = _rendered(tokenizer, [asked], True, {"enable_thinking": False})
        ends = (opening.rstrip().endswith(begin), re.search(rf"{re.escape(begin)}\s*{re.escape(end)}\s*$", closed))
        if (ANSWER in text and THOUGHT not in text) or any(ends):
            return ReasoningMarkers(begin, end)
    return None


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    opens_answer: bool,
    names: Mapping[str, Any] | None = None,
) -> str:
    try:
        return tokenizer.chat(messages, opens_answer, names)
    except BadRequest:  # there is no template, or it refuses these messages
        return ""


class Trimmed:
    """A text that comes in parts, without whitespace at its beginning and end."""

    def __init__(self) -> None:
        self._begun = False
        self._blank = ""  # whitespace that may be at the end

    def push(self, text: str) -> str:
        """Take the text's next part; return what it adds to the trimmed text."""
        text = self._blank + text
        text = text if self._begun else text.lstrip()
        words = text.rstrip()
        self._begun, self._blank = self._begun or bool(words), text[len(words) :]
        return words


class ReasoningState(Enum):
    BEFORE = "it may begin"
    INSIDE = "it has begun"
    ENDING = "it has ended, and whitespace may follow"
    AFTER = "what follows it, or an answer without it"


class ReasoningReader:
    """Divides the text of one answer into reasoning and what follows it, both trimmed where they meet. An answer that
    does not begin with the marker has no reasoning."""

    def __init__(self, markers: ReasoningMarkers, begun: bool) -> None:
        """begun: True if the prompt began the reasoning"""
        self._markers = markers
        self._state = ReasoningState.INSIDE if begun else ReasoningState.BEFORE
        self._held = ""  # may be a part of a marker
        self._reasoning = Trimmed()
        self.found = begun  # True if the answer has reasoning

    @property
    def inside(self) -> bool:
        """True while the reasoning has begun and not ended."""
        return self._state is ReasoningState.INSIDE

    def push(self, text: str) -> tuple[str, str]:
        """Take the answer's next text; return what it adds to the reasoning, and to the text after it."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state is ReasoningState.BEFORE:
            text = self._before(text)
        if self._state is ReasoningState.INSIDE:
            reasoning, text = self._inside(text)
        if self._state is ReasoningState.ENDING:
            text = text.lstrip()
            self._state = ReasoningState.AFTER if text else ReasoningState.ENDING
        return reasoning, text

    def end(self) -> tuple[str, str]:
        """Return the reasoning and the text that are left at the answer's end."""
        held, self._held = self._held, ""
        return (self._reasoning.push(held), "") if self._state is ReasoningState.INSIDE else ("", held)

    def _before(self, text: str) -> str:
        begin, words = self._markers.begin, text.lstrip()
        if words.startswith(begin):
            self._state, self.found = ReasoningState.INSIDE, True
            return words[len(begin) :]
        if begin.startswith(words):
            self._held = text
            return ""
        self._state = ReasoningState.AFTER
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        words, end, rest = text.partition(self._markers.end)
        if end:
            self._state = ReasoningState.ENDING
            return self._reasoning.push(words), rest
        kept = len(text) - begun_at_end(text, self._markers.end)
        self._held = text[kept:]
        return self._reasoning.push(text[:kept]), ""
