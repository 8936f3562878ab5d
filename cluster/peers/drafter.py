"""Handles of a request's drafters. A late, wrong or lost draft costs its round its speculation and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import numpy as np
from dendro.calls import IDLE_ROUNDS, DraftCall, DrafterPeer, Opened
from dendro.clock import Clock
from dendro.drawn_form import has_drawn_form
from dendro.errors import BadAnswer, BadRequest, DendroError, NotFound, PeerLost
from dendro.failures import described, log_failure
from dendro.order import LONGEST_WAIT_US, Missed, Order
from dendro.shapes import DynamicShape, TreeShape, child_counts
from dendro.tasks import first_of
from dendro.text import Text, Verdict
from dendro.tree import DraftTree
from tree_layers.checkpoint import Facts

from cluster.arms import Arm
from cluster.peers.opening import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    STRIKES,
    Opening,
    Pace,
    PeerHandle,
    Pool,
    checkpoint_mismatch,
    log,
    tree_fault,
)
from cluster.peers.verifier import VerifierHandle

FROZEN_S = 5.0
"""Seconds that a late draft may take longer before its drafter counts as hung and another is leased."""

OPEN_S = 120.0
"""Seconds that a drafter may take to open a text. A verifier may take as long as the request."""
TEXT_LENGTH = "update.base"
"""The field that a drafter names where it refuses a text for its length."""


ORDERS_APART, MOST_APART = 4, 64
"""Trees that the router asks for itself after an ordered one did not come; after each that follows twice as many, up to
MOST_APART."""


class SpeculationGate(Protocol):
    """Part of a running request that a drafter's handle uses: what the speculation trial decided."""

    @property
    def speculates(self) -> bool:
        """Read just before the text is opened at a drafter. True if the request may speculate."""
        ...

    @property
    def rests(self) -> bool:
        """Read in each round without a tree. True if the request will not speculate for many rounds: the drafter is
        then released."""
        ...

    def opening(self) -> AbstractContextManager[None]:
        """Entered while a drafter processes the text."""
        ...


class DrafterHandle(PeerHandle[DrafterPeer]):
    """One of a request's drafters. `draft` returns a tree in time, or the root alone; it never raises for a drafter's
    fault."""

    def __init__(
        self,
        name: str,
        pool: Pool[DrafterPeer],
        pace: Pace,
        verifier: VerifierHandle,
        gate: SpeculationGate,
        longest_s: float = 0.5,
        adaptive: bool = True,
        facts: Facts | None = None,
        clock: Clock = time.monotonic,
        orders: bool = True,
    ) -> None:
        """`name`: the maker of its arms. `verifier`: has a lease before the first call; trees must keep its limits.
        `longest_s` bounds every wait for a draft; a round that is not `adaptive` waits up to it. `facts`: of the
        drafter's checkpoint; replicas of another one are not used. `orders`: whether the verifier may be given orders
        of trees."""
        super().__init__(pool, pace, clock)
        self.name = name
        self._facts = facts
        self.fallbacks: Counter[str] = Counter()  # rounds without the requested tree, by reason
        self.leases = 0
        self._verifier = verifier
        self._longest_s = longest_s
        self._gate = gate
        self._adaptive = adaptive
        self._idle = 0
        self._orders = orders
        self._here = 0  # trees that this handle asks for itself before the next order
        self._apart = ORDERS_APART  # what `_here` will be after an ordered tree that does not come
        self._held = 0  # tokens of the text before the last ordered round
        self._saved_at = 0  # length of the text when a released drafter saved its state; 0: none did
        self._strikes = 0
        self._given_up = ""  # why this request uses no drafter any more; empty while it does
        self._late_draft: asyncio.Task[None] | None = None
        self._pause_s = FIRST_BACKOFF_S
        self._not_before_s = 0.0

    def strike(self) -> None:
        """Count a malformed tree; after STRIKES of them no more are requested."""
        self._strikes += 1

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        """A tree of the arm's shape; the root alone where none comes in time. The arm is one of this drafter's."""
        self._idle = 0
        if self._opening_task is None:
            if not self._gate.speculates:
                return self._root_alone(text, "unwanted")
            self._begin(text)
            await self._wait_first(text)
        if reason := self._refusal(text, arm.shape):
            return self._root_alone(text, reason)
        opening = self._opening
        if opening is None:
            self._begin(text)
            return self._root_alone(text, "opening")
        return await self._draft(opening, text, arm.shape)

    def order(self, text: Text, arm: Arm) -> Order | str:
        """The order of the next round's tree, for the verifier, or why this handle must ask for the tree itself."""
        opening, target = self._opening, self._verifier.hello
        if not self._orders or not target.orders:
            return "not ordered here"
        if text.sampling.draws_guesses:
            return "drawn"
        if opening is None:
            return "opening"
        if self._here > 0:
            return "missed"
        if reason := self._refusal(text, arm.shape):
            return reason
        if len(text) + target.max_depth + 1 > opening.hello.max_length:  # the drafter may refuse the next round's text
            return "limits"
        drafter, wait_us = opening.leased.address or self.name, 1e6 * self._deadline_s(text, arm.shape)
        return Order(drafter, opening.id, arm.shape, opening.sent, int(min(wait_us, LONGEST_WAIT_US)))

    def ordered(self, text: Text, arm: Arm, verdict: Verdict) -> None:
        """Learn of the tree that was ordered for the round that has ended. `text` has the verdict's tokens."""
        self._idle, opening = 0, self._opening
        held, self._held = self._held, len(text) - len(verdict.tokens)
        if not verdict.missed:
            self._here, self._apart = 0, ORDERS_APART
            if asked := verdict.tree is not None and verdict.tree.draft_us > 0:
                self._pace.drafted(self.name, verdict.drafted_us / 1e6, arm.depth)
            if opening is not None:  # a tree that came before it was asked for was made with the call before
                opening.holds(self._held if asked else held)
            return
        self.fallbacks[verdict.missed] += 1
        # This handle asks for the next trees: it finds a drafter that is lost or hangs, and opens the text again.
        self._here, self._apart = self._apart, min(2 * self._apart, MOST_APART)
        if verdict.missed == Missed.MALFORMED:
            self.strike()

    def prepare(self, text: Text) -> None:
        """Open the text at the drafter in the background, if the request may speculate."""
        if self._opening_task is None and self._gate.speculates:
            self._begin(text)

    async def _draft(self, opening: Opening[DrafterPeer], text: Text, shape: TreeShape) -> DraftTree:
        began_s = self._clock()
        self._here -= self._here > 0
        call = DraftCall(opening.update(text), shape)
        work = asyncio.ensure_future(opening.peer.draft(call))
        try:
            await asyncio.wait({work}, timeout=self._deadline_s(text, shape))
        except asyncio.CancelledError:
            work.cancel()
            raise
        wall_s = self._clock() - began_s
        if not work.done():
            # The call goes on: it carries the text to the peer, and its duration updates the usual time.
            self._late_draft = self._background.start(self._late(opening, work, began_s, text, shape))
            return self._root_alone(text, "late", wall_s)
        try:
            tree = work.result()
            self._check(tree, text, shape)
        except Exception as error:  # an in-process engine's own fault may be any
            return self._root_alone(text, self._reason_after(error, opening, call, text), wall_s)
        self._pace.drafted(self.name, wall_s, _levels(tree, shape))
        self._pause_s = FIRST_BACKOFF_S
        return tree

    def _deadline_s(self, text: Text, shape: TreeShape) -> float:
        """Seconds that a round waits for a tree; may be infinite."""
        if text.sampling.draws_guesses:  # Giving a tree up because of what was drawn would change the law.
            return FROZEN_S
        return self._pace.deadline_s(self.name, shape.depth, self._longest_s) if self._adaptive else self._longest_s

    def _reason_after(self, error: Exception, opening: Opening[DrafterPeer], call: DraftCall, text: Text) -> str:
        """Open the text again, or release the drafter, after a call that failed; returns why the round has no tree."""
        match error:
            case BadRequest() if self._gives_up_for_length(error):
                self._release(opening, text)
                return "limits"
            case BadAnswer() | BadRequest():
                log.warning("drafter %s: sends no valid tree: %s", self.name, described(error))
                opening.unsent(call.update)
                self.strike()
                return "malformed"
            case NotFound():
                log.info("drafter %s: %s; the text is opened again", self.name, described(error))
                self._opening = None
                self._begin(text, opening)
                return "stale"
            case DendroError():
                log.info("drafter %s: %s", self.name, described(error))
            case _:
                log_failure(log, error, "drafter %s: failed", self.name)
        self._release(opening, text)
        self._back_off()
        return "lost" if isinstance(error, PeerLost) else "failed"

    def _gives_up_for_length(self, error: Exception) -> bool:
        """Use the drafter no more if this error refuses the text for its length. Returns True if it does."""
        if not isinstance(error, BadRequest) or error.field != TEXT_LENGTH:
            return False
        log.info("drafter %s: refuses the text, which is too long: %s", self.name, described(error))
        self._given_up = "limits"
        return True

    def _refusal(self, text: Text, shape: TreeShape) -> str:
        """Reason why no tree of this shape can be requested; empty if one can."""
        opening, target = self._opening, self._verifier.hello
        if not self._given_up and self._strikes >= STRIKES:
            self._given_up = "struck"
        if self._given_up:
            if opening is not None:
                self._release(opening, text)
            return self._given_up
        if self._late_draft is not None and not self._late_draft.done():
            return "busy"  # an earlier round's tree is late: to wait for it again would cost twice
        limits = [target] if opening is None else [target, opening.hello]
        return "limits" if any(shape.rows > each.max_rows or shape.depth > each.max_depth for each in limits) else ""

    def _check(self, tree: DraftTree, text: Text, shape: TreeShape) -> None:
        if fault := tree_fault(tree, text.root, shape, self._verifier.hello.vocabulary):
            raise BadAnswer(f"tree: {fault}")
        if text.sampling.draws_guesses and not _has_form(tree, shape):
            raise BadAnswer(f"tree.parents: has another form than {shape}, whose guesses are drawn")

    async def _wait_first(self, text: Text) -> None:
        """Wait for the drafter's opening, but no longer than for the verifier's. So a first tree that is requested in a
        later round, when the verifier's text is open, does not wait. Where guesses are drawn, wait until the drafter
        is hung: the tokens of an answer depend on which rounds have a tree."""
        if self._opening_task is None:  # the handle is closed
            return
        if text.sampling.draws_guesses:
            await asyncio.wait({self._opening_task}, timeout=FROZEN_S)
        else:
            await first_of(self._opening_task, self._verifier.ready())

    def _root_alone(self, text: Text, reason: str, wall_s: float = 0.0) -> DraftTree:
        """The root alone, for a round of plain decoding; `wall_s` is the time that was spent waiting for a draft."""
        self.fallbacks[reason] += 1
        return replace(DraftTree.root_only(text.root), draft_us=int(1e6 * wall_s), missed=True)

    async def _late(
        self,
        opening: Opening[DrafterPeer],
        work: asyncio.Future[DraftTree],
        began_s: float,
        text: Text,
        shape: TreeShape,
    ) -> None:
        """Learn the duration of a late draft. A drafter that fails it, or does not answer within FROZEN_S, is
        released."""
        await asyncio.wait({work}, timeout=FROZEN_S)
        if work.done() and not work.cancelled() and work.exception() is None:
            self._pace.drafted(self.name, self._clock() - began_s, _levels(work.result(), shape))
            return
        work.cancel()
        if not self._closed:
            self._release(opening, text)

    def skip(self, text: Text) -> None:
        """Count a round without a draft. The drafter is released after IDLE_ROUNDS of them, and at once where the
        request rests."""
        self._idle += 1
        if self._opening is not None and (self._idle >= IDLE_ROUNDS or self._gate.rests):
            self._release(self._opening, text)

    def _release(self, opening: Opening[DrafterPeer], text: Text) -> None:
        if self._opening is opening:
            self._opening = None
        self._background.start(self._close_released(opening, text))

    async def _close_released(self, opening: Opening[DrafterPeer], text: Text) -> None:
        if await opening.close(text):
            self._saved_at = opening.sent

    def _begin(self, text: Text, old: Opening[DrafterPeer] | None = None) -> None:
        """Open in the background, unless an opening runs or the last failure is too recent. `old` is replaced under its
        own lease, at once."""
        running = self._opening_task is not None and not self._opening_task.done()
        if not running and not self._closed and (old is not None or self._clock() >= self._not_before_s):
            self._opening_task = self._background.start(self._lease_and_open(text, old))

    def _back_off(self) -> None:
        """Delay the next lease: if it failed too, it would cost another prefill of the text."""
        self._not_before_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_BACKOFF_S)

    async def _lease_and_open(self, text: Text, old: Opening[DrafterPeer] | None) -> None:
        """Try once to open the text at a drafter; the next round that wants a tree retries."""
        with self._gate.opening():
            try:
                if old is not None:
                    leased = old.leased
                else:
                    leased = await self._pool.lease()
                    self.leases += 1
                if fault := checkpoint_mismatch(leased.hello, self._facts):
                    log.warning("drafter %s: is not used: %s", self.name, fault)
                    self._given_up = "mismatch"
                    return
                marks = (self._saved_at,) if self._saved_at else ()
                opening = self._pending = Opening(leased, text, self._verifier.hello, marks)
                async with asyncio.timeout(OPEN_S):
                    opened = await opening.open(text)
            except (DendroError, TimeoutError) as error:
                if not self._gives_up_for_length(error):
                    log.info("drafter %s: %s; trying again later", self.name, described(error))
                self._back_off()
                self._close_pending(text)
            else:
                self.opened = self.opened or opened
                self._opening, self._pending = opening, None
            finally:
                if old is not None:  # not before: a lease ends with the last of its openings
                    self._background.start(old.close(text))


class DrafterHandles:
    """A request's drafters. Each arm's trees are made by the drafter that it names, whose handle is made when the first
    is requested: a drafter that the policy does not choose is not leased. A late or lost one misses its own trees."""

    def __init__(self, make: Callable[[str], DrafterHandle]) -> None:
        """make: makes the handle of a drafter, by the drafter's name"""
        self.handles: dict[str, DrafterHandle] = {}  # key: drafter; in the order of first trees
        self._make = make

    @property
    def openings(self) -> dict[str, Opened]:
        """The first opening at each drafter that has opened the text."""
        return {name: handle.opened for name, handle in self.handles.items() if handle.opened is not None}

    @property
    def fallbacks(self) -> dict[tuple[str, str], int]:
        """Rounds without the tree that was asked for, by drafter and reason."""
        handles = self.handles.items()
        return {(name, reason): rounds for name, handle in handles for reason, rounds in handle.fallbacks.items()}

    def strike(self, arm: Arm) -> None:
        """Count a refused tree at the arm's drafter."""
        if arm.drafted:
            self._handle(arm.maker).strike()

    def prepare(self, text: Text, arm: Arm) -> None:
        """Open the text at the arm's drafter in the background, if the arm has one."""
        if arm.drafted:
            self._handle(arm.maker).prepare(text)

    def order(self, text: Text, arm: Arm) -> Order | str:
        """The order of the next round's tree, or why there is none."""
        handle = self.handles.get(arm.maker)
        return handle.order(text, arm) if handle is not None else "opening"

    def ordered(self, text: Text, arm: Arm, verdict: Verdict) -> None:
        """Learn of a tree that was ordered. The other drafters count the round as idle."""
        for name, handle in self.handles.items():
            if name == arm.maker:
                handle.ordered(text, arm, verdict)
            else:
                handle.skip(text)

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        asked = self._handle(arm.maker) if arm.drafted else None
        for handle in self.handles.values():
            if handle is not asked:  # it counts the round as idle
                handle.skip(text)
        return DraftTree.root_only(text.root) if asked is None else await asked.draft(text, arm)

    def _handle(self, name: str) -> DrafterHandle:
        if name not in self.handles:
            self.handles[name] = self._make(name)
        return self.handles[name]

    async def close(self, text: Text) -> None:
        """Close the opening at each drafter, all at once."""
        await asyncio.gather(*(handle.close(text) for handle in self.handles.values()))


def _has_form(tree: DraftTree, shape: TreeShape) -> bool:
    """True if a tree of drawn guesses has the rows that its shape and, where that is dynamic, its laws decide: a guess
    that was left out after it was drawn would change the law of what is emitted."""
    if isinstance(shape, DynamicShape):
        return has_drawn_form(tree, shape)
    return tuple(np.bincount(tree.parents[1:], minlength=tree.rows).tolist()) == child_counts(shape)


def _levels(tree: DraftTree, shape: TreeShape) -> int:
    """Number of levels that were drafted."""
    return tree.depth if shape.stops else shape.depth
