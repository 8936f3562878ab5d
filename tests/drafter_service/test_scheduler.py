"""The plans of the drafter's scheduler, without a model: every row's candidates are the tokens 0, 1, 2, ..."""

from __future__ import annotations

import numpy as np
from dendro.calls import DraftCall, OpenCall, Terms, TextUpdate
from dendro.engine import Ticket
from dendro.shapes import DynamicShape, LevelShape, TreeShape
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from tree_layers.states import SlotPool

from drafter_service.plan import DraftOutcome, DraftPlan
from drafter_service.scheduler import DraftScheduler
from drafter_service.texts import DrafterText

SESSIONS, PROMPT = 3, (5, 6, 7)
SMALL, LARGE = LevelShape((2, 2)), DynamicShape(16, 5, 7)


def forward(scheduler: DraftScheduler) -> DraftPlan | None:
    plan = scheduler.next()
    if plan is not None:
        shape = len(plan.scored), plan.width
        scheduler.apply(DraftOutcome(np.tile(np.arange(plan.width), (shape[0], 1)), np.zeros(shape, np.float32)))
    return plan


def opened(scheduler: DraftScheduler, name: int) -> DrafterText:
    update = TextUpdate.of(bytes([name]) * 16, Tokens(PROMPT), 0)
    return scheduler.open(Ticket(0.0), OpenCall(update, Terms(Sampling(), Limits(100), "", ())), 0, 1 << 20)


def draft(scheduler: DraftScheduler, session: DrafterText, shape: TreeShape) -> None:
    update = TextUpdate.of(session.opening, session.text.tokens, len(PROMPT))
    scheduler.draft(Ticket(0.0), DraftCall(update, shape))


def test_a_round_that_waits_for_many_slots_is_not_overtaken_by_rounds_that_need_few():
    scheduler = DraftScheduler("d", SlotPool(1 + 2 * SESSIONS), SlotPool(1 + LARGE.forwarded), SESSIONS, 8)
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
        planned.append(set(plan.sessions.tolist()))
    assert planned[:2] == [{first.number}, {large.number}]
    assert [tree.rows for _, tree in scheduler.answers if isinstance(tree, DraftTree)] == [7, 8, 7]
