"""Compiles the structures of requests, and follows an answer's tokens through a compiled one.

llguidance does the work: an Earley parser over a lexer of derivatives. Here a token is allowed exactly if the answer's
bytes with the token's can still become a text of the structure; `tests/dendro/test_grammars.py` compares that with
trying every token. llguidance is optional: without it, `Grammars.compiled` refuses every structure.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dendro.compiling import QUEUE
from dendro.errors import BadRequest, Overloaded
from dendro.guidance import LIMITS, STEP_FUEL, StructureLimits, TokenTexts, begin, fault_of, fuel_of, items_of
from dendro.structure import Structure
from dendro.structure_canary import Canary, CanaryBusy, CanaryDied, CanaryRefused
from dendro.tree import DraftTree

if TYPE_CHECKING:
    from llguidance import LLInterpreter

KEPT = 64
"""Most compiled structures that are kept; the least recently used one is dropped."""
INSTALL = "needs the package llguidance: pip install 'dendroaspis[structured]'"

WORN_FUEL = STEP_FUEL // 2
"""Work of a shared lexer after which answers may no longer rely on it. Until then none could have reached STEP_FUEL by
itself, as a lexer that reads one answer alone does a part of the same work."""
UNREAD = "is not followed ahead of the answer"
KEPT_PLACES = 8
"""Number of tokens that can be taken back without reading a text again from its beginning."""

Bits = npt.NDArray[np.uint8]
"""A mask of tokens: one bit for each token id, the lowest id first."""

TokenBytes = Callable[[], Mapping[int, bytes]]
"""Makes the bytes of each token id that stands for text. Raises BadRequest for a tokenizer whose ids do not."""


class Vocabulary:
    """A target's token ids in the form that grammars need."""

    def __init__(self, size: int, token_bytes: Mapping[int, bytes]) -> None:
        """size: bound of the ids   token_bytes: bytes of the ids that stand for text; structured text has no others"""
        self.size = size
        self.text = frozenset(token for token, found in token_bytes.items() if found and token < size)
        self.text_bits = self.bits(self.text)
        # llguidance allows an end token where a text may end; this one is past the vocabulary, so no target draws it.
        given = [*(token_bytes.get(token, b"") for token in range(size)), b""]
        self.tokens = TokenTexts(given, [token for token in range(size + 1) if token not in self.text])
        self.tokenizer = self.tokens.tokenizer()
        self.name = hashlib.blake2b(repr(given).encode(), digest_size=16).hexdigest()

    def bits(self, tokens: Iterable[int]) -> Bits:
        """Mask of these ids."""
        flags = np.zeros(_padded(self.size + 1), np.uint8)
        flags[[token for token in tokens if token < self.size]] = 1
        return np.packbits(flags, bitorder="little")


def _padded(count: int) -> int:
    """Bits of a mask of llguidance: whole words of 32."""
    return -(-count // 32) * 32


class Grammars:
    """Compiles structures for one tokenizer and keeps the last ones."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        size: int,
        limits: StructureLimits = LIMITS,
        patience: float = 1,
    ) -> None:
        """token_bytes: called once, in a thread, for the first structure   size: of the target's vocabulary
        patience: factor on `limits.compile_s`, PATIENCE at a replica"""
        self._token_bytes = token_bytes
        self._size = size
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Structure, Grammar | BadRequest] = OrderedDict()  # BadRequest: refused
        self._compiling: dict[Structure, Future[Grammar]] = {}
        self._limits = limits
        self._lock = threading.Lock()
        self._patience = patience
        self.compiles = 0  # structures that were compiled
        self.refused = 0  # structures that were refused when they were first compiled

    async def compiled(self, structure: Structure, tenant: str = "") -> Grammar:
        """The grammar of a structure. Raises BadRequest, naming the field, for one that does not compile within the
        limits, or that no answer can have; Overloaded where too many wait."""
        kept = self._kept.get(structure)
        if kept is not None and not (isinstance(kept, Grammar) and kept.worn):
            self._kept.move_to_end(structure)
        else:
            if (work := self._compiling.get(structure)) is None:
                work = self._compiling[structure] = QUEUE.submit(tenant, partial(self._counted, structure))
                work.add_done_callback(lambda _: self._compiling.pop(structure, None))
            waiting = asyncio.wrap_future(work)
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # callers may be gone
            try:
                kept = await asyncio.shield(waiting)
            except BadRequest as error:
                kept = error
            self._kept[structure] = kept
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if isinstance(kept, BadRequest):
            raise BadRequest(kept.field, kept.reason)
        return kept

    def _counted(self, structure: Structure, canary: Canary) -> Grammar:
        """Compile a structure once for all callers that wait for it."""
        try:
            grammar = self._compile(structure, canary)
        except BadRequest:
            with self._lock:
                self.refused += 1
            raise
        with self._lock:
            self.compiles += 1
        return grammar

    def _compile(self, structure: Structure, canary: Canary) -> Grammar:
        if find_spec("llguidance") is None:
            raise BadRequest(structure.field, INSTALL)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._size, self._token_bytes())
        vocabulary, cpu_s = self._vocabulary, self._patience * self._limits.compile_s
        try:
            lark = canary.compiled(vocabulary.name, vocabulary.tokens, structure, self._limits, cpu_s)
        except (CanaryDied, CanaryRefused) as error:
            raise BadRequest(structure.field, str(error)) from None
        except CanaryBusy:
            raise Overloaded(f"{structure.field}: was not compiled in time, as the machine is busy") from None
        grammar = Grammar(vocabulary, lark, self._limits)
        start = grammar.text(0)
        if start.complete:
            raise BadRequest(structure.field, "describes the empty text alone; an answer has at least one token")
        if start.place().stuck:
            raise BadRequest(structure.field, f"no answer can begin: {start.place().why_stuck}")
        return grammar


class Grammar:
    """A compiled structure."""

    def __init__(self, vocabulary: Vocabulary, lark: str, limits: StructureLimits) -> None:
        """lark: the structure in llguidance's form"""
        self.vocabulary = vocabulary
        self._lark = lark
        self._limits = limits
        self._start = self._begun(shared=True)

    def _begun(self, shared: bool) -> _State:
        """The state before the first token, with a new lexer."""
        begun = begin(self.vocabulary.tokenizer, self._lark, self._limits)
        return _State.of(begun, self.vocabulary, self._limits, _Lexer(shared))

    @property
    def worn(self) -> bool:
        """True if new answers need the structure compiled again."""
        return self._start.lexer.worn

    def text(self, prompt_length: int, end_ids: Collection[int] = (), stop_ids: Collection[int] = ()) -> GrammarText:
        """Begin an answer that has no tokens yet, after a prompt of `prompt_length` tokens.

        end_ids: tokens that are allowed only where the answer may end   stop_ids: stop ids without text are also
        allowed only where the answer may end; others are allowed where their text is
        """
        ends = frozenset(end_ids) | (frozenset(stop_ids) - self.vocabulary.text)
        return GrammarText(self._start, partial(self._begun, shared=False), prompt_length, ends)


@dataclass(slots=True)
class _Lexer:
    """What is known of the tables of llguidance's lexer. All copies of an interpreter share them: what the lexer learns
    for one text saves work for others, and once a mask exhausts STEP_FUEL it fails for all."""

    shared: bool  # False: it reads the tokens of one answer alone, and no guesses
    spent: int = 0  # work since the first mask
    broken: bool = False  # True once a mask or a token failed, by another limit than that of items

    @property
    def worn(self) -> bool:
        """True if the tables cannot tell any more what an answer read alone would come to."""
        return self.shared and (self.broken or self.spent >= WORN_FUEL)

    def failed(self, error: BaseException) -> str:
        """Note that a call failed. Returns the reason."""
        fault = fault_of(error)
        self.broken = self.broken or " items" not in fault
        return fault


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """State of llguidance after a text, reached by the same calls on every path: a mask and then a token. It depends on
    the text alone, and so does whether a limit was exceeded, unless the state is in doubt."""

    vocabulary: Vocabulary
    limits: StructureLimits
    interpreter: LLInterpreter  # the state after the mask; only copied from then on
    lexer: _Lexer
    text: Bits  # the tokens of text that may follow
    may_end: bool  # True if the answer may end here
    tokens: int  # tokens of the answer so far
    items: int  # items of all masks so far
    spent: int  # `_Lexer.spent` at the mask
    fault: str = ""  # the limit for which llguidance cannot go on; empty: none
    in_doubt: bool = False  # True if the text must be read alone to know its state

    @classmethod
    def of(
        cls,
        interpreter: LLInterpreter,
        vocabulary: Vocabulary,
        limits: StructureLimits,
        lexer: _Lexer,
        before: _State | None = None,
    ) -> _State:
        """Compute an interpreter's mask and make its state. before: the state before the last token; None: of the first
        mask"""
        tokens, items, spent = (before.tokens + 1, before.items, before.spent) if before is not None else (0, 0, 0)
        nothing, fault = np.zeros_like(vocabulary.text_bits), ""
        found = bytearray(len(vocabulary.text_bits))
        try:
            report = interpreter.compute_mask_into(found)  # releases the interpreter lock
        except BaseException as error:
            fault = lexer.failed(error)
        else:
            items += items_of(report)
            spent += fuel_of(report) if before is not None else 0
            lexer.spent = max(lexer.spent, spent)
            if items > (most := limits.of_answer(tokens)):
                fault = f"its masks have made {items} items; at most {most} after {tokens} tokens"
        if fault:
            doubt = lexer.shared and before is not None
            return cls(vocabulary, limits, interpreter, lexer, nothing, False, tokens, items, spent, fault, doubt)
        text, may_end = np.frombuffer(found, np.uint8) & vocabulary.text_bits, bool(interpreter.is_accepting())
        doubt = lexer.worn and before is not None
        return cls(vocabulary, limits, interpreter, lexer, text, may_end, tokens, items, spent, in_doubt=doubt)

    def _failed(self, interpreter: LLInterpreter, fault: str, in_doubt: bool) -> _State:
        """The state after one more token, with which llguidance did not go on."""
        nothing, tokens = np.zeros_like(self.text), self.tokens + 1
        changed = replace(self, interpreter=interpreter, text=nothing, may_end=False, tokens=tokens)
        return replace(changed, fault=fault, in_doubt=in_doubt)

    def after(self, token: int) -> _State:
        """The state after one more token, of `text`."""
        below = self.interpreter.deep_copy()
        try:
            below.commit_token(token)
        except BaseException as error:
            return self._failed(below, self.lexer.failed(error), self.lexer.shared)
        return self.of(below, self.vocabulary, self.limits, self.lexer, self)

    def unread(self) -> _State:
        """A state in doubt after one more token, which is not read."""
        return self._failed(self.interpreter, UNREAD, True)


class Unmasked(Enum):
    """Reason why a row of a tree has no mask."""

    COMPLETE = "no text may follow: what is drawn there is cut off"
    ENDED = "its token ends the answer: what is drawn there is cut off"
    STUCK = "its text is unfinished and no token can follow: an answer ends there with an error. Or that is in doubt"
    REFUSED = "the row above does not allow its token: the walk does not reach it"


@dataclass(frozen=True, slots=True)
class TreeMasks:
    """The tokens that a structure allows after each row of a tree."""

    size: int  # size of the vocabulary
    rows: Sequence[Bits | Unmasked]

    def allowed(self, row: int) -> npt.NDArray[np.bool_] | None:
        """True for each token that is allowed after a row, [vocabulary]; None if no token drawn there counts."""
        bits = self.rows[row]
        if isinstance(bits, Unmasked):
            return None
        return np.unpackbits(bits, count=self.size, bitorder="little").view(np.bool_)


class GrammarText:
    """Follows a structured answer token by token. Not thread-safe."""

    def __init__(
        self, start: _State, begun_alone: Callable[[], _State], prompt_length: int, ends: frozenset[int]
    ) -> None:
        """start: the state before the first token   begun_alone: makes the same, with a lexer that no other text has"""
        self.ends = ends
        self.stuck: frozenset[int] = frozenset()
        """Rows of the last masked tree before which a walk ends: no token is allowed after an unfinished answer, or
        that is in doubt."""
        self.why_stuck = ""
        self.not_ends = ~start.vocabulary.bits(ends)
        self.end_bits = start.vocabulary.bits(ends)
        self.nothing = np.zeros_like(self.end_bits)
        """A mask that allows no token."""
        self._prompt_length = prompt_length
        self._taken: list[int] = []  # tokens of the answer that were followed
        self._start = start
        self._begun_alone = begun_alone
        self._places = deque([GrammarPlace(self, start)], KEPT_PLACES)  # newest last

    def follow(self, ids: Sequence[int]) -> None:
        """Set the whole text to `ids`. Tokens that were taken before are not read again. A last token that ends an
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
            self._cut(common)
        for token in answer[len(self._taken) :]:
            if not self._take(token):
                place = len(self._taken)
                raise BadRequest("structure", f"does not allow the answer's token {place + 1}, {token}")
        if ended and not self.place().may_end:
            raise BadRequest("structure", f"does not allow an end after the answer's first {len(answer)} tokens")

    def _cut(self, length: int) -> None:
        dropped = len(self._taken) - length
        if dropped < len(self._places) and not self.place().alone:
            for _ in range(dropped):
                self._places.pop()
        else:
            self._places.clear()
            self._places.append(GrammarPlace(self, self._start))
            length, kept = 0, self._taken[:length]
            self._taken = []
            for token in kept:
                self._take(token)
            return
        del self._taken[length:]

    def _take(self, token: int) -> bool:
        """Take a token. False if it is not allowed."""
        below = self._after(self.place(), self._taken, token)
        if below is None:
            return False
        self.place().forget()
        self._places.append(below)
        self._taken.append(token)
        return True

    def _after(self, place: GrammarPlace, before: Sequence[int], token: int) -> GrammarPlace | None:
        """The place after one more token of the answer; None if the token is not allowed. It depends on the answer
        alone: where other texts or guesses may have decided it, the answer is read by a lexer of its own, and goes on
        without guesses. before: the answer up to `place`"""
        below = place.after(token)
        if below is None or not below.in_doubt:
            return below
        state = place.state
        if not place.alone:
            state = self._begun_alone()
            for earlier in before:
                state = state if state.fault else state.after(earlier)
        return place.settle(token, state if state.fault else state.after(token))

    def take(self, tokens: Sequence[int]) -> int | None:
        """Take the tokens that a round emitted, up to one that ends the answer. Returns the number of tokens after
        which the structure is complete; None if it is not complete."""
        for count, token in enumerate(tokens, 1):
            if token in self.ends or not self._take(token):
                return None
            if self.complete:
                return count
        return None

    def foresee(self, tokens: Sequence[int]) -> None:
        """Compute in advance the state that `take` of these tokens will need, without taking them."""
        place: GrammarPlace | None = self.place()
        for count, token in enumerate(tokens):
            if place is None or token in self.ends:
                break
            place = self._after(place, [*self._taken, *tokens[:count]], token)

    @property
    def complete(self) -> bool:
        """True if the text is what the structure describes, and no text may follow."""
        return self.place().complete

    @property
    def items(self) -> int:
        """Number of items that llguidance made for the masks of the answer so far."""
        return self.place().items

    @property
    def budget(self) -> int:
        """Most items that the masks of an answer of this length may have."""
        return self._start.limits.of_answer(len(self._taken))

    def place(self) -> GrammarPlace:
        """Place after the text. Going on from it does not change this text."""
        return self._places[-1]

    def masks(self, tree: DraftTree) -> TreeMasks:
        """Compute the mask after each row of a tree whose root is the text's last token. Sets `stuck`."""
        children: list[list[int]] = [[] for _ in range(tree.rows)]
        for row, parent in enumerate(tree.parents.tolist()[1:], 1):
            children[parent].append(row)
        tokens = tree.tokens.tolist()
        rows: list[Bits | Unmasked] = [Unmasked.REFUSED] * tree.rows
        stuck = set()
        waiting = [(0, self.place())]
        while waiting:
            row, place = waiting.pop()
            if place.in_doubt or place.stuck:  # the text's own place, the root's, is never in doubt
                rows[row] = Unmasked.STUCK
                stuck.add(row)
                self.why_stuck = place.why_stuck
            elif place.complete:
                rows[row] = Unmasked.COMPLETE
            else:
                rows[row] = place.allowed
            for child in children[row]:
                if (below := place.after(tokens[child])) is not None:
                    waiting.append((child, below))
                elif tokens[child] in self.ends and place.may_end:
                    rows[child] = Unmasked.ENDED
        self.stuck = frozenset(stuck)
        return TreeMasks(self._start.vocabulary.size, rows)


class GrammarPlace:
    """Tokens that may follow one text, for example the text up to a row of a tree."""

    def __init__(self, of: GrammarText, state: _State) -> None:
        self._of = of
        self.state = state
        self._below: dict[int, GrammarPlace] = {}  # by the next token: a round's guesses are walked, then taken
        self.text = state.text & of.not_ends
        """Mask of the tokens of text that may follow."""
        self.may_end = state.may_end

    @property
    def alone(self) -> bool:
        """True if the answer up to here was read by a lexer of its own. No guess is read after it."""
        return not self.state.lexer.shared

    @property
    def in_doubt(self) -> bool:
        """True if the text must be read alone to know what may follow."""
        return self.state.in_doubt

    @property
    def complete(self) -> bool:
        """True if the text is one of the structure's, and no text may follow."""
        return self.may_end and not self.text.any()

    @property
    def stuck(self) -> bool:
        """True if the text is unfinished, and no token can follow."""
        return not self.may_end and not self.text.any()

    @property
    def items(self) -> int:
        """Number of items that llguidance made for the masks of the text's tokens."""
        return self.state.items

    @property
    def allowed(self) -> Bits:
        """Mask of all tokens that may follow; none if the structure is complete."""
        return self.text | self._of.end_bits if self.may_end and self.text.any() else self.text

    @property
    def why_stuck(self) -> str:
        """Reason why no text follows a text that may not end."""
        return self.state.fault or "no token of the tokenizer continues it"

    def after(self, token: int) -> GrammarPlace | None:
        """The place after one more token; None if the token is not of text, or not allowed."""
        if not permits(self.text, token):
            return None
        if token not in self._below:
            self._below[token] = GrammarPlace(self._of, self.state.unread() if self.alone else self.state.after(token))
        return self._below[token]

    def settle(self, token: int, state: _State) -> GrammarPlace:
        """Set the place after one more token to a state that is not in doubt."""
        self._below[token] = GrammarPlace(self._of, state)
        return self._below[token]

    def forget(self) -> None:
        """Drop the computed places that follow this one."""
        self._below = {}


def permits(mask: Bits | bytes, token: int) -> bool:
    """True if a mask has a token."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
