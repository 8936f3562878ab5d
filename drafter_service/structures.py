"""Masks of the tokens that an answer's structure allows after each row of a draft.

Drafts are only guesses: if a structure cannot be compiled or followed, any token may be guessed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from dendro.calls import OpenCall
from dendro.daemon_threads import WAIT_S, in_thread
from dendro.errors import BadRequest, Overloaded
from dendro.grammars import Bits, GrammarPlace, Grammars, GrammarText, TokenBytes, permits
from dendro.guidance import LIMITS, PATIENCE, StructureLimits
from dendro.structure import Structure

from drafter_service.grow import Growth

log = logging.getLogger("dendro.drafter")

SLOW_ROW_S = 0.01
"""Processor seconds of a row's mask beyond which time counts against PATIENCE_S."""
PATIENCE_S = 0.1
"""Processor seconds, summed over rows beyond SLOW_ROW_S each, after which a text is drafted without its structure."""


class DraftStructures:
    """Compiles the structures of the answers that a drafter opens."""

    def __init__(
        self,
        name: str,
        token_bytes: TokenBytes,
        vocabulary: int,
        end_ids: Collection[int],
        limits: StructureLimits = LIMITS,
    ) -> None:
        """name: the drafter's, for logs   token_bytes, end_ids: of the drafter's tokenizer   vocabulary: bound of its
        token ids"""
        self._name = name
        self._end_ids = end_ids
        self._grammars = Grammars(token_bytes, vocabulary, limits, PATIENCE)

    async def of(self, wanted: Structure, call: OpenCall) -> DraftStructure | None:
        """Called when a text is opened whose answer has the structure `wanted`. Returns that structure, compiled in a
        thread; None if any token may be guessed: with drawn guesses, or if it cannot be compiled."""
        given, ids = call.parameters, call.update.tokens
        if given.sampling.draws_guesses:
            return None
        try:
            grammar = await self._grammars.compiled(wanted, given.tenant)
        except (BadRequest, Overloaded) as error:
            reason = str(error) if isinstance(error, Overloaded) else f"its {wanted.form} cannot be followed"
            log.warning("drafter %s: guesses without the structure of an answer: %s", self._name, reason)
            return None
        end_ids = () if given.limits.ignore_end else self._end_ids
        text = grammar.text(given.prompt_length, end_ids, given.limits.stop_ids)
        structure = DraftStructure(self._name, text, given.prompt_length)
        if len(ids) > given.prompt_length:
            await in_thread("structure-of-opening", lambda: structure.follow(ids))
        return structure


class DraftStructure:
    """The structure of one text's answer: finds the tokens allowed after each token of the text and each row of a
    round's tree. Not thread-safe."""

    def __init__(self, name: str, text: GrammarText, prompt_length: int) -> None:
        self._name = name
        self._text = text
        self._prompt_length = prompt_length
        self._lost = False  # True once the structure does not allow the text, or masks take too long
        self._slow_s = 0.0  # sum of the processor time by which rows exceeded SLOW_ROW_S
        self._spent_s = 0.0  # processor time of the last rows' masks
        self._places: dict[int, GrammarPlace | None] = {}  # key: row of the tree; None: nothing may follow it

    def follow(self, ids: Sequence[int]) -> None:
        """Set the whole text to `ids`. After a text that the structure does not allow, nothing is masked any more."""
        if self._lost or len(ids) < self._prompt_length:
            return
        try:
            self._text.follow(ids)
        except BadRequest:  # says which token
            self._give_up("it does not allow the answer so far")

    def _give_up(self, reason: object) -> None:
        if not self._lost:
            log.warning("drafter %s: guesses without the structure of an answer: %s", self._name, reason)
            self._lost = True

    @property
    def quick(self) -> bool:
        """True if the masks of the last rows took at most WAIT_S of a processor."""
        return self._spent_s <= WAIT_S

    def _took(self, seconds: float) -> None:
        self._spent_s += seconds
        self._slow_s = max(0.0, self._slow_s + seconds - SLOW_ROW_S)
        if self._slow_s > PATIENCE_S:
            self._give_up(f"its masks take {seconds:.3f} s a row")

    def after_text(self, ids: Sequence[int], first: int) -> list[Bits | None]:
        """Masks of the tokens that may follow each prefix of the text, from `first` + 1 tokens to all `ids`; None: any
        token. The last mask is that of a new tree's root."""
        found: list[Bits | None] = []
        self._places, self._spent_s = {}, 0.0
        for length in range(first + 1, len(ids) + 1):
            began_s = time.thread_time()
            self.follow(ids[:length])
            if self._lost or length < self._prompt_length:
                found.append(None)
                continue
            self._places = {0: self._text.place()}
            self._took(time.thread_time() - began_s)
            found.append(self._of_row(0))
        return found

    def of_level(self, growth: Growth) -> list[Bits | None]:
        """Masks of the tokens that may follow each row of a tree's frontier; None: any token."""
        self._spent_s = 0.0
        for row in growth.frontier:
            if row and not self._lost:
                began_s = time.thread_time()
                above = self._places.get(growth.parents[row])
                self._places[row] = None if above is None else above.after(growth.tokens[row])
                self._took(time.thread_time() - began_s)
        return [self._of_row(row) for row in growth.frontier]

    def _of_row(self, row: int) -> Bits | None:
        if self._lost or 0 not in self._places:
            return None
        place = self._places[row]
        return self._text.nothing if place is None else place.allowed


def keep_allowed(masks: Sequence[Bits | None], *lists: list[list[Any]]) -> None:
    """Remove from each row the candidates that its mask does not allow, and the entries at their places in the other
    lists.

    masks [rows]   lists: candidates, then others, each [rows][k]; changed in place
    """
    for row, mask in enumerate(masks):
        if mask is None:
            continue
        bits = mask.tobytes()
        kept = [place for place, token in enumerate(lists[0][row]) if permits(bits, token)]
        if len(kept) < len(lists[0][row]):
            for each in lists:
                each[row] = [each[row][place] for place in kept]
