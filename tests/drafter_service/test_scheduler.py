"""The plans of the drafter's scheduler, without a model: every row's candidates are the tokens 0, 1, 2, ..."""

from __future__ import annotations

import time

import numpy as np
import pytest
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate
from dendro.clock import Clock
from dendro.engine import Ticket
from dendro.shapes import DynamicShape, LevelShape, TreeShape
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from tree_layers.states import SlotPool

from drafter_service import prepared
from drafter_service.plan import DraftOutcome, DraftPlan, OneForward
from drafter_service.scheduler import DraftScheduler
from drafter_service.texts import DrafterText

SESSIONS, PROMPT = 3, (5, 6, 7)
SMALL, LARGE = LevelShape((2, 2)), DynamicShape(16, 5, 7)


def forward(scheduler: DraftScheduler) -> DraftPlan | None:
    plan = scheduler.next().plan
    if plan is not None:
        shape = sum(plan.groups), plan.width
        scheduler.apply(DraftOutcome(np.tile(np.arange(plan.width), (shape[0], 1)), np.zeros(shape, np.float32)))
    return plan


def forwards(scheduler: DraftScheduler) -> list[DraftPlan]:
    """All forwards until nothing waits."""
    plans = []
    while (plan := forward(scheduler)) is not None:
        plans.append(plan)
    return plans


def scheduler_of(clock: Clock = time.monotonic, *, runs_levels: bool = False, longest_chain: int = 0) -> DraftScheduler:
    slots = SlotPool(1 + 2 * SESSIONS), SlotPool(1 + LARGE.forwarded)
    return DraftScheduler(
        "d",
        *slots,
        SESSIONS,
        8,
        clock,
        one_forward=lambda session: OneForward(runs_levels, longest_chain),
    )


def opened(scheduler: DraftScheduler, name: int) -> DrafterText:
    update = TextUpdate.of(bytes([name]) * 16, Tokens(PROMPT), 0)
    return scheduler.open(Ticket(0.0), OpenCall(update, RequestParameters(Sampling(), Limits(100), "", ())), 0, 1 << 20)


def draft(scheduler: DraftScheduler, session: DrafterText, shape: TreeShape, arrived_s: float = 0.0) -> None:
    update = TextUpdate.of(session.opening, session.text.tokens, len(PROMPT))
    scheduler.draft(Ticket(arrived_s), DraftCall(update, shape))


def test_a_round_that_waits_for_many_slots_is_not_overtaken_by_rounds_that_need_few():
    scheduler = scheduler_of()
    first, large, last = [opened(scheduler, name) for name in range(SESSIONS)]
    while forward(scheduler) is not None:
        pass
    scheduler.answers.clear()
    draft(scheduler, first, SMALL)
    forward(scheduler)
    draft(scheduler, large, LARGE)
    draft(scheduler, last, SMALL)
    planned = []
    while (plan := forward(scheduler)) is not None:
        planned.append(set(plan.sessions))
    assert planned[:2] == [{first.number}, {large.number}]
    assert [tree.rows for _, tree in scheduler.answers if isinstance(tree, DraftTree)] == [7, 8, 7]


def test_a_close_folds_the_accepted_nodes_in_the_step_whose_answer_saves_the_memory():
    scheduler = scheduler_of()
    session, ticket = opened(scheduler, 0), Ticket(0.0)
    draft(scheduler, session, SMALL)
    while forward(scheduler) is not None:
        pass
    slots = list(session.kept.slots)
    scheduler.answers.clear()
    session.text.tokens.extend([0, 9])  # the first guess, and a token that was not guessed below it
    text = session.text.tokens
    scheduler.close(ticket, CloseCall(TextUpdate(session.opening, len(text), text.digest(), len(text), ())))
    step = scheduler.next()
    assert step.plan is None
    (fold,) = step.folds
    assert (fold.start, fold.path) == (len(PROMPT) - 1, tuple(slots[:2])) and fold.target == session.slot
    ((answered, memory),) = scheduler.answers
    assert answered is ticket and memory.slot == fold.target and memory.ids == (*PROMPT, 0)
    assert scheduler.next().folds == ()


def test_a_tree_reports_the_time_since_its_call_arrived_by_the_given_clock():
    scheduler = scheduler_of(clock=lambda: 7.5)
    draft(scheduler, opened(scheduler, 0), SMALL, arrived_s=7.25)
    while forward(scheduler) is not None:
        pass
    (tree,) = [answer for _, answer in scheduler.answers if isinstance(answer, DraftTree)]
    assert tree.draft_us == 250_000


def test_a_session_alone_gets_all_levels_of_a_fixed_tree_in_one_forward_and_two_sessions_get_them_one_by_one():
    found = []
    for runs_levels in (False, True):
        scheduler = scheduler_of(runs_levels=runs_levels)
        first, second = [opened(scheduler, name) for name in range(2)]
        while forward(scheduler) is not None:
            pass
        scheduler.answers.clear()
        draft(scheduler, first, SMALL)
        alone = [plan.groups for plan in forwards(scheduler)]
        assert alone == ([[1, 2]] if runs_levels else [[1], [2]])
        draft(scheduler, first, SMALL)
        draft(scheduler, second, SMALL)
        assert [plan.groups for plan in forwards(scheduler)] == [[1, 1], [2, 2]]
        trees = [tree for _, tree in scheduler.answers if isinstance(tree, DraftTree)]
        found.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees])
    assert found[0] == found[1] == [([PROMPT[-1], 0, 1, 0, 1, 0, 1], [-1, 0, 0, 1, 1, 2, 2])] * 3


def test_the_rest_of_a_fixed_tree_is_one_forward_after_a_chain_to_its_root():
    scheduler = scheduler_of(runs_levels=True, longest_chain=1)
    session = opened(scheduler, 1)
    forwards(scheduler)
    update = TextUpdate.of(session.opening, Tokens((*PROMPT, 8, 9)), len(PROMPT))
    scheduler.draft(Ticket(0.0), DraftCall(update, LevelShape((2, 1, 1))))
    assert [plan.groups for plan in forwards(scheduler)] == [[1, 1, 1], [2, 2]]
    (tree,) = [tree for _, tree in scheduler.answers if isinstance(tree, DraftTree)]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 3, 4]


def test_a_chain_that_runs_as_levels_ends_before_its_root_which_is_the_next_level():
    found = []
    for longest_chain in (0, 1, 2):
        scheduler = scheduler_of(longest_chain=longest_chain)
        session = opened(scheduler, 1)
        forwards(scheduler)
        update = TextUpdate.of(session.opening, Tokens((*PROMPT, 8, 9)), len(PROMPT))
        scheduler.draft(Ticket(0.0), DraftCall(update, LevelShape((2, 1, 1))))
        plans = forwards(scheduler)
        if longest_chain == 2:  # the prompt's last token and the first new one, then the root
            assert [plan.groups for plan in plans] == [[1, 1], [1], [2], [2]]
            assert plans[0].rows.tokens.tolist() == [[PROMPT[-1], 8]] and not len(plans[0].rows.roots)
        else:
            assert [plan.groups for plan in plans] == [[1, 1, 1], [2], [2]]
        (tree,) = [tree for _, tree in scheduler.answers if isinstance(tree, DraftTree)]
        found.append((tree.tokens.tolist(), tree.parents.tolist(), list(tree.trace)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("shape", [LevelShape((2, 1, 1)), LevelShape((2,)), DynamicShape(2, 3, 7)])
def test_tokens_that_a_memory_lacks_are_one_forward_with_the_root_and_all_levels_whose_form_is_known(shape):
    found = []
    for longest_chain in (1, 0, 9):  # with 1, more tokens than that run in a chain of their own; with 9, as on a GPU
        scheduler = scheduler_of(runs_levels=True, longest_chain=longest_chain)
        session = opened(scheduler, 1)
        forwards(scheduler)
        text = Tokens(PROMPT)
        for more in ((0, 9), (0, 0, 0, 0, 9)):  # the second begins with guesses of the first tree, which are folded
            text.extend(more)
            scheduler.draft(Ticket(0.0), DraftCall(TextUpdate.of(session.opening, text, session.base), shape))
            planned = len(forwards(scheduler))
            assert longest_chain == 1 or planned == (3 if isinstance(shape, DynamicShape) else 1)
        trees = [tree for _, tree in scheduler.answers if isinstance(tree, DraftTree)]
        found.append([(tree.tokens.tolist(), tree.parents.tolist(), list(tree.trace)) for tree in trees])
        assert session.covers == session.base - 1
    assert found[0] == found[1]


def test_a_tree_whose_form_depends_on_its_guesses_grows_level_by_level():
    scheduler = scheduler_of(runs_levels=True)
    session = opened(scheduler, 1)
    while forward(scheduler) is not None:
        pass
    draft(scheduler, session, DynamicShape(2, 3, 7))
    assert [plan.groups for plan in forwards(scheduler)] == [[1], [2], [2]]


def test_a_call_goes_before_prepared_trees_and_goes_on_with_what_is_prepared_of_its_own(monkeypatch):
    monkeypatch.setattr(prepared, "LEAST", 0.0)
    slots = SlotPool(1 + 2 * SESSIONS), SlotPool(1 + 8 * SMALL.rows)
    scheduler = DraftScheduler("d", *slots, SESSIONS, 8, longest_prepared=100)
    first, other = [opened(scheduler, name) for name in range(2)]
    forwards(scheduler)
    scheduler.answers.clear()
    draft(scheduler, first, SMALL)
    for _ in range(2):
        forward(scheduler)  # the tree itself
    assert scheduler.planned_prepared is None and len(scheduler.answers) == 1
    forward(scheduler)  # the root of a prepared tree, or the token after a leaf
    assert scheduler.counters.prepared == 1
    draft(scheduler, other, SMALL)
    assert [forward(scheduler).sessions for _ in range(2)] == [[other.number]] * 2
    assert len(scheduler.answers) == 2
    while not any(text.round.growth.processed and text.round.shape == SMALL for text in scheduler.prepared_of(first)):
        forward(scheduler)
    (growing,) = [text for text in scheduler.prepared_of(first) if not text.complete]
    done = growing.round.growth.processed
    update = TextUpdate.of(first.opening, Tokens((*PROMPT, *growing.guessed)), len(PROMPT))
    scheduler.draft(Ticket(0.0), DraftCall(update, SMALL))
    assert scheduler.counters.prepared_used == 1 and first.round.growth.processed == done
    assert sum(len(plan.groups) for plan in (forward(scheduler),)) == 1 and len(scheduler.answers) == 3
    for session in (first, other):
        scheduler.forget(session.opening)
    assert (scheduler.texts.free, scheduler.nodes.free) == (2 * SESSIONS, 8 * SMALL.rows)
