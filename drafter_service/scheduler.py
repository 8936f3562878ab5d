"""Decides what the drafter's next forward is made of. Texts, slots and trees are its business; tensors are not.

A session's life: `open` gives it a text; forwards of kind *chain* bring its memory up to the text; `draft` makes a
round: a chain through the root, then one row per waiting node and level, until `DraftTree` is answered; the nodes are
kept until the next call says which of them the text went through, and these are folded into the text's memory; `close`
brings the memory up to the text and hands its slot out to be saved.

All sessions that wait for the same kind of forward share it, whatever their shapes; they join and leave between levels.
"""

from __future__ import annotations

import numpy as np
from dendro.calls import CloseCall, DraftCall, OpenCall, TextUpdate
from dendro.errors import BadRequest, DendroError, EngineFailed, NotFound, Overloaded
from dendro.tree import DraftTree, FloatArray, IntArray
from tree_layers.states import SlotPool

from drafter_service.confidence import CANDIDATES, Calibration
from drafter_service.grow import growth_of, ranks
from drafter_service.plan import EMPTY_TEXT, NO_NODE, Chains, DraftOutcome, DraftPlan, Level, TextFold
from drafter_service.texts import Answer, Consumed, DrafterText, DraftRound, Ready, Ticket, _check_tokens

CATCH_UP = 8
"""Tokens that an idle session may lag behind its text before it is worth a forward of its own."""
PREFILL_EVERY = 4
"""One forward in so many goes to prompts, where both prompts and rounds wait."""
PREFILL_ROWS = 8
"""Prompts in one forward."""


class DraftScheduler:
    """Sessions, slots and what comes next. `answers` collects what callers are to be told.

    `folds` are to be run, and taken away, as soon as `next` returns: before its plan, which may write the nodes' slots,
    and before answers are given, as memories are saved then.
    """

    def __init__(self, name: str, texts: SlotPool, nodes: SlotPool, max_sessions: int, chunk: int) -> None:
        """texts: at least 1 + 2 * max_sessions slots   nodes: 1 and at least what one round may need
        chunk: tokens of a prompt per forward
        """
        self.name = name
        self.texts = texts
        self.nodes = nodes
        self.max_sessions = max_sessions
        self.chunk = chunk
        self.answers: list[tuple[Ticket, Answer]] = []
        self.folds: list[TextFold] = []
        self.ended: list[int] = []  # sessions that are gone, for the runner to forget
        self.calibrations = {True: Calibration(), False: Calibration()}  # of greedy texts, and of sampled ones
        self.noise_wanted: dict[
            int, range
        ] = {}  # session -> positions whose noise to have ready; earlier ones are done
        self._sessions: dict[bytes, DrafterText] = {}  # the one used last at the end
        self._numbers = 0
        self._turn = 0
        self._planned: list[tuple[DrafterText, range]] = []  # of the plan at work: each session's rows
        self._kind = ""

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    # -- calls ---------------------------------------------------------------------------------------------------

    def open(self, ticket: Ticket, call: OpenCall, restored: int, vocabulary: int) -> DrafterText:
        """Take a text in. `restored` of its tokens are about to be loaded into the slot of the session returned.

        vocabulary: the target's; ids of the text are below it. Raises Overloaded and BadRequest. An opening that is
        there already is opened afresh.
        """
        if call.update.start != 0:
            raise BadRequest("update.start", f"a text is opened from its beginning, not from {call.update.start}")
        if (old := self._sessions.get(call.update.opening)) is not None:
            self._end(old, NotFound("opening: was opened again"))
        if len(self._sessions) >= self.max_sessions:
            raise Overloaded(f"{len(self._sessions)} texts are open at drafter {self.name}, the most it takes")
        self._numbers += 1
        session = DrafterText(self._numbers, call.update.opening, call.terms, vocabulary)
        _check_tokens(session, call.update)
        session.text.follow(call.update)
        if restored:
            (session.slot,), session.covers = self.texts.take(1), restored
        session.opened = (ticket, restored)
        self._want_noise(session, range(session.base, session.base + CANDIDATES))
        self._sessions[session.opening] = session
        return session

    def not_restored(self, session: DrafterText) -> None:
        """Process the whole text of a session just opened, as its saved state could not be loaded."""
        assert session.opened is not None and session.slot != EMPTY_TEXT
        self.texts.give([session.slot])
        session.slot, session.covers = EMPTY_TEXT, 0
        session.opened = (session.opened[0], 0)

    def draft(self, ticket: Ticket, call: DraftCall) -> None:
        """Start a round. A round of this text that is still at work gives way and is answered with its root alone."""
        session = self._follow(call.update)
        self._give_way(session)
        root = session.text.ids[-1]
        if call.shape.off:
            self.answers.append((ticket, DraftTree.root_only(root, self.name)))
            return
        calibration = self.calibrations[session.greedy]
        session.round = DraftRound(ticket, call.shape, session.base, growth_of(root, call.shape), calibration)

    def close(self, ticket: Ticket, call: CloseCall) -> None:
        """End a session once its memory has consumed the text up to its root."""
        session = self._follow(call.update)
        self._give_way(session)
        if session.opened is not None:
            self.answers.append((session.opened[0], NotFound("opening: was closed before it was ready")))
            session.opened = None
        session.closing = ticket

    def forget(self, session: int, reason: DendroError | None = None) -> None:
        """Free all that a session held; who waits for it is told the reason. Harmless where it is gone."""
        found = next((kept for kept in self._sessions.values() if kept.number == session), None)
        if found is not None:
            self._end(found, reason or NotFound("opening: is closed"))

    def give_up(self, opening: bytes) -> None:
        """Free an opening whose caller has gone. Harmless where it is not there."""
        if opening in self._sessions:
            self._end(self._sessions[opening], NotFound("opening: was given up"))

    def tickets(self) -> list[Ticket]:
        """Everybody who waits, those whose answer is ready among them."""
        waiting = [ticket for ticket, _ in self.answers]
        for session in self._sessions.values():
            waiting += self._waiting(session)
        return waiting

    def fail(self, reason: str) -> None:
        """A forward broke: end the sessions that took part, whose memory can no longer be trusted."""
        for session, _ in self._planned:
            if self._sessions.get(session.opening) is session:
                self._end(session, EngineFailed(reason))
        self._planned = []

    # -- forwards ------------------------------------------------------------------------------------------------

    def next(self) -> DraftPlan | None:
        """The next forward, or none where nothing waits."""
        self._drop_cancelled()
        self._settle()
        self._planned = []
        growing, starting, prompts = [], [], []
        room = True  # once a round waits for slots, those that came after it wait too, or its turn might never come
        for session in list(self._sessions.values()):
            if session.round is not None and session.round.growth.processed:
                growing.append(session)
            elif session.opened is None and session.round is not None and self._near(session):
                room = room and self._reserve(session)
                if room:
                    starting.append(session)
            elif self._lacks(session):
                prompts.append(session)
        singles = [session for session in starting if session.base - session.covers == 1]
        chains = [session for session in starting if session.base - session.covers > 1]
        self._turn += 1
        if prompts and (self._turn % PREFILL_EVERY == 0 or not (growing or starting)):
            return self._plan_prompts(prompts[:PREFILL_ROWS])
        if chains:
            return self._plan_chains(chains)
        if growing or singles:
            return self._plan_level(growing + singles)
        late = [session for session in self._sessions.values() if self._lag(session) >= CATCH_UP]
        return self._plan_prompts(late[:PREFILL_ROWS]) if late else None

    def apply(self, outcome: DraftOutcome) -> None:
        """Take in what the forward of the last plan found."""
        at = 0
        for session, rows in self._planned:
            work = session.round
            if self._kind == "prompt":
                session.covers = rows.stop
                continue
            assert work is not None
            found = slice(at, at + len(rows))
            at += len(rows)
            if self._kind == "chain":  # one row: the text from `rows.start` on, the root last; a rank for all but that
                session.covers = rows.stop - 1
                for place, covered in enumerate(range(rows.start + 1, rows.stop)):
                    at_row = found.start + place
                    self._note(session, covered, outcome.candidates[at_row], outcome.scores[at_row])
                found = slice(found.stop - 1, found.stop)
            scores = outcome.scores[found]
            work.growth.extend(outcome.candidates[found], scores, work.calibration.confidences(scores))
            if work.growth.finished:
                self._finish(session, work)
        self._planned = []
        self._settle()

    def _plan_prompts(self, sessions: list[DrafterText]) -> DraftPlan:
        self._kind = "prompt"
        self._planned = [(s, range(s.covers, min(s.covers + self.chunk, s.base - 1))) for s in sessions]
        return self._chain_plan([])

    def _plan_chains(self, sessions: list[DrafterText]) -> DraftPlan:
        self._kind = "chain"
        self._planned = [(session, range(session.covers, session.base)) for session in sessions]
        return self._chain_plan([session.round.slots[0] for session in sessions if session.round is not None])

    def _chain_plan(self, roots: list[int]) -> DraftPlan:
        """A row of consecutive text for each planned session; candidates where there are roots."""
        lengths = np.array([len(rows) for _, rows in self._planned], np.int64)
        tokens = np.zeros((len(lengths), int(lengths.max())), np.int64)
        places, numbers, positions = [], [], []
        source = [session.slot for session, _ in self._planned]
        for row, (session, span) in enumerate(self._planned):
            self._own_slot(session)
            tokens[row, : len(span)] = session.text.ids[span.start : span.stop]
            if roots:
                places += [row * tokens.shape[1] + time for time in range(len(span))]
                numbers += [session.number] * len(span)
                positions += [covered + 1 for covered in span]
        rows = Chains(
            tokens=tokens,
            lengths=lengths,
            starts=np.array([span.start for _, span in self._planned], np.int64),
            source=np.array(source, np.int64),
            target=np.array([session.slot for session, _ in self._planned], np.int64),
            roots=np.array(roots, np.int64),
        )
        scored = np.array(places, np.int64), np.array(numbers, np.int64), np.array(positions, np.int64)
        return DraftPlan(rows, *scored, self._width())

    def _plan_level(self, sessions: list[DrafterText]) -> DraftPlan:
        """One row for each waiting node: the roots of some sessions, deeper levels of others."""
        self._kind = "level"
        self._planned = []
        tokens: list[int] = []
        parents: list[int] = []
        numbers: list[int] = []
        positions: list[int] = []
        trees: list[DraftRound] = []
        for session in sessions:
            work = session.round
            assert work is not None
            growth, slots, rows = work.growth, work.slots, work.growth.frontier
            new = range(growth.processed, growth.processed + len(rows))
            if growth.level:
                above = [growth.place[growth.parents[row]] for row in rows]
                work.lines[new.start : new.stop] |= work.lines[above]
                parents += [slots[place] for place in above]
            else:
                parents.append(NO_NODE)
            tokens += [growth.tokens[row] for row in rows]
            numbers += [session.number] * len(rows)
            positions += [work.base + growth.level] * len(rows)
            self._planned.append((session, new))
            trees.append(work)
        sizes = [new.stop for _, new in self._planned]
        most = max(sizes)
        nodes = np.full((len(trees), most), NO_NODE, np.int64)
        lines = np.zeros((len(trees), most, most), np.bool_)
        for tree, (work, size) in enumerate(zip(trees, sizes, strict=True)):
            nodes[tree, most - size :] = work.slots[:size]
            lines[tree, most - size :, most - size :] = work.lines[:size, :size]
        guessed = np.array(positions, np.int64)
        level = Level(
            tokens=np.array(tokens, np.int64),
            parents=np.array(parents, np.int64),
            positions=guessed - 1,
            counts=np.array([len(new) for _, new in self._planned], np.int64),
            texts=np.array([session.slot for session in sessions], np.int64),
            starts=np.array([session.covers for session in sessions], np.int64),
            nodes=nodes,
            lines=lines,
        )
        return DraftPlan(level, np.arange(len(tokens)), np.array(numbers, np.int64), guessed, self._width())

    def _width(self) -> int:
        rounds = (session.round for session, _ in self._planned)
        return max([CANDIDATES, *(work.shape.width for work in rounds if work is not None)])

    # -- a session's memory --------------------------------------------------------------------------------------

    def _follow(self, update: TextUpdate) -> DrafterText:
        """The session of a call, its text brought up to it, and nothing remembered of a text that was cut."""
        session = self._sessions.get(update.opening)
        if session is None:
            raise NotFound("opening: is not open here")
        if session.closing is not None or session.ended:
            raise NotFound("opening: is being closed")
        _check_tokens(session, update)
        stands = session.text.follow(update)
        self._sessions[update.opening] = self._sessions.pop(update.opening)
        for work in (session.kept, session.round):
            if work is not None and stands < work.base:
                self._drop_tree(session, work)
        # The root is never in the memory at rest, so that a call for the same text finds what it needs.
        if session.covers > min(stands, session.base - 1):
            self._release(session)
            usable = session.first_covers <= min(stands, session.base - 1)
            session.slot = session.first_slot if usable else EMPTY_TEXT
            session.covers = session.first_covers if usable else 0
        if session.first_covers > stands:
            self.texts.give([session.first_slot])
            session.first_slot, session.first_covers = EMPTY_TEXT, 0
        if session.traced is not None and session.traced > stands:
            session.traced = stands
        session.ranks = {position: rank for position, rank in session.ranks.items() if position < stands}
        return session

    def _adopt(self, session: DrafterText) -> None:
        """Have the nodes of the last tree that the text went through folded into its memory; all are given back."""
        work = session.kept
        if work is None:
            return
        ids, growth, row, covers = session.text.ids, work.growth, 0, work.base
        path: list[int] = []
        while row in growth.place and covers < session.base:
            place = growth.place[row]
            path.append(work.slots[place])
            self._note(session, covers, growth.candidates[place], growth.scores[place])
            child = growth.child(row, ids[covers])
            covers += 1
            if child is None:
                break
            row = child
        if path:
            source = session.slot
            self._own_slot(session)
            self.folds.append(TextFold(session.covers, source, session.slot, tuple(path)))
            session.covers += len(path)
        self._drop_tree(session, work)

    def _note(self, session: DrafterText, position: int, candidates: IntArray, scores: FloatArray) -> None:
        """Remember which of a row's candidates the text went on with, and learn from it."""
        hits = np.flatnonzero(candidates[:CANDIDATES] == session.text.ids[position])
        rank = int(hits[0]) if len(hits) else CANDIDATES
        session.ranks[position] = rank
        self.calibrations[session.greedy] = self.calibrations[session.greedy].learn(scores, rank)

    def _own_slot(self, session: DrafterText) -> None:
        """Make sure that the session's slot may be written: neither the zero slot nor the one kept from opening."""
        if session.slot in (EMPTY_TEXT, session.first_slot):
            (session.slot,) = self.texts.take(1)

    def _release(self, session: DrafterText) -> None:
        if session.slot not in (EMPTY_TEXT, session.first_slot):
            self.texts.give([session.slot])
        session.slot = EMPTY_TEXT

    def _reserve(self, session: DrafterText) -> bool:
        """Take all slots that the round will need, so that a round that has begun ends. Kept trees of idle sessions,
        the one used longest ago first, give theirs up."""
        work = session.round
        assert work is not None
        if work.slots:
            return True
        wanted = work.shape.forwarded
        for other in list(self._sessions.values()):
            if self.nodes.free >= wanted:
                break
            if other.kept is not None:
                self._drop_tree(other, other.kept)
        if self.nodes.free < wanted:
            return False
        work.slots = self.nodes.take(wanted)
        work.lines = np.eye(wanted, dtype=np.bool_)
        return True

    def _drop_tree(self, session: DrafterText, work: DraftRound) -> None:
        self.nodes.give(work.slots)
        work.slots = []
        if session.kept is work:
            session.kept = None

    def _near(self, session: DrafterText) -> bool:
        """Whether one chain reaches through the root."""
        return session.base - session.covers <= self.chunk

    def _lacks(self, session: DrafterText) -> bool:
        """Whether somebody waits for this session's memory to come nearer to its text."""
        waits = session.opened is not None or session.closing is not None or session.round is not None
        return waits and session.covers < session.base - 1

    def _lag(self, session: DrafterText) -> int:
        idle = session.round is None and session.closing is None
        if not idle or session.base - 1 - session.covers < CATCH_UP:
            return 0
        self._adopt(session)
        return session.base - 1 - session.covers

    def _want_noise(self, session: DrafterText, positions: range) -> None:
        if session.terms.sampling.temperature > 0:
            self.noise_wanted[session.number] = positions

    # -- ends ----------------------------------------------------------------------------------------------------

    def _finish(self, session: DrafterText, work: DraftRound) -> None:
        """Answer with the tree, and keep its nodes for the next call."""
        start = session.traced if session.traced is not None else work.base
        trace = ranks(session.ranks, start, work.base, CANDIDATES)
        tokens, parents, values = work.growth.arrays()
        assert work.ticket is not None
        tree = DraftTree(tokens, parents, values, self.name, trace, work.ticket.waited_us, len(self._planned))
        self.answers.append((work.ticket, tree))
        session.traced = work.base
        session.ranks = {}
        work.ticket, session.round, session.kept = None, None, work
        # The next round starts somewhere behind this tree, at most one token past its leaves.
        self._want_noise(session, range(work.base, work.base + 2 * work.shape.depth + 1))

    def _settle(self) -> None:
        """Fold what the text went through where a round, an opening or a close is about to build on it."""
        for session in list(self._sessions.values()):
            if session.closing is not None or (session.round is not None and not session.round.growth.processed):
                self._adopt(session)
            if session.covers < session.base - 1:
                continue
            if session.opened is not None:
                (ticket, restored), session.opened = session.opened, None
                session.first_slot, session.first_covers = session.slot, session.covers
                self.answers.append((ticket, Consumed(session.covers - restored)))
            if session.closing is not None:
                text = session.text.tokens
                ids = tuple(text.ids[: session.covers])
                ready = Ready(session.number, session.slot, ids, text.digests[session.covers], session.terms.tenant)
                self.answers.append((session.closing, ready))
                session.closing, session.ended = None, True

    def _give_way(self, session: DrafterText) -> None:
        """Stop the round at work, if any; what it has processed is kept like a finished tree's."""
        work = session.round
        if work is None:
            return
        session.round = None
        if work.ticket is not None:
            self.answers.append((work.ticket, DraftTree.root_only(work.growth.root, self.name)))
            work.ticket = None
        if not work.slots:
            return
        if work.growth.processed:
            session.kept = work
        else:
            self._drop_tree(session, work)

    def _drop_cancelled(self) -> None:
        for session in list(self._sessions.values()):
            if session.round is not None and session.round.ticket is not None and session.round.ticket.cancelled:
                self._give_way(session)

    def _end(self, session: DrafterText, reason: Exception) -> None:
        for work in (session.kept, session.round):
            if work is not None:
                self._drop_tree(session, work)
        self.answers += [(ticket, reason) for ticket in self._waiting(session)]
        self.texts.give({session.slot, session.first_slot} - {EMPTY_TEXT})
        self.noise_wanted.pop(session.number, None)
        del self._sessions[session.opening]
        self.ended.append(session.number)

    def _waiting(self, session: DrafterText) -> list[Ticket]:
        tickets = [
            session.round.ticket if session.round is not None else None,
            session.opened[0] if session.opened is not None else None,
            session.closing,
        ]
        return [ticket for ticket in tickets if ticket is not None]
