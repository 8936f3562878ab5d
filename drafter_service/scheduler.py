"""The drafter's scheduler: plans the next forward. It handles texts, slots and trees, but no tensors.

A session's life:
1. `open` gives it a text. Forwards of kind *prompt* prefill all of it but the root.
2. `draft` starts a round. The root runs in a *chain* with the tokens before it that the memory lacks, or alone in a
   *level*. Forwards of kind *level* follow until the `DraftTree` is answered.
3. The round's nodes are kept until the next call. Those that the text went through are folded into its memory.
4. `close` prefills all but the root and answers `MemoryComplete`, whose slot the engine saves.

While nothing waits, trees that texts may ask for next are prepared (`drafter_service/prepared.py`), one level at a
time. A call with the text and shape of a prepared tree is answered by it, once it is complete.

All sessions that wait for the same kind of forward share it, whatever their shapes; they join and leave between levels.
One session alone gets all levels in one forward, where a call can run them (`Levels`), with the chain before its root.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from dendro.calls import CloseCall, DraftCall, OpenCall, Opened, TextUpdate
from dendro.clock import Clock
from dendro.engine import Ticket
from dendro.errors import BadRequest, DendroError, EngineFailed, NotFound, Overloaded
from dendro.failures import described, log_failure
from dendro.grammars import Bits
from dendro.measured import microseconds
from dendro.shapes import TreeShape
from dendro.tree import DraftTree
from tree_layers.states import SlotPool

from drafter_service.confidence import CANDIDATES, Calibrations
from drafter_service.grow import ROOT_ALONE, fixed_form, growth_of, ranks
from drafter_service.plan import EMPTY_TEXT, Chains, DraftOutcome, DraftPlan, DraftStep, OneForward, TextFold
from drafter_service.prepared import NEXT_TOKEN, Outcome, Preparations, PreparedCounters, PreparedText
from drafter_service.sampled import GuessDraws, check_drawn_shape, drawn_growth_of
from drafter_service.structures import DraftStructure, keep_allowed
from drafter_service.texts import (
    Answer,
    DrafterText,
    DraftRound,
    MemoryComplete,
    TextMasks,
    check_tokens,
    level_of,
    levels_of,
)

log = logging.getLogger("dendro.drafter")

PREFILL_EVERY = 4
"""One in this many forwards is a prefill while both prompts and rounds wait."""
PREFILL_ROWS = 8
"""Most prompts in one forward."""


class DraftScheduler:
    """Owns sessions and slots, and plans forwards.

    In each step the engine runs what `next` returns, applies the outcome (`apply`), sends `answers`, drops what it
    holds for sessions in `closed`, and lets `calibrations` learn.
    """

    def __init__(
        self,
        name: str,
        texts: SlotPool,
        nodes: SlotPool,
        max_sessions: int,
        chunk: int,
        clock: Clock = time.monotonic,
        one_forward: Callable[[int], OneForward] = lambda session: OneForward(),
        wake: Callable[[], None] = lambda: None,
        longest_prepared: int = 0,
        counters: PreparedCounters | None = None,
    ) -> None:
        """texts: at least 1 + 2 * max_sessions slots   nodes: at least 1 + the most that a round needs
        chunk: most tokens of a prompt per forward
        one_forward: what a forward of one session alone may have, by the session's number
        wake: called, from any thread, when a text that was left out of a forward has its masks
        longest_prepared: most tokens of a text for which a tree is prepared; 0: none are
        """
        self.name = name
        self.texts = texts
        self.nodes = nodes
        self.max_sessions = max_sessions
        self.chunk = chunk
        self.clock = clock
        self.one_forward = one_forward
        self.text_masks = TextMasks(clock, wake)
        self.answers: list[tuple[Ticket, Answer]] = []  # answers to send; the engine clears them
        self.closed: list[int] = []  # numbers of closed sessions; the engine clears them
        self.calibrations = Calibrations()
        self.noise_wanted: dict[int, range] = {}  # session -> positions to prepare noise for; drops earlier noise
        self._sessions: dict[bytes, DrafterText] = {}  # key: opening; least recently used first
        self.longest_prepared = longest_prepared
        self.counters = counters or PreparedCounters()
        self._prepared: dict[DrafterText, Preparations] = {}  # key: an open text that has had a tree
        self._numbers = 0  # sessions opened so far
        self._turn = 0  # forwards planned so far
        self._folds: list[TextFold] = []  # folds of the next step
        # Rows of each session in the current plan, by the text's positions; a tree's rows count on from its root's.
        self._planned: list[tuple[DrafterText, range]] = []
        self._masks: Sequence[Bits | None] = ()  # masks of the current plan's scored rows

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    # -- calls ---------------------------------------------------------------------------------------------------

    def open(
        self,
        ticket: Ticket,
        call: OpenCall,
        restored: int,
        vocabulary: int,
        structure: DraftStructure | None = None,
    ) -> DrafterText:
        """Open a text. The caller loads a memory of `restored` of its tokens into the slot of the returned session.

        vocabulary: the target's; ids of the text are below it   structure: the structure of the text's answer
        Raises Overloaded and BadRequest. An opening that is open already is closed first.
        """
        if call.update.start != 0:
            raise BadRequest("update.start", f"a text is opened from its beginning, not from {call.update.start}")
        if (old := self._sessions.get(call.update.opening)) is not None:
            self._end(old, NotFound("opening: was opened again"))
        if len(self._sessions) >= self.max_sessions:
            raise Overloaded(f"{len(self._sessions)} texts are open at drafter {self.name}, its maximum")
        self._numbers += 1
        session = DrafterText(self._numbers, call.update.opening, call.parameters, vocabulary, structure)
        check_tokens(session, call.update)
        session.text.follow(call.update)
        if restored:
            session.slot, session.covers = self._text_slot(), restored
        session.opened = (ticket, restored)
        self._request_noise(session, range(session.base, session.base + CANDIDATES))
        self._sessions[session.opening] = session
        return session

    def not_restored(self, session: DrafterText) -> None:
        """Prefill the whole text of a session just opened, because its saved state could not be loaded."""
        assert session.opened is not None and session.slot != EMPTY_TEXT
        self.texts.release([session.slot])
        session.slot, session.covers = EMPTY_TEXT, 0
        session.opened = (session.opened[0], 0)

    def draft(self, ticket: Ticket, call: DraftCall, ahead: int = 0) -> None:
        """Start a round. An unfinished round of this text is stopped and answered with its root alone.

        ahead: length of the text in the target's ids minus its length in the drafter's
        """
        session = self._follow(call.update)
        session.ahead, session.drafted = ahead, call
        if session.round is not None:
            self._stop_round(session, session.round)
        if session in self._prepared and (prepared := self._claim(session, call.shape)) is not None:
            self._use(session, prepared, ticket)
            return
        root, grown = session.text.ids[-1], growth_of
        if call.shape.off:
            self.answers.append((ticket, DraftTree.root_only(root, self.name)))
            return
        sampling, draws = session.parameters.sampling, None
        if sampling.draws_guesses:
            check_drawn_shape(call.shape)
            draws = GuessDraws(sampling, session.base)
            grown = drawn_growth_of
        given = call.shape, session.base, grown(root, call.shape), self.calibrations[session.scored_by]
        session.round = DraftRound(ticket, *given, draws=draws)

    def close(self, ticket: Ticket, call: CloseCall) -> None:
        """End a session once its memory has consumed the text up to its root; at once if the call has another text.
        Raises NotFound and BadRequest."""
        try:
            session = self._follow(call.update)
        except DendroError:
            self.forget(call.update.opening)
            raise
        if session.round is not None:
            self._stop_round(session, session.round)
        self._drop_prepared(session)
        if session.opened is not None:
            self.answers.append((session.opened[0], NotFound("opening: was closed before it was ready")))
            session.opened = None
        session.closing = ticket

    def forget(self, opening: bytes) -> None:
        """Free what an opening holds: its caller has gone, or its memory was copied. No effect if it is not open."""
        if opening in self._sessions:
            self._end(self._sessions[opening], NotFound("opening: was abandoned by its caller"))

    def fail(self, reason: str) -> None:
        """End the sessions of a failed forward, as their memory may be wrong."""
        for session, _ in self._planned:
            if self._sessions.get(session.opening) is session:
                self._end(session, EngineFailed(reason))
        self._planned = []
        self._drop_all_prepared()

    def fail_folds(self, reason: str) -> None:
        """End the sessions of the step's failed folds, as their memory may be wrong, and those of its forward."""
        folded, error = {fold.target for fold in self._folds}, EngineFailed(reason)
        for place, (ticket, answer) in enumerate(self.answers):
            if isinstance(answer, MemoryComplete) and answer.slot in folded:
                self.answers[place] = (ticket, error)
        for session in [each for each in self._sessions.values() if each.slot in folded]:
            self._end(session, error)
        self.fail(reason)

    def prepared_of(self, session: DrafterText) -> Sequence[PreparedText]:
        """What is prepared for the next call of a session, in the order in which it was begun."""
        preparations = self._prepared.get(session)
        return () if preparations is None else preparations.texts

    @property
    def planned_prepared(self) -> PreparedText | None:
        """The prepared text whose forward the current plan is, if it is one."""
        return next((session for session, _ in self._planned if isinstance(session, PreparedText)), None)

    # -- forwards ------------------------------------------------------------------------------------------------

    def next(self) -> DraftStep:
        """The folds that waiting calls need, and the next forward."""
        self._folds, self._planned = [], []
        for session in list(self._sessions.values()):
            if session.round is not None and session.round.ticket is not None and session.round.ticket.cancelled:
                self._stop_round(session, session.round)
            if session.closing is not None or (session.round is not None and not session.is_growing):
                self._fold_kept(session)
        self._answer_complete()
        plan = self._plan()
        if plan is None and self._prepared:
            plan = self._plan_prepared()  # may add folds
        return DraftStep(tuple(self._folds), plan)

    def _plan(self) -> DraftPlan | None:
        """The next forward that a caller waits for."""
        growing, starting, drafted, prompts = [], [], [], []
        for session in self._sessions.values():
            if session.is_drafted(self.chunk):
                drafted.append(session)
            elif session.needs_prefill:
                prompts.append(session)
        room = True  # rounds get slots in order: once one waits for slots, later ones wait too, so that none starves
        for session in self.text_masks.ready(drafted):
            if session.is_growing:
                growing.append(session)
            elif room := room and self._reserve(session):
                starting.append(session)
        self._turn += 1
        if prompts and (self._turn % PREFILL_EVERY == 0 or not (growing or starting)):
            return self._plan_prompts(prompts[:PREFILL_ROWS])
        alone = len(growing) + len(starting) == 1 and not prompts
        if alone and (plan := self._plan_levels(*growing, *starting)) is not None:
            return plan
        if chains := [session for session in starting if session.base - session.covers > 1]:
            return self._plan_chains(chains)
        return self._plan_level(growing + starting) if growing or starting else None

    def apply(self, outcome: DraftOutcome) -> None:
        """Apply the outcome of the last plan's forward."""
        at = 0
        for session, rows in self._planned:
            if not len(outcome.candidates):  # a prompt
                session.covers = rows.stop
                continue
            at += len(rows)
            try:
                self._apply(session, rows, outcome, slice(at - len(rows), at))
            except BaseException as error:  # a panic of a native library is no Exception
                self._fault(session, error)
        self._planned = []
        self._answer_complete()

    def _apply(self, session: DrafterText, rows: range, outcome: DraftOutcome, mine: slice) -> None:
        """Apply a text's part of the outcome: each token before the root ranks the one after it, and the tree grows by
        the others, if there are any. Raises FloatingPointError if scores are not finite."""
        draft_round = session.round
        assert draft_round is not None
        outcome.check(mine)
        candidates, scores = outcome.candidates[mine].tolist(), outcome.scores[mine].tolist()
        calibrated, given = draft_round.calibration.confidences, outcome.chances
        chances = calibrated(scores) if given is None else given[mine].tolist()
        if self._masks:
            keep_allowed(self._masks[mine], candidates, scores, chances)
        session.covers = min(rows.stop, session.base - 1)
        for covered in range(rows.start + 1, session.covers + 1):
            session.record_rank(covered, candidates.pop(0), scores.pop(0), self.calibrations)
        if rows.stop < session.base:
            return
        draft_round.calibrated = given is None
        draft_round.extend(candidates, scores, chances[-len(scores) :])
        if not draft_round.growth.finished:
            return
        if not isinstance(session, PreparedText):
            self._finish(session, draft_round)
        elif session.outcome.leaf:
            self._go_on(session, draft_round)
        elif (call := session.sent_by) is not None:
            self.answers.append((Ticket(self.clock(), call.take_prepared), session.message(self.name)))
            self.counters.prepared_sent += 1

    def _plan_prompts(self, sessions: list[DrafterText]) -> DraftPlan:
        self._planned = [(s, range(s.covers, min(s.covers + self.chunk, s.base - 1))) for s in sessions]
        rows = self._chains([])
        return DraftPlan(rows, rows.places[:0], [], [], [], self._width())

    def _plan_chains(self, sessions: list[DrafterText]) -> DraftPlan:
        """Plan the tokens up to and with the roots. If some sessions lack only a short chain, plan theirs alone,
        without the roots: a root and all levels of its tree may then be one forward."""
        if before := [session for session in sessions if not session.structured and self._is_short(session)]:
            self._planned = [(session, range(session.covers, session.base - 1)) for session in before]
            rows = self._chains([])
        else:
            self._planned = [(session, range(session.covers, session.base)) for session in sessions]
            rows = self._chains([session.round.slots[0] for session in sessions if session.round is not None])
        numbers = [session.number for session, span in self._planned for _ in span]
        positions = [covered + 1 + session.ahead for session, span in self._planned for covered in span]
        self._masks = _masks_of([(session, span.start) for session, span in self._planned])
        return DraftPlan(rows, rows.places, [1] * len(numbers), numbers, positions, self._width(), self._masks)

    def _is_short(self, session: DrafterText) -> bool:
        return session.base - 1 - session.covers <= self.one_forward(session.number).longest_chain

    def _chains(self, roots: list[int]) -> Chains:
        """One row of consecutive tokens per planned session. roots: node slots of the last tokens, if they are roots"""
        tokens = [session.tokens(span) for session, span in self._planned]
        starts, source = zip(*((span.start, session.slot) for session, span in self._planned), strict=True)
        for session, _ in self._planned:
            self._own_slot(session)
        return Chains.of(tokens, starts, source, [session.slot for session, _ in self._planned], roots)

    def _plan_level(self, sessions: list[DrafterText]) -> DraftPlan:
        """Plan one row per node of each session's frontier: the roots of some sessions, deeper levels of others."""
        level = level_of(sessions)
        both = zip(sessions, level.counts, strict=True)
        self._planned = [(session, range(session.covers, session.covers + count)) for session, count in both]
        self._masks = _masks_of([(session, session.base - 1) for session in sessions])
        ahead = [session.ahead for session in sessions]
        guessed = [sum(place) + 1 for place in zip(level.starts, level.depths, ahead, strict=True)]
        numbers = [session.number for session in sessions]
        return DraftPlan(level, None, level.counts, numbers, guessed, self._width(), self._masks)

    def _plan_levels(self, session: DrafterText) -> DraftPlan | None:
        """Plan all remaining levels of one session, or its root if the tree's form depends on candidates, after the
        tokens before the root that its memory lacks. None if one call cannot run them."""
        can, draft_round = self.one_forward(session.number), session.round
        assert draft_round is not None
        # Draws at a level need the candidates of the level above.
        form, begun = None if draft_round.draws else fixed_form(draft_round.shape), session.is_growing
        source, covers, before = session.slot, session.covers, session.base - 1 - session.covers
        if not can.levels or (begun and form is None):
            return None
        if 0 < can.longest_chain < before:
            return None
        if session.structured and (before or begun or session.masks(session.base - 1)[0] is not None):
            return None  # masks decide the tree's form
        if before:
            self._own_slot(session)
        rows = levels_of(session, form or ROOT_ALONE, source)
        self._planned, self._masks = [(session, range(covers, covers + rows.count))], ()
        first, groups = covers + 1 + rows.depth + session.ahead, rows.groups
        guessed = range(first, first + len(groups))
        return DraftPlan(rows, None, groups, [session.number] * len(groups), guessed, self._width())

    def _width(self) -> int:
        rounds = (session.round for session, _ in self._planned)
        return max([CANDIDATES, *(draft_round.width for draft_round in rounds if draft_round is not None)])

    # -- a session's memory --------------------------------------------------------------------------------------

    def _follow(self, update: TextUpdate) -> DrafterText:
        """Update the text of a call's session and discard its state past a cut. Raises NotFound and BadRequest."""
        session = self._sessions.get(update.opening)
        if session is None:
            raise NotFound("opening: is not open here")
        if session.closing is not None or session.ended:
            raise NotFound("opening: is being closed")
        check_tokens(session, update)
        before, common = session.base, session.text.follow(update)  # tokens shared by the old and new text
        self._sessions[update.opening] = self._sessions.pop(update.opening)
        if common < before:
            self._cut(session, common)
        return session

    def _cut(self, session: DrafterText, common: int) -> None:
        """Discard a session's state past the first `common` tokens of its text, which are those of its old text."""
        self._drop_prepared(session)
        for draft_round in (session.kept, session.round):
            if draft_round is not None and common < draft_round.base:
                self._drop_tree(session, draft_round)
        # The memory never covers the root between calls, so that a repeated call for the same text can run it again.
        if session.covers > min(common, session.base - 1):
            self._release(session)
            usable = session.first_covers <= min(common, session.base - 1)
            session.slot = session.first_slot if usable else EMPTY_TEXT
            session.covers = session.first_covers if usable else 0
        if session.first_covers > common:
            self.texts.release([session.first_slot])
            session.first_slot, session.first_covers = EMPTY_TEXT, 0
        if session.traced is not None and session.traced > common:
            session.traced = common
        session.ranks = {position: rank for position, rank in session.ranks.items() if position < common}

    def _fold_kept(self, session: DrafterText) -> None:
        """Fold the last tree into the text's memory, if there is one, and free its nodes. A fault ends this session
        alone."""
        if session.kept is None:
            return
        try:
            self._fold_path(session, session.kept)
            self._drop_tree(session, session.kept)
        except BaseException as error:  # a panic of a native library is no Exception
            self._fault(session, error)

    def _fold_path(self, session: DrafterText, draft_round: DraftRound) -> None:
        """Add a fold of a tree's nodes on the path of a text to the next step."""
        path, growth = draft_round.path_of(session.tokens(range(draft_round.base, session.base))), draft_round.growth
        for position, place in enumerate(path, draft_round.base):
            session.record_rank(position, growth.candidates[place], growth.scores[place], self.calibrations)
        if path:
            source = session.slot
            self._own_slot(session)
            slots = tuple(draft_round.slots[place] for place in path)
            self._folds.append(TextFold(session.covers, source, session.slot, slots))
            session.covers += len(path)

    def _own_slot(self, session: DrafterText) -> None:
        """Ensure that the session's slot is writable: neither slot 0 nor the slot kept from opening."""
        if session.slot in (EMPTY_TEXT, session.first_slot):
            session.slot = self._text_slot()

    def _text_slot(self) -> int:
        """A free text slot. Open texts need two each at most, so only prepared ones can have taken the last."""
        if not self.texts.free:
            self._drop_all_prepared()
        return self.texts.allocate(1)[0]

    def _release(self, session: DrafterText) -> None:
        if session.slot not in (EMPTY_TEXT, session.first_slot):
            self.texts.release([session.slot])
        session.slot = EMPTY_TEXT

    def _reserve(self, session: DrafterText) -> bool:
        """Take all node slots that the round needs, so that a started round can finish; False if there are too few.

        Drops prepared trees as needed, then kept ones, the least recently used session's first.
        """
        draft_round = session.round
        assert draft_round is not None
        if self._take_nodes(draft_round):
            return True
        self._drop_all_prepared()
        for other in list(self._sessions.values()):
            if self.nodes.free >= draft_round.shape.forwarded:
                break
            if other.kept is not None:
                self._drop_tree(other, other.kept)
        return self._take_nodes(draft_round)

    def _take_nodes(self, draft_round: DraftRound) -> bool:
        """Take all node slots that a round needs, unless it has them. False if too few are free."""
        if not draft_round.slots and self.nodes.free >= draft_round.shape.forwarded:
            draft_round.slots = self.nodes.allocate(draft_round.shape.forwarded)
        return bool(draft_round.slots)

    def _drop_tree(self, session: DrafterText, draft_round: DraftRound) -> None:
        self.nodes.release(draft_round.slots)
        draft_round.slots = []
        if session.kept is draft_round:
            session.kept = None

    def _request_noise(self, session: DrafterText, positions: range) -> None:
        if session.parameters.sampling.shares_noise:
            self.noise_wanted[session.number] = positions

    # -- prepared trees ------------------------------------------------------------------------------------------

    def _plan_prepared(self) -> DraftPlan | None:
        """The next forward of a tree that a text may ask for next; None if there is none, or too little memory.

        Called only while nothing else waits, so a call waits for one such forward at most. Noise that a session's next
        tree needs in any case is computed first.
        """
        if self.noise_wanted:
            return None
        self.calibrations.learn()
        for session in reversed(list(self._prepared)):
            if (plan := self._plan_prepared_of(session, self._prepared[session])) is not None:
                return plan
        return None

    def _plan_prepared_of(self, session: DrafterText, preparations: Preparations) -> DraftPlan | None:
        if (prepared := preparations.growing) is None:
            if (after := session.kept) is None or after is not preparations.after or not self.texts.free:
                return None
            if session.base + after.shape.depth + 1 > self.longest_prepared:
                return None
            if self.nodes.free < after.shape.forwarded or (outcome := preparations.next_outcome()) is None:
                return None
            prepared = self._begin(session, after, outcome)
            preparations.texts.append(prepared)
            try:
                self._fold_path(prepared, after)
            except BaseException as error:  # a panic of a native library is no Exception
                self._fault(prepared, error)
                return None
        assert prepared.round is not None
        if not self._take_nodes(prepared.round):
            return None
        return self._plan_level([prepared]) if prepared.base - prepared.covers == 1 else self._plan_chains([prepared])

    def _begin(self, session: DrafterText, after: DraftRound, outcome: Outcome) -> PreparedText:
        """Begin to prepare the tree of a text after an outcome of the verification of its kept tree."""
        prepared = PreparedText(
            number=session.number,
            opening=session.opening,
            parameters=session.parameters,
            vocabulary=session.vocabulary,
            slot=session.slot,
            covers=session.covers,
            first_slot=session.slot,  # so that `_own_slot` takes another slot before the fork is written
            ahead=session.ahead,
            first=session.base,
            of=session,
            outcome=outcome,
            guessed=list(outcome.tokens),
        )
        self.counters.prepared += 1
        self._grow_prepared(prepared, NEXT_TOKEN if outcome.leaf else after.shape)
        return prepared

    def _grow_prepared(self, prepared: PreparedText, shape: TreeShape) -> None:
        """Begin the tree of a prepared text."""
        root, calibration = prepared.guessed[-1], self.calibrations[prepared.scored_by]
        prepared.round = DraftRound(None, shape, prepared.base, growth_of(root, shape), calibration)

    def _go_on(self, prepared: PreparedText, guessed: DraftRound) -> None:
        """Begin the tree of an outcome that ends in a leaf, with the likeliest token after the leaf as its root. Other
        likely tokens become outcomes of their own."""
        preparations = self._prepared[prepared.of]
        assert preparations.after is not None
        growth, path, reached = guessed.growth, prepared.outcome.tokens, prepared.outcome.chance
        chances = guessed.calibration.confidences(growth.scores)[0]
        for token, chance in zip(growth.candidates[0][1:], chances[1:], strict=False):
            preparations.put_back(Outcome(reached * math.exp(chance - chances[0]), (*path, token), False))
        self._drop_tree(prepared, guessed)
        prepared.guessed.append(growth.candidates[0][0])
        prepared.outcome = Outcome(reached, tuple(prepared.guessed), False)
        self._grow_prepared(prepared, preparations.after.shape)

    def _claim(self, session: DrafterText, shape: TreeShape) -> PreparedText | None:
        """Take the prepared text that equals the session's text now, if there is one; drop the others."""
        preparations, calibration = self._prepared[session], self.calibrations[session.scored_by]
        for place, prepared in enumerate(preparations.texts):
            assert prepared.round is not None
            if prepared.is_next(shape) and prepared.round.recalibrated(calibration):
                del preparations.texts[place]
                preparations.claimed(True)
                self._drop_prepared(session)
                return prepared
        preparations.claimed(False)
        self._drop_prepared(session)
        return None

    def _use(self, session: DrafterText, prepared: PreparedText, ticket: Ticket) -> None:
        """Answer a call by a prepared tree, or go on with it if it is not complete."""
        self.counters.prepared_used += 1
        self.counters.prepared_used_us += prepared.spent_us
        self._release(session)
        if session.kept is not None:
            self._drop_tree(session, session.kept)
        session.slot, session.covers = prepared.slot, prepared.covers
        for position, candidates, scores in prepared.seen:
            session.record_rank(position, candidates, scores, self.calibrations)
        draft_round = prepared.round
        assert draft_round is not None
        draft_round.ticket, session.round = ticket, draft_round
        if draft_round.growth.finished:
            self._finish(session, draft_round)

    def _drop_prepared(self, session: DrafterText) -> None:
        """Throw away what is prepared for a session's next call."""
        if (preparations := self._prepared.get(session)) is None:
            return
        for prepared in preparations.texts:
            assert prepared.round is not None
            self.nodes.release(prepared.round.slots)
            self._release(prepared)
        self.counters.prepared_dropped += len(preparations.texts)
        preparations.texts, preparations.after = [], None

    def _drop_all_prepared(self) -> None:
        for session in self._prepared:
            self._drop_prepared(session)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _finish(self, session: DrafterText, draft_round: DraftRound) -> None:
        """Answer with the tree and keep its nodes for the next call."""
        start = session.traced if session.traced is not None else draft_round.base
        trace = ranks(session.ranks, start, draft_round.base, CANDIDATES)
        tokens, parents, values = draft_round.growth.arrays()
        assert draft_round.ticket is not None
        waited_us = microseconds(self.clock() - draft_round.ticket.arrived_s)
        laws = tuple(draft_round.draws.laws) if draft_round.draws is not None else ()
        texts = max(1, len(self._planned))  # none are planned when a prepared tree answers a call
        tree = DraftTree(tokens, parents, values, self.name, trace, waited_us, texts, laws=laws)
        self.answers.append((draft_round.ticket, tree))
        session.traced = draft_round.base
        session.ranks = {}
        draft_round.ticket, session.round, session.kept = None, None, draft_round
        # The next root is at most one token past this tree's leaves; its tree is assumed to be as deep.
        first = draft_round.base + session.ahead
        self._request_noise(session, range(first, first + 2 * draft_round.shape.depth + 1))
        if self.longest_prepared and draft_round.draws is None and not session.structured:
            self._prepared[session] = preparations = self._prepared.pop(session, None) or Preparations()
            preparations.answered(draft_round)

    def _answer_complete(self) -> None:
        """Answer openings and closes whose memory is complete."""
        for session in self._sessions.values():
            if session.covers < session.base - 1:
                continue
            if session.opened is not None:
                (ticket, restored), session.opened = session.opened, None
                session.first_slot, session.first_covers = session.slot, session.covers
                self.answers.append((ticket, Opened(restored, session.covers - restored, open_us=0)))
            if session.closing is not None:
                text = session.text.tokens
                ids = tuple(text.ids[: session.covers])
                digest = text.digest(session.covers)
                ready = MemoryComplete(session.opening, session.slot, ids, digest, session.parameters.tenant)
                self.answers.append((session.closing, ready))
                session.closing, session.ended = None, True

    def _stop_round(self, session: DrafterText, draft_round: DraftRound) -> None:
        """Stop a session's unfinished round. Its processed nodes are kept like a finished tree's."""
        session.round = None
        if draft_round.ticket is not None:
            self.answers.append((draft_round.ticket, DraftTree.root_only(draft_round.growth.root, self.name)))
            draft_round.ticket = None
        if not draft_round.slots:
            return
        if draft_round.growth.processed:
            session.kept = draft_round
        else:
            self._drop_tree(session, draft_round)

    def _fault(self, session: DrafterText, error: BaseException) -> None:
        """End a session whose part of a step raised. The others go on."""
        if isinstance(session, PreparedText):
            log_failure(log, error, "drafter %s: a prepared tree failed", self.name)
            self._drop_prepared(session.of)
            return
        log_failure(log, error, "drafter %s: a text's part of a step failed; the others go on", self.name)
        self._end(session, EngineFailed(f"drafter {self.name}: {described(error)}"))

    def _end(self, session: DrafterText, reason: Exception) -> None:
        self._drop_prepared(session)
        self._prepared.pop(session, None)
        for draft_round in (session.kept, session.round):
            if draft_round is not None:
                self._drop_tree(session, draft_round)
        self.answers += [(ticket, reason) for ticket in session.waiting]
        self.texts.release({session.slot, session.first_slot} - {EMPTY_TEXT})
        self.noise_wanted.pop(session.number, None)
        del self._sessions[session.opening]
        self.closed.append(session.number)


def _masks_of(texts: Sequence[tuple[DrafterText, int]]) -> Sequence[Bits | None]:
    """Masks of the next rows of texts, whose chains begin at these positions (`DrafterText.masks`); empty if no row has
    one."""
    if all(session.structure is None for session, _ in texts):
        return ()
    masks = [mask for session, first in texts for mask in session.masks(first)]
    return masks if any(mask is not None for mask in masks) else ()
