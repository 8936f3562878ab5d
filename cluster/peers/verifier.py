"""Handle of a request's verifier. A lost verifier is replaced, and the text opened at the next; the tokens stay."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from dendro.calls import TARGET_FACTS, Hello, Opened, VerifierPeer, VerifyCall
from dendro.clock import Clock
from dendro.errors import BadAnswer, BadRequest, DendroError, EngineFailed, NotFound, Overloaded, PeerLost
from dendro.failures import described
from dendro.logprobs import NOT_ECHOED, EchoedLogprobs, fit
from dendro.measured import microseconds
from dendro.order import Order
from dendro.shapes import OFF
from dendro.tasks import end_task, first_of
from dendro.text import Finish, Text, Verdict, finish_at
from dendro.tree import DraftTree
from tree_layers.checkpoint import Facts

from cluster.peers.opening import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    STRIKES,
    Leased,
    Opening,
    Pace,
    PeerHandle,
    Pool,
    checkpoint_mismatch,
    log,
    tree_fault,
)

STEP_S, STEPS = 30.0, 2
"""Seconds that a verifier may take for a round, queue included, before it counts as hung; or as many as STEPS steps of
its target may take, where these are more: a round waits for the step in progress, and its own comes after it."""
PATIENCE_S = 60.0
"""Seconds for which a request tries again to lease a verifier and open its text there: from its first attempt, and from
the first failure of an opening that was sent."""
SLOW_OPENING = 1 / 3
"""Share of the patience after which a text whose opening is not answered is also opened at another replica."""

Result = TypeVar("Result")


class CallLimit:
    """Ends a call that takes longer than `limit_s`, with one timer of the loop for all calls of a request.

    (`asyncio.timeout` sets and cancels a timer for every call: a twentieth of a router's round without speculation. A
    task for every call would be resumed twice more.)
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._caller: asyncio.Task[Any] | None = None  # the task that waits for the call in progress
        self._due_s = 0.0  # time at which the call is ended, by the loop's clock
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, call: Awaitable[Result], more_s: float = 0.0) -> Result:
        """The call's result. Raises TimeoutError after the limit and `more_s`. One call at a time, in a task."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._due_s, self._expired = loop.time() + self._limit_s + more_s, False
        if self._timer is None:
            self._timer = loop.call_at(self._due_s, self._check)
        cancelling, self._caller = task.cancelling(), task
        try:
            return await call
        except asyncio.CancelledError:
            if self._expired and task.cancelling() == cancelling + 1:
                raise TimeoutError from None
            raise
        finally:
            self._caller = None
            if self._expired:
                task.uncancel()

    def _check(self) -> None:
        self._timer = None
        if self._caller is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due_s:  # the timer was set for an earlier call
            self._timer = loop.call_at(self._due_s, self._check)
            return
        self._expired = True
        self._caller.cancel()

    def close(self) -> None:
        """End the timer: no more calls are made."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class VerifierHandle(PeerHandle[VerifierPeer]):
    """A request's verifier. `verify` returns the target's tokens, and opens the text at other replicas as needed."""

    def __init__(
        self,
        text: Text,
        pool: Pool[VerifierPeer],
        pace: Pace,
        patience_s: float = PATIENCE_S,
        step_s: float = STEP_S,
        facts: Facts | None = None,
        clock: Clock = time.monotonic,
        beside: VerifierHandle | None = None,
        plain_first: bool = False,
    ) -> None:
        """`facts`: of the target's checkpoint; replicas of another one are not used. `beside`: the handle of a text
        that begins alike: this one is opened at its replica first, under its lease. `plain_first`: the first round's
        tree is its root alone, which the verifier may verify with the text."""
        super().__init__(pool, pace, clock)
        self._facts = facts
        self.moves = 0  # times that the text was opened at another verifier
        self.reopened = 0  # times that the text was opened again at the same verifier
        self._hello: Hello | None = None  # hello of the replica that was leased last
        self._greeted = asyncio.Event()  # set when `_hello` is known
        self._patience_s = patience_s
        self._plain_first = plain_first
        self._limit = CallLimit(step_s)
        self._order: Order | None = None  # order of the last call that has a verdict
        self._announced_s: float | None = None  # when the last call was made, if it announced a round without a tree
        self._turns = asyncio.Lock()
        self._faults = 0  # openings and rounds since the last verdict that failed by a verifier's own fault
        first = self._lease_and_open(text) if beside is None else self._open_beside(text, beside)
        self._opening_task = self._background.start(first)

    async def close(self, text: Text) -> None:
        self._limit.close()
        await super().close(text)

    async def ready(self) -> None:
        """Wait until the text is open for the first time, or opening it has failed; never raises."""
        task = self._opening_task
        if self._opening is None and task is not None:
            await asyncio.wait({task})

    async def first_hello(self) -> Hello:
        """Wait for the first leased verifier's hello. Raises PeerLost or Overloaded where none is leased within the
        patience."""
        if self._hello is None and (task := self._opening_task) is not None:
            await first_of(task, self._greeted.wait())
        if self._hello is None:
            await self._current_opening()  # raises what ended it
        return self.hello

    @property
    def hello(self) -> Hello:
        """The hello of the leased replica."""
        assert self._hello is not None, "first_hello() has waited for it"
        return self._hello

    async def prompt_logprobs(self) -> EchoedLogprobs:
        """Wait until the text is open. Returns the log-probabilities that the opening reported, and keeps no copy.
        Raises the error that ended the opening."""
        await self._current_opening()
        assert self.opened is not None
        logprobs, self.opened = self.opened.logprobs, replace(self.opened, logprobs=NOT_ECHOED)
        return logprobs

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        """The target's verdict. Raises BadRequest for a text that verifiers refuse, PeerLost or Overloaded after the
        patience, EngineFailed when a second opening or round since the last verdict fails by a verifier's own fault,
        the same one's or another's."""
        give_up_s = math.inf  # the patience begins with the first failure: a round may take longer
        forgotten, refused = 0, False
        while True:
            opening = await self._current_opening()
            began_s = self._clock()
            call = VerifyCall(opening.update(text), tree, tree.ahead, tree.order, tree.ordered)
            try:
                # The wait for a tree is not the verifier's time.
                more_s = self._order.wait_us / 1e6 if self._order is not None else 0.0
                verdict = await self._limit.wait(opening.peer.verify(call), more_s)
                _check_verdict(verdict, tree, text, opening.hello, self._order)
            except (DendroError, TimeoutError) as error:
                give_up_s = min(give_up_s, self._clock() + self._patience_s)
                forgotten += isinstance(error, NotFound)
                if await self._recover(error, opening, call, text, forgotten, give_up_s):
                    tree, refused = DraftTree.root_only(text.root), True
                continue
            self._faults = 0
            if not verdict.cold and not tree.ordered:
                self._pace.verified(self._clock() - began_s)
            # A round begun ahead cannot be older than the call that announced it, nor can an ordered tree.
            announced_s = began_s if self._announced_s is None else self._announced_s
            limits_us = microseconds(began_s - announced_s), microseconds(self._clock() - announced_s)
            self._order = tree.order
            self._announced_s = began_s if tree.ahead or tree.order is not None else None
            return _plausible(verdict, *limits_us, refused)

    async def _recover(
        self,
        error: Exception,
        opening: Opening[VerifierPeer],
        call: VerifyCall,
        text: Text,
        forgotten: int,
        give_up_s: float,
    ) -> bool:
        """Prepare to repeat a call that failed: open the text again or elsewhere, or wait. Returns True if the verifier
        refused the tree, so that the next call has the root alone. Raises the error that ends the request.

        error: a DendroError or TimeoutError   forgotten: times in this round that a verifier did not know the text
        give_up_s: time after which the call is not repeated for a replica that is full, lost or at fault
        """
        match error:
            case NotFound():
                log.info("verifier: %s; the text is opened again", described(error))
                self.reopened += 1
                if forgotten > 2 * STRIKES:
                    raise EngineFailed(f"verifier: lost the text {forgotten} times in one round: {error}") from error
                self._opening = None
                self._begin(text, opening, same=forgotten == 1)
            case BadRequest() if call.tree.guesses:
                opening.unsent(call.update)
                log.warning("verifier: refuses the tree: %s", described(error))
                return True
            case Overloaded() if self._clock() <= give_up_s:
                await asyncio.sleep(FIRST_BACKOFF_S)
            case PeerLost() | EngineFailed() | TimeoutError():
                if self._is_last_fault(error):
                    raise error
                if self._clock() > give_up_s:
                    raise PeerLost(f"verifier: {str(error) or 'does not answer'}") from error
                log.warning("verifier: %s; the text is opened at another", described(error))
                self.moves += 1
                self._opening = None
                self._begin(text, opening, same=False)
            case _:
                raise error
        return False

    def _begin(self, text: Text, old: Opening[VerifierPeer], same: bool) -> None:
        leased = old.leased if same else None
        self._opening_task = self._background.start(self._lease_and_open(text, old, leased))

    async def _current_opening(self) -> Opening[VerifierPeer]:
        if self._opening is None and self._opening_task is not None:
            await asyncio.shield(self._opening_task)
        if self._opening is None:
            raise PeerLost("verifier: the handle is closed")
        return self._opening

    async def _open_beside(self, text: Text, beside: VerifierHandle) -> None:
        """Open the text at the replica of `beside`, under the same lease; at any replica if that lease has ended."""
        await beside.ready()
        async with beside._turns:  # the texts beside it are sent one after another: each may be long
            await asyncio.sleep(0)
        opening = beside._opening
        await self._lease_and_open(text, leased=opening.leased if opening is not None else None)

    async def _lease_and_open(
        self,
        text: Text,
        old: Opening[VerifierPeer] | None = None,
        leased: Leased[VerifierPeer] | None = None,
    ) -> None:
        """Lease a verifier and open the text there. Retries within the patience; raises at once for the second failure
        by a verifier's own fault since the last verdict. A text without a token of its answer is sent to each full
        replica once: it waits there if there is a place to wait, and is refused if none of them has one.

        `old` is the opening that this one replaces. It is closed after the first attempt, not before: a lease ends with
        the last of its openings. `leased`: what the first attempt uses, where it need not lease.
        """
        give_up_s = self._clock() + self._patience_s
        pause_s, failed = FIRST_BACKOFF_S, False  # failed: whether an opening that was sent has failed
        begun = self.opened is not None or len(text) > text.prompt_length
        full: dict[str, Overloaded] = {}  # replicas without a place to wait, by address
        while True:
            try:
                if leased is None:
                    leased = await self._lease_but(full)
                self._check_same(leased.hello)
                self._hello = leased.hello
                self._greeted.set()
                first = self.opened is None
                self._pending = Opening(leased, text, ahead=self._plain_first and first, echoes=first)
                opening, opened = await self._first_open(self._pending, text)
                if text.echo_from is not None or opened.logprobs is not NOT_ECHOED:
                    self._check_echo(opened, text, opening.hello)
            except (DendroError, TimeoutError) as error:
                if self._pending is not None and not failed:  # The wait before may have been a queue or a long prompt.
                    failed, give_up_s = True, self._clock() + self._patience_s
                self._close_pending(text)
                if error in full.values():
                    raise
                if self._is_last_fault(error) or (isinstance(error, BadRequest) and self.opened is None):
                    raise  # if `opened`, another verifier has accepted the text, and this one's limits are tighter
                if self._clock() + pause_s > give_up_s:
                    if isinstance(error, Overloaded):
                        raise
                    raise PeerLost("verifier: none opens the text in time") from error
                log.info("verifier: %s; trying again", described(error))
                if isinstance(error, Overloaded) and leased is not None and not begun:
                    full[leased.address], leased = error, None
                    continue
                leased = None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
            else:
                self.opened = self.opened or opened
                if opening is not self._pending:
                    self._close_pending(text)
                self._opening, self._pending = opening, None
                return
            finally:
                if old is not None:
                    self._background.start(old.close(text))
                    old = None

    async def _lease_but(self, full: Mapping[str, Overloaded]) -> Leased[VerifierPeer]:
        """Lease a replica whose address is not in `full`. Raises its error where STRIKES leases find no other."""
        for _ in range(STRIKES):
            leased = await self._pool.lease()
            if leased.address not in full:
                return leased
            if not leased.address:  # the only one: it is in this process
                break
        raise full[leased.address]

    async def _first_open(self, opening: Opening[VerifierPeer], text: Text) -> tuple[Opening[VerifierPeer], Opened]:
        """Open the text and, where that takes long, also at another replica; returns the opening that is ready first.
        Raises the first opening's error when both have failed. The caller must close `opening` where it is not
        returned."""
        first = asyncio.ensure_future(opening.open(text))
        try:
            await asyncio.wait({first}, timeout=SLOW_OPENING * self._patience_s)
            if first.done():
                return opening, first.result()
            return await self._open_at_two(opening, first, text)
        finally:
            first.cancel()

    async def _open_at_two(
        self, opening: Opening[VerifierPeer], first: asyncio.Task[Opened], text: Text
    ) -> tuple[Opening[VerifierPeer], Opened]:
        """Open the text at another replica too (`_first_open`). The first attempt, of `opening`, continues meanwhile: a
        long prompt or a queue is no fault. Where no other replica is available, one is tried again after some time."""
        second: asyncio.Task[tuple[Opening[VerifierPeer], Opened]] | None = None
        done: set[asyncio.Task[Any]] = set()
        try:
            while running := [task for task in (first, second) if task is not None and not task.done()]:
                if not done and running == [first]:
                    log.info("verifier: the text is not open yet; trying another replica too")
                    second = asyncio.create_task(self._open_elsewhere(opening.leased.address, text))
                    running.append(second)
                done, _ = await asyncio.wait(
                    running, timeout=SLOW_OPENING * self._patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if first in done and first.exception() is None:
                    return opening, first.result()
                if second is not None and second in done and second.exception() is None:
                    answer, second = second.result(), None
                    return answer
            return opening, first.result()  # raises
        finally:
            if second is not None:
                self._background.start(self._drop_second(second, text))

    async def _open_elsewhere(self, address: str, text: Text) -> tuple[Opening[VerifierPeer], Opened]:
        """Open the text at a replica of another address. Raises PeerLost or Overloaded where none is available now."""
        leased = await self._pool.lease()
        self._check_same(leased.hello)
        if leased.address == address:
            raise PeerLost("verifier: there is no other replica")
        opening = Opening(leased, text, echoes=self.opened is None)
        try:
            return opening, await opening.open(text)
        except BaseException:
            self._background.start(opening.close(text))
            raise

    async def _drop_second(self, second: asyncio.Task[tuple[Opening[VerifierPeer], Opened]], text: Text) -> None:
        """Cancel the second opening; close it where it succeeded meanwhile."""
        await end_task(second)
        if not second.cancelled() and second.exception() is None:
            await second.result()[0].close(text)

    def _check_echo(self, opened: Opened, text: Text, hello: Hello) -> None:
        """Raise BadAnswer where an opening does not report the log-probabilities that it was asked for."""
        asked = text.echo_from if self.opened is None else None  # a text that is opened again is not echoed again
        top, tokens = (text.logprobs, max(len(text) - asked, 0)) if asked is not None else (None, 0)
        if not opened.logprobs.fit(tokens, top, hello.vocabulary):
            raise BadAnswer(f"verifier: its log-probabilities of {tokens} tokens of the text are not those asked for")

    def _is_last_fault(self, error: BaseException) -> bool:
        """Count a verifier's own fault. Returns whether it is the second since the last verdict, which is fatal."""
        self._faults += isinstance(error, EngineFailed)
        return isinstance(error, EngineFailed) and self._faults > 1

    def _check_same(self, hello: Hello) -> None:
        """Raise PeerLost for a replica of another checkpoint than the router's, and for one whose tokens could differ
        from those of the request's first verifier (another model, dtype or exactness: `TARGET_FACTS`)."""
        if fault := checkpoint_mismatch(hello, self._facts):
            raise PeerLost(f"verifier: {fault}")
        last = self._hello
        if last is not None and hello.target != last.target:
            differ = [name for name in TARGET_FACTS if getattr(hello, name) != getattr(last, name)]
            raise PeerLost(f"verifier: differs from the request's first verifier in {', '.join(differ)}")


def _plausible(verdict: Verdict, ahead_us: int, drafted_us: int, refused: bool) -> Verdict:
    """The verdict, with at most these times of a round begun ahead and of an ordered tree."""
    tree = verdict.tree
    if tree is not None and tree.draft_us > drafted_us:
        tree = replace(tree, draft_us=drafted_us)
    if refused or tree is not verdict.tree or verdict.ahead_us > ahead_us or verdict.drafted_us > drafted_us:
        ahead_us, drafted_us = min(verdict.ahead_us, ahead_us), min(verdict.drafted_us, drafted_us)
        return replace(verdict, ahead_us=ahead_us, drafted_us=drafted_us, tree=tree, refused=refused)
    return verdict


def _check_verdict(verdict: Verdict, tree: DraftTree, text: Text, hello: Hello, order: Order | None = None) -> None:
    """Raise BadAnswer for a verdict that does not fit its tree, its text or its target's vocabulary. order: of the tree
    that `tree` claims, if it does"""
    if (verdict.tree is not None) is not tree.ordered:
        raise BadAnswer("verifier: its verdict has an ordered tree, or lacks the one that was ordered")
    if verdict.tree is not None:
        tree = verdict.tree
        shape = OFF if order is None or verdict.missed else order.shape
        if fault := tree_fault(tree, text.root, shape, hello.vocabulary):
            raise BadAnswer(f"verifier: its verdict's tree {fault}")
    guesses = verdict.length - 1  # accepted guesses, also those past the verdict's cut
    if len(verdict.ranks) != min(guesses, len(verdict.tokens)) or guesses + verdict.trimmed > tree.guesses:
        raise BadAnswer(
            f"verifier: its verdict has N = {verdict.length}, {len(verdict.ranks)} ranks and {verdict.trimmed} guesses "
            f"left out of a tree of {tree.guesses}"
        )
    for above, row, token in zip(verdict.path, verdict.path[1:], verdict.tokens, strict=False):
        if row >= tree.rows or tree.parents[row] != above or tree.tokens[row] != token:
            raise BadAnswer(f"verifier: its verdict's path {verdict.path} is not in the tree")
    if max(verdict.tokens) >= hello.vocabulary:
        raise BadAnswer(f"verifier: emits {max(verdict.tokens)}; its vocabulary is {hello.vocabulary}")
    asked = text.logprobs is not None
    if (asked or verdict.logprobs) and not fit(verdict.logprobs, len(verdict.tokens), text.logprobs, hello.vocabulary):
        raise BadAnswer(f"verifier: its log-probabilities of {len(verdict.tokens)} tokens are not those asked for")
    room, ended = text.limits.max_length - len(text) - len(verdict.tokens), verdict.finish
    # Any other finish is that of the last token, which is never a stop string's: a verifier sees no text.
    fits = {
        None: room > 0 and verdict.length == len(verdict.tokens),
        Finish.LENGTH: room == 0,
        Finish.STRUCTURE: text.structure is not None,
    }
    if room < 0 or not fits.get(ended, ended is finish_at(verdict.tokens[-1], hello.end_ids, text.limits)):
        raise BadAnswer(
            f"verifier: finish {ended}, N = {verdict.length}, {len(verdict.tokens)} tokens, {room} from the limit"
        )
