"""A request's drafter: one that is late, wrong or gone costs the round its speculation and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from dendro.calls import DraftCall, DrafterPeer, Opened
from dendro.errors import BadRequest, DendroError, NotFound, PeerLost
from dendro.shapes import TreeShape
from dendro.text import Text
from dendro.tree import DraftTree
from tree_layers.checkpoint import Facts

from cluster.peers.opening import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    STRIKES,
    BackgroundTasks,
    CallTimes,
    Opening,
    Pace,
    Pool,
    end_task,
    log,
    unlike,
)
from cluster.peers.verifier import VerifierHandle

FROZEN_S = 5.0
"""How long a late draft may stay out before its drafter counts as frozen and another is leased."""
IDLE_ROUNDS = 32
"""Rounds of `off` after which a drafter's lease is given back."""


class SpeculationGate(Protocol):
    """The requests that run beside one, as far as its drafter is concerned."""

    @property
    def guesses(self) -> bool:
        """Whether trees are still worth it, when a text is about to be opened for them."""
        ...

    def opening(self) -> AbstractContextManager[None]:
        """While a drafter processes the text."""
        ...


class DrafterHandle:
    """A request's drafter. `draft` gives a tree in time, or the root alone; it never raises for a drafter's fault."""

    def __init__(
        self,
        pool: Pool[DrafterPeer],
        pace: Pace,
        verifier: VerifierHandle,
        longest_s: float = 0.5,
        gate: SpeculationGate | None = None,
        adaptive: bool = True,
        facts: Facts | None = None,
        vocabulary: int = 0,
    ) -> None:
        """`longest_s` bounds every wait for a draft; a round that is not `adaptive` waits so long. The verifier's
        limits are those that a tree must keep. Without `gate` a tree that is asked for is wanted. `facts` are what
        the router knows of the drafter's checkpoint; a replica of another one is not used. `vocabulary` is the target's
        by the router's facts, until its verifier says it."""
        self._facts = facts
        self._vocabulary = vocabulary
        self.clock = CallTimes()
        self.fallbacks: Counter[str] = Counter()  # rounds without the tree that was asked for, by reason
        self.leases = 0
        self.saved = 0
        self.opened: Opened | None = None
        self._pool = pool
        self._pace = pace
        self._verifier = verifier
        self._longest_s = longest_s
        self._gate = gate
        self._adaptive = adaptive
        self._opening: Opening[DrafterPeer] | None = None
        self._tried: Opening[DrafterPeer] | None = None
        self._idle = 0
        self._strikes = 0
        self._given_up = ""  # why no drafter is asked any more in this request; empty: it is
        self._late_draft: asyncio.Task[None] | None = None
        self._pause_s = FIRST_BACKOFF_S
        self._not_before_s = 0.0
        self._closed = False
        self._background = BackgroundTasks()
        self._opening_task: asyncio.Task[None] | None = None  # a text that never wants a tree costs no drafter anything
        verifier.on_refused_tree = self.strike

    def strike(self) -> None:
        """The drafter made a tree that is none; after the third, it is asked for no more."""
        self._strikes += 1

    async def draft(self, text: Text, shape: TreeShape) -> DraftTree:
        if not shape.drafted:
            self._rest(text)
            return DraftTree.root_only(text.root)
        self._idle = 0
        if self._opening_task is None:
            await self._verifier_greets()  # by then it shows how many requests came with this one
            if self._gate is not None and not self._gate.guesses:
                return self._without(text, "unwanted")
            self._begin(text)
            await self._wait_first()
        reason = self._unfit(text, shape)
        if reason:
            return self._without(text, reason)
        opening = self._opening
        if opening is None:
            self._begin(text)
            return self._without(text, "opening")
        return await self._draft(opening, text, shape)

    async def _draft(self, opening: Opening[DrafterPeer], text: Text, shape: TreeShape) -> DraftTree:
        began_s = time.monotonic()
        call = DraftCall(opening.update(text), shape)
        work = asyncio.ensure_future(opening.peer.draft(call))
        longest_s = self._longest_s
        deadline_s = self._pace.deadline_s(shape.depth, longest_s) if self._adaptive else longest_s
        try:
            await asyncio.wait({work}, timeout=deadline_s)
        except asyncio.CancelledError:
            work.cancel()
            raise
        wall_s = time.monotonic() - began_s
        if not work.done():
            # The call stays: the peer has the text from it, and its answer says what the usual time really is.
            self._late_draft = self._background.start(self._late(opening, work, began_s, text, shape))
            return self._without(text, "late", wall_s)
        try:
            tree = work.result()
            self._check(tree, text, shape)
        except BadRequest as error:
            log.warning("drafter: its tree is refused: %s", error)
            opening.unsent(call.update)
            self.strike()
            return self._without(text, "malformed", wall_s)
        except NotFound as error:
            log.info("drafter: %s; the text is opened again", error)
            self._opening = None
            self._begin(text, opening)
            return self._without(text, "stale", wall_s)
        except DendroError as error:
            log.info("drafter: %s", error)
            self._leave(opening, text)
            self._back_off()
            return self._without(text, "lost" if isinstance(error, PeerLost) else "failed", wall_s)
        except Exception:  # a near engine's own fault costs the round its speculation, as a far one's does
            log.exception("drafter: failed")
            self._leave(opening, text)
            self._back_off()
            return self._without(text, "failed", wall_s)
        self._pace.drafted(wall_s, shape.depth)
        self.clock.add(wall_s, tree.draft_us)
        self._pause_s = FIRST_BACKOFF_S
        return tree

    async def close(self, text: Text) -> None:
        """Let go, with the text so that its last state can be saved. May be called again; never raises."""
        if self._closed:
            return
        self._closed = True
        await end_task(self._opening_task)
        opening, self._opening = self._opening or self._tried, None
        if opening is not None:
            self.saved = await opening.close(text)

    def _unfit(self, text: Text, shape: TreeShape) -> str:
        """Why no tree of this shape can be asked for; empty where one can."""
        opening, target = self._opening, self._verifier.hello
        if not self._given_up and self._strikes >= STRIKES:
            self._given_up = "struck"
        if self._given_up:
            if opening is not None:
                self._leave(opening, text)
            return self._given_up
        if self._late_draft is not None and not self._late_draft.done():
            return "busy"  # with a tree that was too late: to wait for it again would pay for it twice
        for hello in (target, opening.hello if opening is not None else None):
            if hello is not None and (shape.rows > hello.max_rows or shape.depth > hello.max_depth):
                return "limits"
        return ""

    def _check(self, tree: DraftTree, text: Text, shape: TreeShape) -> None:
        if tree.tokens[0] != text.root:
            raise BadRequest("tree.tokens", f"begins with {tree.tokens[0]}; the text's root is {text.root}")
        if tree.rows > shape.rows or int(tree.depths.max()) > shape.depth:
            raise BadRequest("tree", f"has {tree.rows} rows and depth {tree.depths.max()}; asked was {shape}")
        target = self._verifier.hello
        if target is not None and (tree.tokens >= target.vocabulary).any():
            raise BadRequest("tree.tokens", f"past the target's vocabulary of {target.vocabulary}")

    async def _verifier_greets(self) -> None:
        """Until a verifier is leased, or none was in time."""
        verifier = asyncio.ensure_future(self._verifier.ready())
        greeted = asyncio.ensure_future(self._verifier.greeted.wait())
        try:
            await asyncio.wait({verifier, greeted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            verifier.cancel()
            greeted.cancel()

    async def _wait_first(self) -> None:
        """The first round waits for the drafter no longer than for the verifier's own opening; a later one that is the
        first to want a tree does not wait."""
        if self._opening is None and self._opening_task is not None:
            verifier = asyncio.ensure_future(self._verifier.ready())
            try:
                await asyncio.wait({self._opening_task, verifier}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                verifier.cancel()

    def _without(self, text: Text, reason: str, wall_s: float = 0.0) -> DraftTree:
        """The round's plain decoding, at the cost that the drafter made."""
        self.fallbacks[reason] += 1
        wall_us = int(1e6 * wall_s)
        self.clock.add(wall_s, wall_us)
        return replace(DraftTree.root_only(text.root), draft_us=wall_us, missed=True)

    async def _late(
        self,
        opening: Opening[DrafterPeer],
        work: asyncio.Future[DraftTree],
        began_s: float,
        text: Text,
        shape: TreeShape,
    ) -> None:
        """Learn from a draft that nobody waits for any more; a drafter that never answers is left."""
        await asyncio.wait({work}, timeout=FROZEN_S)
        if work.done() and not work.cancelled() and work.exception() is None:
            self._pace.drafted(time.monotonic() - began_s, shape.depth)
            return
        work.cancel()
        if not self._closed:
            self._leave(opening, text)

    def _rest(self, text: Text) -> None:
        """A round without speculation; after many, the drafter is given back."""
        self._idle += 1
        if self._idle >= IDLE_ROUNDS and self._opening is not None:
            self._leave(self._opening, text)

    def _leave(self, opening: Opening[DrafterPeer], text: Text) -> None:
        if self._opening is opening:
            self._opening = None
        self._background.start(opening.close(text))

    def _begin(self, text: Text, old: Opening[DrafterPeer] | None = None) -> None:
        """Open in the background, unless that runs or is too soon. `old` is opened again under its own lease."""
        running = self._opening_task is not None and not self._opening_task.done()
        if not running and not self._closed and (old is not None or time.monotonic() >= self._not_before_s):
            self._opening_task = self._background.start(self._settle(text, old))

    def _back_off(self) -> None:
        """The next lease is not taken at once: what failed may fail again, at the cost of a text each time."""
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_BACKOFF_S)

    async def _settle(self, text: Text, old: Opening[DrafterPeer] | None = None) -> None:
        """Open the text at a drafter, once; the next round that wants a tree tries again."""
        with self._gate.opening() if self._gate is not None else contextlib.nullcontext():
            await self._open(text, old)

    async def _open(self, text: Text, old: Opening[DrafterPeer] | None) -> None:
        try:
            if old is not None:
                leased = old.leased
            else:
                leased = await self._pool.lease()
                self.leases += 1
            if fault := unlike(leased.hello, self._facts):
                log.warning("drafter: is not used: %s", fault)
                self._given_up = "mismatch"
                return
            target = self._verifier.hello
            opening = self._tried = Opening(leased, text, target.vocabulary if target is not None else self._vocabulary)
            opened = await opening.open(text)
        except (DendroError, TimeoutError) as error:
            log.info("drafter: %s; trying again later", error or "does not answer")
            self._back_off()
            if self._tried is not None:
                self._background.start(self._tried.close(text))
                self._tried = None
        else:
            self.opened = self.opened or opened
            self._opening, self._tried = opening, None
        finally:
            if old is not None:  # only now: a lease ends with the last of its openings
                self._background.start(old.close(text))


class NoDrafter:
    """The handle of a target that has no drafter."""

    opened: Opened | None = None

    async def draft(self, text: Text, shape: TreeShape) -> DraftTree:
        return DraftTree.root_only(text.root)

    async def close(self, text: Text) -> None:
        return
