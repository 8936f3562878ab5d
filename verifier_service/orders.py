"""Rounds for whose trees a verifier asks drafters itself (`dendro.order`).

Right after the verdict of a call with an order, the drafter is asked for the tree of the text's next round, and the
round begins when the tree is there. The call that claims the round may come before, meanwhile or after. A round whose
tree does not come has its root alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from dendro.calls import DraftCall, PreparedTree, TextUpdate, VerifyCall
from dendro.clock import Clock
from dendro.engine import Ticket
from dendro.errors import BadRequest
from dendro.failures import log_failure
from dendro.measured import microseconds, smoothed
from dendro.order import Missed, Order, missed_by
from dendro.tree import DraftTree

from verifier_service.requests import Capacity, OrderedRound, PendingCall, VerifierCounters, VerifierText

log = logging.getLogger("dendro.verifier")

MESSAGE_S = 0.0002
"""Cost of a prepared tree's message. It pays if the way there and back, times the tree's chance, takes longer."""


class OrderedRounds:
    """The ordered rounds whose trees are awaited. A round that begins is appended to its text's calls."""

    def __init__(
        self,
        capacity: Capacity,
        counters: VerifierCounters,
        sessions: Mapping[bytes, VerifierText],
        clock: Clock,
    ) -> None:
        """counters, sessions: those of the scheduler"""
        self._capacity = capacity
        self._counters = counters
        self._sessions = sessions
        self._clock = clock
        self._ask_drafter: Callable[[OrderedRound, DraftCall], None] | None = None  # None: no way to drafters
        self.awaited: list[OrderedRound] = []

    def link(self, ask_drafter: Callable[[OrderedRound, DraftCall], None]) -> None:
        """Called before the first step, if there is a way to drafters. ask_drafter: asks for an ordered tree, which
        `drafted` takes later"""
        self._ask_drafter = ask_drafter

    def place(self, session: VerifierText, order: Order) -> None:
        """Ask the order's drafter for the tree of the text's next round."""
        text, last = session.text.tokens, session.latest
        self.drop(session)
        session.ordered = session.latest = wanted = OrderedRound(session, order, self._clock(), len(text) + 1)
        if last is not None:
            wanted.follow(last)
        self.awaited.append(wanted)
        self._counters.ordered += 1
        if self._ask_drafter is None:
            self.drafted(wanted, Missed.UNLINKED, wanted.began_s)
            return
        if wanted.prepared:
            self._begin_prepared(wanted, wanted.began_s)
        prepared_from = MESSAGE_S / session.way_s if session.way_s > MESSAGE_S else 0.0
        update = TextUpdate.of(order.opening, text, min(order.start, len(text)))
        try:
            self._ask_drafter(wanted, DraftCall(update, order.shape, prepared_from))
        except Exception as error:  # the way is broken: this round has no tree, and other texts go on
            log_failure(log, error, "a drafter could not be asked for an ordered tree")
            self.drafted(wanted, Missed.UNLINKED, wanted.began_s)

    def prepared(self, sent: PreparedTree, came_s: float) -> None:
        """Keep a tree that a drafter has sent before it was asked for. Begin its round if that awaits a tree now."""
        latest = (each.latest for each in self._sessions.values())
        wanted = next((each for each in latest if each is not None and each.order.opening == sent.opening), None)
        self._counters.prepared += 1
        if wanted is None or not wanted.keep(sent):
            self._counters.prepared_refused += 1
            return
        self._begin_prepared(wanted, came_s)

    def _begin_prepared(self, wanted: OrderedRound, came_s: float) -> None:
        """Begin an ordered round with the tree prepared for its text, if there is one. Its drafter's answer, which has
        the same tree, is then ignored."""
        text = wanted.session.text.tokens
        if wanted.session.ordered is wanted and (tree := wanted.prepared.get((len(text), text.digest()))) is not None:
            self._counters.prepared_used += 1
            self._begin(wanted, tree, came_s)

    def drafted(self, wanted: OrderedRound, outcome: object, came_s: float) -> None:
        """Begin an ordered round with its tree, or with its root alone where there is none. outcome: the tree, an error
        of the drafter, or a `Missed`   came_s: when it came"""
        if isinstance(outcome, DraftTree):
            way_s = came_s - wanted.began_s - outcome.draft_us / 1e6
            wanted.session.way_s = smoothed(wanted.session.way_s, max(way_s, 0.0))
        self._begin(wanted, outcome, came_s)

    def _begin(self, wanted: OrderedRound, outcome: object, came_s: float) -> None:
        session = wanted.session
        if session.ordered is not wanted:
            return
        self.awaited.remove(wanted)
        session.ordered, text = None, session.text.tokens
        tree, missed = self._tree_of(wanted, outcome)
        self._counters.ordered_missed += bool(missed)
        if session.answered is not None:
            session.away_s, session.answered = smoothed(session.away_s, came_s - session.answered), None
        if (ask := wanted.claim) is None:
            update = TextUpdate.of(session.name, text, len(text))
            ask = PendingCall(VerifyCall(update, tree, ordered=True), Ticket(came_s))
        assert isinstance(ask.call, VerifyCall)
        ask.ticket.arrived_s = max(ask.ticket.arrived_s, came_s)
        took_us = microseconds(max(came_s - wanted.began_s, 0.0))
        begun = replace(ask, call=replace(ask.call, tree=tree), missed=missed, drafted_us=took_us)
        if wanted.claim is None:
            session.ahead = begun
        session.asks.append(begun)

    def _tree_of(self, wanted: OrderedRound, outcome: object) -> tuple[DraftTree, str]:
        """The tree of an ordered round, and why it is the root alone if it is."""
        ids, shape = wanted.session.text.ids, wanted.order.shape
        if isinstance(outcome, DraftTree):
            try:
                self._capacity.check_tree(outcome, ids, wanted.session.parameters.sampling)
                if outcome.rows > shape.rows or outcome.depth > shape.depth:
                    raise BadRequest("tree", f"has {outcome.rows} rows and depth {outcome.depth}; ordered was {shape}")
                return outcome, ""
            except BadRequest as error:
                outcome = error
        missed = outcome if isinstance(outcome, Missed) else missed_by(outcome)
        log.info("an ordered tree of %s did not come: %s: %s", shape, missed, outcome)
        return DraftTree.root_only(ids[-1]), missed

    def drop(self, session: VerifierText) -> None:
        """Await the ordered tree of the text's next round no longer. A call that claims it has its root alone."""
        if (wanted := session.ordered) is None:
            return
        self.awaited.remove(wanted)
        session.ordered = None
        self._counters.ordered_dropped += 1
        if wanted.claim is not None:
            session.asks.append(replace(wanted.claim, missed=Missed.UNKNOWN))

    def begin_late(self, now_s: float) -> None:
        """Begin the rounds whose trees are late, each with its root alone."""
        for wanted in [each for each in self.awaited if each.late_s <= now_s]:
            self.drafted(wanted, Missed.LATE, now_s)

    def late_in_s(self) -> float | None:
        """Seconds until the first awaited tree is late, which `begin_late` then records; None if none is awaited."""
        if not self.awaited:
            return None
        return max(min(each.late_s for each in self.awaited) - self._clock(), 0.0)
