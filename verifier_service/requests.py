"""What a verifier's scheduler is asked, what it answers, and what it knows of a text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dendro.calls import CloseCall, OpenCall, PeerText, Terms, VerifyCall
from dendro.tree import DraftTree
from tree_kernels.tree_attention import near_window
from tree_kernels.warp import Warp
from tree_layers.tree_mixers import Array

from verifier_service.memory import TextMemory, most_pages
from verifier_service.recurrent import Arrangement

Call = OpenCall | VerifyCall | CloseCall


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine holds and runs at once. Computed when it is loaded."""

    vocabulary: int
    max_length: int  # tokens of a text
    max_rows: int  # rows of a tree
    max_depth: int
    max_sessions: int  # texts that hold pages at once
    max_waiting: int  # texts that wait for their turn behind them
    step_rows: int  # rows of a step
    sizes: tuple[int, ...]  # numbers of rows that a step is padded to
    prefill_rows: int  # rows of a step that are kept for prompts; where few trees wait, all that a step has with them
    pages: int  # for texts
    share_prefixes: bool
    first_scratch: int  # the slots for guesses begin here
    end_ids: frozenset[int]
    window: int | None = None  # positions that a row sees at most, where every layer has a sliding window
    saves: bool = False  # a text's whole memory is small, and is put by when it is closed
    recurrent: Arrangement | None = None  # of the memory of a target with states

    def pages_of(self, tokens: int) -> int:
        """Pages that a text of so many tokens, guesses included, holds at most at once."""
        return most_pages(tokens, self.window, self.slack, self.step_rows + self.max_depth)

    @property
    def slack(self) -> int:
        """Tokens by which a router cuts a text as a matter of course, when it drops a verdict."""
        return self.max_depth + 1

    @property
    def near(self) -> int:
        return near_window(self.max_depth)


class Reply(Protocol):
    """Where an answer goes: an asyncio future, or anything like it."""

    def done(self) -> bool: ...
    def set_result(self, answer: Any) -> None: ...
    def set_exception(self, error: BaseException) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A state-space text's memory after `length` tokens."""

    length: int
    tokens: int  # the newest ones, whose inputs it has
    arrays: Mapping[str, Array]


@dataclass(slots=True, eq=False)
class Ask:
    """A call that waits for its answer."""

    call: Call
    reply: Reply
    arrived: float = field(default_factory=time.perf_counter)
    saved: Saved | None = None  # what the store has of a text that is opened

    @property
    def given_up(self) -> bool:
        """Its caller waits no longer."""
        return self.reply.done()

    def answer(self, answer: Any) -> None:
        if not self.reply.done():
            self.reply.set_result(answer)

    def fail(self, error: BaseException) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


@dataclass(slots=True, eq=False)
class VerifierText:
    """One opening of one text."""

    number: int
    terms: Terms
    warp: Warp
    text: PeerText
    memory: TextMemory
    opening: Ask | None = None  # until the prompt is consumed
    asks: deque[Ask] = field(default_factory=deque)  # verifications, in order of arrival
    admitted: bool = False  # it may hold pages; where not, it waits for its turn
    answered: float | None = None  # when its last verdict left; None where none is expected to follow
    rows: int = 1  # of its last tree
    away_s: float = 0.0  # what its router usually takes to come back with the next round
    counted: bool = False  # among those that had to wait
    restored: int = 0  # tokens that were there when it was admitted first
    saved: Saved | None = None  # what the store has of it, until it is admitted

    @property
    def lacking(self) -> int:
        """Committed tokens before the root that the memory has not consumed."""
        return len(self.text.ids) - 1 - len(self.memory.consumed)

    @property
    def waits(self) -> bool:
        """Somebody waits for it to come on."""
        return self.opening is not None or bool(self.asks)


@dataclass(slots=True)
class VerifierCounters:
    """What happened since the start; only ever grows."""

    steps: int = 0
    step_us: int = 0  # from the choice of a step's rows to its answers
    forward_us: int = 0  # of that, the model's forward
    rows: int = 0
    guesses: int = 0  # of them, rows of trees below a root
    trimmed: int = 0  # guesses that were sent and left out
    waited: int = 0  # texts that had to wait for their turn
    refused: int = 0  # texts for which even the queue had no place
    set_back: int = 0  # times that a text gave its pages to an older one, to be computed again


@dataclass(slots=True, eq=False)
class _Share:
    """What one session has in a step."""

    session: VerifierText
    prefill: int  # committed rows, from what is consumed on
    ask: Ask | None  # with its tree
    tree: DraftTree | None = None  # what the step takes of it
