"""What a router says to a drafter or a verifier, and what they answer. The same values in one process and on the wire.

Each call carries what the peer lacks of the text: `start` is how much of it the peer is known to hold, `tokens` the
rest up to `base`. So a late draft, an `off` round, a lost verdict and a replica opened afresh are one case.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dendro.errors import NotFound
from dendro.shapes import TreeShape
from dendro.text import Limits, Sampling, Tokens, Verdict
from dendro.tree import DraftTree

OPENING_BYTES = 16


def new_opening() -> bytes:
    """128 random bits that name one opening of one text at one peer."""
    return secrets.token_bytes(OPENING_BYTES)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a peer must know of a request, said once when the text is opened."""

    sampling: Sampling
    limits: Limits
    tenant: str
    marks: tuple[int, ...]  # lengths that earlier turns ended at, where a saved state may be found
    vocabulary: int = 0  # the target's: ids of the text and of guesses are below it; 0: that of the peer itself


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """The part that all calls share: which opening, and the text up to `base`."""

    opening: bytes
    base: int  # tokens of the text; the round starts from the last of them, its root
    digest: int  # chained 64-bit digest of those tokens
    start: int  # the peer is known to hold ids[:start]
    tokens: tuple[int, ...]  # ids[start:base]


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Open a text at the peer and let it consume all but the root. Answered with `Opened` when that is done."""

    update: TextUpdate
    terms: Terms
    lease: str = ""  # the lease that the opening belongs to; empty at a peer that gives none


@dataclass(frozen=True, slots=True)
class DraftCall:
    """Ask a drafter for a tree. Answered with a DraftTree."""

    update: TextUpdate
    shape: TreeShape


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Ask a verifier what the target makes of a tree. Answered with a Verdict."""

    update: TextUpdate
    tree: DraftTree


@dataclass(frozen=True, slots=True)
class CloseCall:
    """End an opening, with the text so that the last state can be saved by name. Answered with `Closed`."""

    update: TextUpdate


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening took: tokens whose state came from the store, and tokens that were processed."""

    restored: int
    processed: int
    open_us: int  # microseconds from the call's arrival to readiness


@dataclass(frozen=True, slots=True)
class Closed:
    """The opening is gone; `saved` tokens are covered by the state that was put by (0: none)."""

    saved: int


DrafterCall = OpenCall | DraftCall | CloseCall
VerifierCall = OpenCall | VerifyCall | CloseCall


@dataclass(frozen=True, slots=True)
class Hello:
    """What a replica says of itself when a stream begins."""

    protocol: int
    model: str  # the name it is served under
    fingerprint: str  # hash of the weights and the configuration
    tokenizer: str  # hash of the token table, from id to text; empty: the checkpoint has none
    vocabulary: int  # number of token ids that mean something and have a row in the model
    max_length: int  # tokens of text it can hold
    max_rows: int  # rows of a tree, the root among them
    max_depth: int
    dtype: str
    exactness: str  # verifier: "bitwise" or "margin"; drafter: ""
    pid: int
    end_ids: tuple[int, ...] = ()  # end-of-text tokens of the target
    attends: bool = False  # verifier: the target has layers of attention, so that its steps are quadratic in their rows
    facts: str = ""  # hash of what the checkpoint's folder says: configuration, end ids, token table
    ordinary_tokens: str = ""  # hash of the token table without added tokens, for operators; never compared

    @property
    def target(self) -> str:
        """A digest of `TARGET_FACTS`. An answer may continue at another verifier only where it is the same."""
        facts = [getattr(self, name) for name in TARGET_FACTS]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


TARGET_FACTS = ("fingerprint", "dtype", "exactness", "tokenizer", "vocabulary", "end_ids")
"""Fields of a verifier's Hello that an answer's tokens depend on beside the text. The degree of sharding is part of the
fingerprint. The limits (`max_*`) change no token: they only say which calls are refused."""

PROTOCOL_VERSION = 4


class DrafterPeer(Protocol):
    """A drafter, near or far."""

    async def hello(self) -> Hello: ...
    async def open(self, call: OpenCall) -> Opened: ...
    async def draft(self, call: DraftCall) -> DraftTree: ...
    async def close(self, call: CloseCall) -> Closed: ...


class VerifierPeer(Protocol):
    """A verifier, near or far."""

    async def hello(self) -> Hello: ...
    async def open(self, call: OpenCall) -> Opened: ...
    async def verify(self, call: VerifyCall) -> Verdict: ...
    async def close(self, call: CloseCall) -> Closed: ...


class PeerText:
    """A peer's copy of a text: `follow` brings it up to a call, or says that the text must be opened again."""

    def __init__(self) -> None:
        self.tokens = Tokens()

    @property
    def ids(self) -> list[int]:
        return self.tokens.ids

    def follow(self, update: TextUpdate) -> int:
        """Bring the copy up to `update` and return how many tokens of the old copy still stand.

        Raises NotFound, leaving the copy as it was, where `start` is past what we hold or the digest differs: the
        router's answer is to open the text again.
        """
        if update.start > len(self.tokens) or update.start + len(update.tokens) != update.base:
            raise NotFound(f"opening: holds {len(self.tokens)} tokens, the call starts at {update.start}")
        trial = Tokens(self.ids[: update.start], self.tokens.digests[: update.start + 1])
        trial.extend(update.tokens)
        if trial.digests[-1] != update.digest:
            raise NotFound("opening: the text's digest differs")
        kept = _common(self.ids, trial.ids)
        self.tokens = trial
        return kept


def _common(old: Sequence[int], new: Sequence[int]) -> int:
    """Length of the longest common prefix. The two differ, if at all, within the last few tokens."""
    length = min(len(old), len(new))
    if list(old[:length]) == list(new[:length]):
        return length
    return next(index for index in range(length) if old[index] != new[index])
