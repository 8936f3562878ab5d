"""Compiles the structures of requests, and follows an answer's tokens through a compiled one.

llguidance does the work: an Earley parser over a lexer of derivatives. Here a token is allowed exactly if the answer's
bytes with the token's can still become a text of the structure; `tests/dendro/test_grammars.py` compares that with
trying every token. llguidance is optional: without it, `Grammars.compiled` refuses every structure.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dendro.errors import BadRequest
from dendro.structure import Structure, StructureForm
from dendro.tree import DraftTree

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

COMPILE_S = 10.0
"""How long a request waits for its structure to be compiled."""
COMPILED_AT_ONCE = 2
KEPT = 64
"""Compiled structures that are kept, the last used ones."""
INSTALL = "needs the package llguidance: pip install 'dendroaspis[structured]'"
HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it only one spelling of text that must follow is allowed: the one of a tokenizer's own."""
OPTIONS_LINE = re.compile(r"^\s*%llguidance", re.MULTILINE)
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "whitespace_pattern": " ?", "lenient": False}
"""A schema cannot change them: unbounded whitespace lets a model go on for ever, and `lenient` ignores keywords."""

LONGEST_REASON = 400
"""Characters of llguidance's own message in an error."""

Bits = npt.NDArray[np.uint8]
"""One bit for each token id, the lowest id first."""

TokenBytes = Callable[[], Mapping[int, bytes]]
"""Makes the bytes of each token id that stands for text. Raises BadRequest for a tokenizer whose ids do not."""


class Vocabulary:
    """A target's token ids as grammars see them."""

    def __init__(self, size: int, token_bytes: Mapping[int, bytes]) -> None:
        """size: ids are below it. token_bytes: of the ids that stand for text; no other is part of a structured text"""
        from llguidance import LLTokenizer, TokenizerWrapper

        self.size = size
        self.text = frozenset(token for token, found in token_bytes.items() if found and token < size)
        self.text_bits = self.bits(self.text)
        # llguidance allows an end token where a text may end; this one is past the vocabulary, so no target draws it.
        given = _Tokens([*(token_bytes.get(token, b"") for token in range(size)), b""], self.text)
        self.tokenizer = LLTokenizer(TokenizerWrapper(given), n_vocab=size + 1, eos_token=size)

    def bits(self, tokens: Iterable[int]) -> Bits:
        """These ids' bits."""
        flags = np.zeros(_padded(self.size + 1), np.uint8)
        flags[[token for token in tokens if token < self.size]] = 1
        return np.packbits(flags, bitorder="little")


class _Tokens:
    """What llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], text: Collection[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [token for token in range(len(tokens)) if token not in text]

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # used only where tokens are forced


def _padded(count: int) -> int:
    """Bits of a mask of llguidance: whole words of 32."""
    return -(-count // 32) * 32


class Grammars:
    """Compiles structures for one tokenizer and keeps the last ones."""

    def __init__(self, token_bytes: TokenBytes, size: int) -> None:
        """token_bytes: called once, in a thread, for the first structure. size: of the target's vocabulary"""
        self._token_bytes = token_bytes
        self._size = size
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Structure, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(COMPILED_AT_ONCE, "grammar-compiler")

    async def compiled(self, structure: Structure) -> Grammar:
        """The grammar of a structure. Raises BadRequest, naming the field, for one that does not compile, that compiles
        for too long, or that no answer can have."""
        if (kept := self._kept.get(structure)) is not None:
            self._kept.move_to_end(structure)
            return kept
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, structure)
        try:
            grammar = await asyncio.wait_for(work, COMPILE_S)
        except TimeoutError:
            raise BadRequest(structure.field, f"was not compiled within {COMPILE_S:g} s; simplify it") from None
        self._kept[structure] = grammar
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return grammar

    def _compile(self, structure: Structure) -> Grammar:
        try:
            import llguidance
        except ImportError:
            raise BadRequest(structure.field, INSTALL) from None
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._size, self._token_bytes())
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary.tokenizer, _lark_of(structure), log_level=0, limits=limits)
        if matcher.is_error():
            raise BadRequest(structure.field, f"does not compile: {_reason(matcher)}")
        if warnings := matcher.get_grammar_warnings():
            raise BadRequest(structure.field, f"cannot be enforced: {'; '.join(warnings)}")
        grammar = Grammar(self._vocabulary, matcher)
        start = grammar.text(0)
        if start.complete:
            raise BadRequest(structure.field, "describes the empty text alone; an answer has at least one token")
        start.masks(DraftTree.root_only(0))
        if start.stuck:
            raise BadRequest(structure.field, f"no answer can begin: {start.why_stuck}")
        return grammar


def _lark_of(structure: Structure) -> str:
    """The structure as a grammar of llguidance. Raises BadRequest for text that is not JSON."""
    import llguidance

    match structure.form:
        case StructureForm.GRAMMAR:
            if OPTIONS_LINE.search(structure.texts[0]):
                raise BadRequest(structure.field, "has a line %llguidance; its options are the server's own")
            return HEADER + structure.texts[0]
        case StructureForm.REGEX:
            return f"{HEADER}start: /{llguidance.regex_to_lark(structure.texts[0], use_ascii='')}/"
        case StructureForm.CHOICES:
            return f"{HEADER}start: /{'|'.join(map(_literal, structure.texts))}/"
    try:
        made = llguidance.LLMatcher.grammar_from_json_schema(structure.texts[0], overrides=JSON_OPTIONS)
    except ValueError as error:
        raise BadRequest(structure.field, f"is no JSON schema: {error}") from None
    return f"{HEADER}start: %json {json.dumps(json.loads(made)['grammars'][0]['json_schema'])}"


def _literal(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):X}}}" for each in text)


def _reason(matcher: Any) -> str:
    return " ".join(str(matcher.get_error()).split())[:LONGEST_REASON]


class Grammar:
    """A compiled structure."""

    def __init__(self, vocabulary: Vocabulary, matcher: Any) -> None:
        """matcher: llguidance's, before the first token; it is only copied"""
        self.vocabulary = vocabulary
        self._matcher = matcher

    def text(self, prompt_length: int, end_ids: Collection[int] = (), stop_ids: Collection[int] = ()) -> GrammarText:
        """An answer that has no tokens yet, after a prompt of so many.

        end_ids: tokens that are allowed where the answer may end, and nowhere else. stop_ids: those of them that stand
        for no text are, too; the others are allowed as that text.
        """
        ends = frozenset(end_ids) | (frozenset(stop_ids) - self.vocabulary.text)
        return GrammarText(self.vocabulary, self._matcher, prompt_length, ends)


@dataclass(frozen=True, slots=True)
class TreeMasks:
    """The tokens that a structure allows after each row of a tree."""

    size: int  # of the vocabulary
    rows: Sequence[Bits | None]  # None: the walk never draws there, or what it draws is cut off

    def allowed(self, row: int) -> npt.NDArray[np.bool_] | None:
        """[vocabulary] whether each token is; None where `rows` has none."""
        bits = self.rows[row]
        return None if bits is None else np.unpackbits(bits, count=self.size, bitorder="little").view(np.bool_)


class GrammarText:
    """Where a structured answer stands after its tokens so far. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, start: Any, prompt_length: int, ends: frozenset[int]) -> None:
        self.ends = ends
        self.stuck: frozenset[int] = frozenset()
        """Rows of the last masks whose text is unfinished and has no next token."""
        self.why_stuck = ""
        self._vocabulary = vocabulary
        self._text_bits = vocabulary.text_bits & ~vocabulary.bits(ends)
        self._end_bits = vocabulary.bits(ends)
        self.nothing = np.zeros_like(self._text_bits)
        """The mask that allows no token."""
        self._start = start
        self._prompt_length = prompt_length
        self._matcher = start.deep_copy()
        self._taken: list[int] = []  # tokens of the answer that the matcher has consumed

    def follow(self, ids: Sequence[int]) -> None:
        """The whole text is now `ids`. Tokens that were taken before are not read again. A last token that ends an
        answer is not part of the structure.

        Raises BadRequest for an answer that the structure does not allow; the next call may have another text.
        """
        answer = list(ids[self._prompt_length :])
        ended = bool(answer) and answer[-1] in self.ends
        if ended:
            answer.pop()
        common = len(self._taken)
        if answer[:common] != self._taken:
            both = zip(answer, self._taken, strict=False)
            common = next((place for place, (new, old) in enumerate(both) if new != old), min(len(answer), common))
            self._matcher.rollback(len(self._taken) - common)
            del self._taken[common:]
        if self._matcher.is_error():  # of a token that was refused: such a matcher is of no more use
            self._matcher, self._taken, common = self._start.deep_copy(), [], 0
        consumed = int(self._matcher.try_consume_tokens(answer[common:]))
        self._taken += answer[common : common + consumed]
        if len(self._taken) < len(answer):
            place = len(self._taken)
            raise BadRequest("structure", f"does not allow the answer's token {place + 1}, {answer[place]}")
        if ended and not self._matcher.is_accepting():
            raise BadRequest("structure", f"does not allow an end after the answer's first {len(answer)} tokens")

    def take(self, tokens: Sequence[int]) -> int | None:
        """Take the tokens that a round emitted, up to one that ends the answer. Returns after how many of them the
        structure is complete; None where it is not."""
        for count, token in enumerate(tokens, 1):
            if token in self.ends or self._matcher.try_consume_tokens([token]) != 1:
                return None
            self._taken.append(token)
            if self.complete:
                return count
        return None

    @property
    def complete(self) -> bool:
        """Whether the text is what the structure describes, and no text may follow."""
        return (
            not self._matcher.is_error() and self._matcher.is_accepting() and not self._text_after(self._matcher).any()
        )

    def place(self) -> GrammarPlace:
        """Where the text stands; it may be moved on without moving this text."""
        return GrammarPlace(self, self._matcher.deep_copy())

    def masks(self, tree: DraftTree) -> TreeMasks:
        """Of each row of a tree whose root is the text's last token; sets `stuck`. The search for a row's tokens does
        not hold the interpreter lock."""
        children: list[list[int]] = [[] for _ in range(tree.rows)]
        for row, parent in enumerate(tree.parents.tolist()[1:], 1):
            children[parent].append(row)
        tokens = tree.tokens.tolist()
        rows: list[Bits | None] = [None] * tree.rows
        stuck = set()
        waiting = [(0, self.place())]
        while waiting:
            row, place = waiting.pop()
            if not place.text.any():
                if not place.may_end:
                    stuck.add(row)
                    self.why_stuck = place.why_stuck
                continue
            rows[row] = place.allowed
            for child in children[row]:
                if (below := place.after(tokens[child])) is not None:
                    waiting.append((child, below))
        self.stuck = frozenset(stuck)
        return TreeMasks(self._vocabulary.size, rows)

    def _text_after(self, matcher: Any) -> Bits:
        """The tokens of text that may follow."""
        if matcher.is_stopped():  # complete, or in error: its mask has the end token alone
            return self.nothing
        found: Bits = np.frombuffer(matcher.compute_bitmask(), np.uint8) & self._text_bits
        return found


class GrammarPlace:
    """What may follow one text, such as that of a row of a tree."""

    def __init__(self, of: GrammarText, matcher: Any) -> None:
        """matcher: after that text; it is not moved"""
        self._of = of
        self._matcher = matcher
        self.text = of._text_after(matcher)
        """The tokens of text that may follow."""
        self.may_end = bool(matcher.is_accepting() and not matcher.is_error())

    @property
    def allowed(self) -> Bits:
        """All tokens that may follow; none where the structure is complete."""
        return self.text | self._of._end_bits if self.may_end and self.text.any() else self.text

    @property
    def why_stuck(self) -> str:
        """Why no text follows a text that may not end."""
        return _reason(self._matcher) if self._matcher.is_error() else "no token of the tokenizer continues it"

    def after(self, token: int) -> GrammarPlace | None:
        """The place after one more token; None after one that is not of text, or not allowed."""
        if not permits(self.text, token):
            return None
        below = self._matcher.deep_copy()
        return GrammarPlace(self._of, below) if below.try_consume_tokens([token]) == 1 else None


def permits(mask: Bits | bytes, token: int) -> bool:
    """Whether a mask has a token."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
