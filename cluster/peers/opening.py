"""Common parts of the handles of drafters and verifiers: leases, one text's opening at a peer, usual times."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dendro.calls import CloseCall, Hello, OpenCall, Opened, Peer, RequestParameters, TextUpdate, new_opening
from dendro.clock import Clock
from dendro.errors import DendroError
from dendro.failures import described, log_failure
from dendro.measured import smoothed
from dendro.shapes import TreeShape
from dendro.tasks import BackgroundTasks, end_task
from dendro.text import Text
from dendro.tree import DraftTree
from tree_layers.checkpoint import Facts

log = logging.getLogger("dendro.peers")

CLOSE_S = 5.0
"""Seconds that a peer may take to save a state and close the opening."""
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 3.0
STRIKES = 3
"""Number of malformed trees of a drafter after which a request asks it for no more."""

# The draft's deadline: min(max(3 * usual draft, 20 ms), max(2 * usual round at the verifier, 60 ms)). The first term
# tolerates a short slowdown of the drafter; the second limits the cost of a late draft to two verifier rounds. The
# floors keep scheduling jitter from counting as lateness.
DRAFT_FACTOR, DRAFT_FLOOR_S = 3.0, 0.020
VERIFY_FACTOR, VERIFY_FLOOR_S = 2.0, 0.060


P = TypeVar("P", bound=Peer)
P_co = TypeVar("P_co", bound=Peer, covariant=True)


@dataclass(frozen=True, slots=True)
class Leased(Generic[P_co]):
    """A replica held for one request. The replica ends the lease with the last opening that names `token`."""

    peer: P_co
    hello: Hello
    token: str  # empty: the peer has no leases
    address: str = ""  # address of the replica; empty: it is in this process


class Pool(Protocol[P_co]):
    """Replicas that serve the same model."""

    async def lease(self) -> Leased[P_co]:
        """Called when a text is to be opened. Returns a leased replica. Raises PeerLost or Overloaded if none is
        available now."""
        ...


@dataclass(slots=True)
class Pace:
    """Usual times at one target, over all requests of a router: of its rounds, and of each drafter's drafts. Seconds;
    zero or missing: not measured yet."""

    verify_s: float = 0.0
    draft_level_s: dict[str, float] = field(default_factory=dict)
    """Time of one level of a tree, by drafter: drafters work level by level."""

    def drafted(self, drafter: str, seconds: float, depth: int) -> None:
        self.draft_level_s[drafter] = smoothed(self.draft_level_s.get(drafter, 0.0), seconds / max(depth, 1))

    def verified(self, seconds: float) -> None:
        self.verify_s = smoothed(self.verify_s, seconds)

    def deadline_s(self, drafter: str, depth: int, longest_s: float) -> float:
        """Seconds that a round waits for a drafter's tree of `depth` levels."""
        level_s = self.draft_level_s.get(drafter, 0.0)
        patience = max(VERIFY_FACTOR * self.verify_s, VERIFY_FLOOR_S) if self.verify_s else longest_s
        usual = max(DRAFT_FACTOR * level_s * depth, DRAFT_FLOOR_S) if level_s else longest_s
        return min(usual, patience, longest_s)


class Opening(Generic[P]):
    """One opening of one text at one leased peer."""

    def __init__(
        self,
        leased: Leased[P],
        text: Text,
        target: Hello | None = None,
        marks: tuple[int, ...] = (),
        ahead: bool = False,
        echoes: bool = False,
    ) -> None:
        """target: hello of the text's verifier, if the peer is a drafter   marks: lengths of the text, beside those of
        `Text.marks`, at which a state may have been saved   ahead: announces a first round of the root alone
        echoes: True if the peer reports the log-probabilities of the text's tokens from `Text.echo_from` on"""
        self.peer = leased.peer
        self.hello = leased.hello
        self.leased = leased
        self.id = new_opening()
        self.sent = 0  # tokens that the peer was sent
        self._ahead = ahead
        self._parameters = RequestParameters(
            sampling=text.sampling if target is None else text.sampling.of_drafters,
            limits=text.limits,
            tenant=text.tenant,
            marks=text.marks + marks,
            vocabulary=0 if target is None else target.vocabulary,
            tokenizer="" if target is None else target.tokenizer,
            prompt_length=text.prompt_length,
            logprobs=text.logprobs,
            echo_from=text.echo_from if echoes else None,
            structure=text.structure,
        )

    async def open(self, text: Text) -> Opened:
        call = OpenCall(self.update(text), self._parameters, self.leased.token, self._ahead, text.traceparent)
        return await self.peer.open(call)

    def update(self, text: Text) -> TextUpdate:
        """The tokens that the peer was not sent yet. They count as sent from here on: a stream keeps the order of its
        calls."""
        update = TextUpdate.of(self.id, text, self.sent)
        self.sent = update.base
        return update

    def holds(self, tokens: int) -> None:
        """Record that the peer has the text's first `tokens` tokens, which another sent."""
        self.sent = max(self.sent, tokens)

    def unsent(self, update: TextUpdate) -> None:
        """Undo `update`: the peer refused the call before it read the text."""
        self.sent = update.start

    async def close(self, text: Text) -> int:
        """End the opening. Returns how many tokens the saved state covers. Never raises."""
        try:
            async with asyncio.timeout(CLOSE_S):
                return (await self.peer.close(CloseCall(self.update(text)))).saved
        except (DendroError, TimeoutError) as error:
            log.info("close: %s", described(error))
            return 0
        except Exception as error:  # an in-process engine's own fault: the request is over anyway
            log_failure(log, error, "close failed")
            return 0


class PeerHandle(Generic[P]):
    """Base of the handles of drafters and verifiers: one text, opened in the background at one peer at a time."""

    def __init__(self, pool: Pool[P], pace: Pace, clock: Clock) -> None:
        self.saved = 0  # tokens that the state saved at closing covers
        self.opened: Opened | None = None  # result of the first opening
        self._pool = pool
        self._pace = pace
        self._clock = clock
        self._opening: Opening[P] | None = None
        self._pending: Opening[P] | None = None  # the opening in progress
        self._opening_task: asyncio.Task[None] | None = None
        self._closed = False
        self._background = BackgroundTasks()

    async def close(self, text: Text) -> None:
        """Close the opening; the peer saves its state of `text`. May be called again; never raises."""
        if self._closed:
            return
        self._closed = True
        await end_task(self._opening_task)
        self._opening_task = None  # the traceback of a failed opening refers to the text
        opening, self._opening = self._opening or self._pending, None
        if opening is not None:
            self.saved = await opening.close(text)

    def _close_pending(self, text: Text) -> None:
        """Close an opening that failed or lost the race, so that a live peer frees its memory."""
        if self._pending is not None:
            self._background.start(self._pending.close(text))
            self._pending = None


def checkpoint_mismatch(hello: Hello, facts: Facts | None) -> str:
    """Difference of a replica from the router's facts of its checkpoint; empty if there is none, or without facts. By
    these facts it was decided at start whether a drafter's tokens fit its target's. A replica of the same facts may
    have fewer tokens, where weights have fewer rows than the configuration says, but none that the router lacks."""
    if facts is None or (hello.facts == facts.digest and hello.vocabulary <= facts.vocabulary):
        return ""
    compared = (
        ("tokenizer", hello.tokenizer, facts.tokenizer),
        ("vocabulary", hello.vocabulary, facts.vocabulary),
        ("end ids", hello.end_ids, tuple(sorted(facts.end_ids))),
    )
    parts = [f"its {name} is {theirs}, here {ours}" for name, theirs, ours in compared if theirs != ours]
    return f"it was loaded from another checkpoint: {'; '.join(parts) or 'its configuration differs'}"


def tree_fault(tree: DraftTree, root: int, shape: TreeShape, vocabulary: int) -> str:
    """Why a drafter's tree is not one of this shape for a text that ends with `root`; empty if it is. vocabulary: the
    target's"""
    if tree.tokens[0] != root:
        return f"begins with {tree.tokens[0]}; the text's root is {root}"
    if tree.rows > shape.rows or tree.depth > shape.depth:
        return f"has {tree.rows} rows and depth {tree.depth}; requested was {shape}"
    if (tree.tokens >= vocabulary).any():
        return f"has tokens past the target's vocabulary of {vocabulary}"
    return ""
