"""Calls of a router to a drafter or verifier, and their answers. One process and the wire use the same values.

Each call has the part of the text that the peer lacks: the peer is known to hold the first `start` tokens, and `tokens`
are the rest up to `base`. So a late draft, an `off` round, a lost verdict and a new replica need no special case.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dendro.errors import BadRequest, NotFound
from dendro.logprobs import NOT_ECHOED, EchoedLogprobs, check_logprobs
from dendro.order import Order
from dendro.shapes import TreeShape
from dendro.structure import Structure
from dendro.text import Limits, Sampling, Text, Tokens, Verdict
from dendro.tree import DraftTree

Deliver = Callable[[object], None]
"""Takes an answer, or the exception in its place, from any thread."""
OPENING_BYTES = 16
TARGET_BYTES = 16
"""Bytes of `Hello.target`."""
IDLE_ROUNDS = 32
"""Consecutive rounds without a drafted shape after which a request's drafter is released, and with it the trace."""


def new_opening() -> bytes:
    """128 random bits that name one opening of one text at one peer."""
    return secrets.token_bytes(OPENING_BYTES)


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The parameters of a request that a peer needs; sent once, when the text is opened."""

    sampling: Sampling
    limits: Limits
    tenant: str
    marks: tuple[int, ...]  # lengths at which earlier turns ended and a state may have been saved
    vocabulary: int = 0  # the target's: ids of the text and of guesses are below it; 0: the peer's own
    tokenizer: str = ""  # fingerprint of the target's (`Hello.tokenizer`); empty: the peer's own
    prompt_length: int = 0  # tokens of the text before the answer
    logprobs: int | None = None  # number of likeliest tokens with log-probabilities; None: none. Drafters ignore it
    echo_from: int | None = None  # position of the first token whose log-probability the opening reports; None: none
    structure: Structure | None = None  # structure of the answer's text; a drafter only guesses what it allows

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            check_logprobs(self.logprobs)
        if self.echo_from is not None and (self.logprobs is None or self.echo_from < 1):
            raise BadRequest("echo_from", f"is {self.echo_from}; must be at least 1, and needs logprobs")


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """The opening and the text up to `base`, which every call has."""

    opening: bytes
    base: int  # tokens of the text; the round starts from the last of them, its root
    digest: int  # chained 64-bit digest of those tokens
    start: int  # the peer is known to hold ids[:start]
    tokens: tuple[int, ...]  # ids[start:base]

    @classmethod
    def of(cls, opening: bytes, text: Text | Tokens, start: int) -> TextUpdate:
        """The whole of `text`, for a peer that holds its first `start` tokens."""
        return cls(opening, len(text), text.digest(len(text)), start, tuple(text.ids[start:] if start else text.ids))


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Open a text at the peer, which consumes all but the root. Answered with `Opened` when that is done."""

    update: TextUpdate
    parameters: RequestParameters
    lease: str = ""  # the lease that the opening belongs to; empty at a peer without leases
    ahead: bool = False  # the first round is likely the root alone: a verifier may begin it with the text's last rows
    traceparent: str = ""  # the router's span of the answer; empty: it is not sampled


@dataclass(frozen=True, slots=True)
class PreparedTree:
    """A tree of a text's likely next round, sent before the round's call. It is of use if the text gets this digest."""

    opening: bytes  # the text's opening at the drafter, by which the order names it
    base: int  # tokens of the text
    digest: int  # chained digest of the text's tokens
    tree: DraftTree


MOST_PREPARED = 4
"""Most prepared trees of one text that a drafter sends after a tree, and that a verifier keeps."""


@dataclass(frozen=True, slots=True)
class DraftCall:
    """Ask a drafter for a tree. Answered with a DraftTree."""

    update: TextUpdate
    shape: TreeShape
    prepared_from: float = 0.0  # least chance of a verdict whose tree is sent before its call; 0: none is
    take_prepared: Deliver | None = None  # takes each as a `PreparedTree`, from any thread; does not travel
    alone: bool = False  # True if no other call is made at this time that could share its frame; does not travel


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Ask a verifier to verify a tree. Answered with a Verdict. Raises BadRequest for `ahead` with guesses."""

    update: TextUpdate
    tree: DraftTree
    ahead: bool = False  # True if the next tree is likely a root alone, too: that round may begin before its call
    order: Order | None = None  # the next round's tree: the verifier asks the drafter for it after this verdict
    ordered: bool = False  # True if the tree that was ordered in the last call takes the place of `tree`, a root alone

    def __post_init__(self) -> None:
        if self.ahead and self.tree.guesses:
            raise BadRequest("verify.ahead", "is set in a call with guesses; only a root alone may announce another")
        if self.ahead and self.order is not None:
            raise BadRequest("verify.order", "is set beside ahead: the next round has a tree or its root alone")


@dataclass(frozen=True, slots=True)
class CloseCall:
    """Close an opening. Includes the text, so that the last state can be saved by name. Answered with `Closed`."""

    update: TextUpdate


@dataclass(frozen=True, slots=True)
class Opened:
    """The cost of opening: tokens whose state came from the store, and tokens that were processed."""

    restored: int
    processed: int
    open_us: int  # microseconds from the call's arrival to readiness
    logprobs: EchoedLogprobs = NOT_ECHOED  # log-probabilities of the text's tokens from `echo_from` on


@dataclass(frozen=True, slots=True)
class Closed:
    """The opening is closed; the saved state covers `saved` tokens (0: none was saved)."""

    saved: int


DrafterCall = OpenCall | DraftCall | CloseCall
VerifierCall = OpenCall | VerifyCall | CloseCall


@dataclass(frozen=True, slots=True)
class Hello:
    """A replica's description of itself, sent when a stream begins."""

    protocol: int
    model: str  # the name it is served under
    fingerprint: str  # hash of the weights and the configuration
    tokenizer: str  # hash of the token table, from id to text; empty: the checkpoint has none
    vocabulary: int  # number of token ids that are in the tokenizer and have a row in the model
    max_length: int  # the longest text, in tokens
    max_rows: int  # rows of a tree, the root included
    max_depth: int
    dtype: str
    exactness: str  # verifier: "bitwise" or "margin"; drafter: ""
    pid: int
    end_ids: tuple[int, ...] = ()  # end-of-text tokens of the target
    attends: bool = False  # verifier: the target has attention layers, so the time of a step is quadratic in its rows
    facts: str = ""  # hash of the checkpoint's configuration, end ids and token table
    step_sizes: tuple[int, ...] = ()  # verifier: numbers of rows that steps are padded to; empty: multiples of 8
    orders: bool = False  # verifier: whether it asks drafters for ordered trees (`dendro.order`)
    timed_steps: tuple[tuple[int, int], ...] = ()  # verifier: rows, ascending, and microseconds of steps while loading

    @property
    def target(self) -> str:
        """Digest of `TARGET_FACTS`. An answer may continue at another verifier only if the digests are equal."""
        facts = [getattr(self, name) for name in TARGET_FACTS]
        return hashlib.blake2b(repr(facts).encode(), digest_size=TARGET_BYTES).hexdigest()


TARGET_FACTS = ("fingerprint", "dtype", "exactness", "tokenizer", "vocabulary", "end_ids")
"""Fields of a verifier's Hello that an answer's tokens depend on besides the text. The fingerprint includes the degree
of sharding, the kind and model of an accelerator, and whether the arithmetic is this project's own. The limits
(`max_*`) do not change tokens; calls outside them are refused."""

PROTOCOL_VERSION = 8


class Peer(Protocol):
    """Common part of the ports to drafters and verifiers, in this process or at the other end of a stream."""

    async def hello(self) -> Hello:
        """Called first. Returns the replica's description of itself."""
        ...

    async def open(self, call: OpenCall) -> Opened:
        """Called before any other call for a text. Returns when the peer has consumed the text up to its root. Raises
        BadRequest and Overloaded."""
        ...

    async def close(self, call: CloseCall) -> Closed:
        """Called when the request ends or leaves the peer. Returns after the text's state was saved, if it is kept.
        Raises NotFound."""
        ...


class DrafterPeer(Peer, Protocol):
    """A drafter."""

    def draft(self, call: DraftCall) -> Awaitable[DraftTree]:
        """Called in each round with a drafted shape. Returns a tree of the shape. Raises NotFound and BadRequest."""
        ...


class VerifierPeer(Peer, Protocol):
    """A verifier."""

    def verify(self, call: VerifyCall) -> Awaitable[Verdict]:
        """Called once per round. Returns the tokens that the target emits. Raises NotFound and BadRequest."""
        ...


class DrafterLinks(Protocol):
    """A verifier's ways to the drafters whose trees are ordered."""

    def draft(self, drafter: str, call: DraftCall, deliver: Deliver) -> None:
        """Called in the verifier's thread, after a verdict whose call has an order. Returns at once; `deliver` is
        called once, from any thread, with a DraftTree or an error. drafter: as in `Order`"""
        ...


class PeerText:
    """A peer's copy of a text."""

    def __init__(self) -> None:
        self.tokens = Tokens()

    @property
    def ids(self) -> list[int]:
        return self.tokens.ids

    def follow(self, update: TextUpdate) -> int:
        """Apply `update` to the copy; return the length of the common prefix of the old and the new copy.

        Raises NotFound, leaving the copy unchanged, if `start` is past the copy's end or the digest differs. The router
        then opens the text again.
        """
        if update.start > len(self.tokens) or update.start + len(update.tokens) != update.base:
            raise NotFound(f"opening: holds {len(self.tokens)} tokens, the call starts at {update.start}")
        old = self.ids[update.start :]
        self._replace(update.start, update.tokens)
        if self.tokens.digest() != update.digest:
            self._replace(update.start, old)
            raise NotFound("opening: the text's digest differs")
        return update.start + _common(old, update.tokens)

    def _replace(self, start: int, tokens: Sequence[int]) -> None:
        self.tokens.cut(start)
        self.tokens.extend(tokens)


def _common(old: Sequence[int], new: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(old), len(new)))
