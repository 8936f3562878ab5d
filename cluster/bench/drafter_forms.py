"""The forms of a drafter's model, and a drafter whose forwards its caller runs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dendro.calls import DraftCall
from dendro.engine import Ticket
from dendro.errors import BadRequest, EngineFailed
from dendro.shapes import DEFAULT_DEPTH, MAX_ROWS, TreeShape
from dendro.tree import LONGEST_TRACE, DraftTree
from tree_layers.states import SlotPool

from cluster.measure.in_process import DRAFTER_DTYPE, EngineText
from drafter_service.acceptance_head import AcceptanceHead
from drafter_service.engine import node_slots, text_slots
from drafter_service.models import DrafterModel, load_model
from drafter_service.plan import DraftPlan, Level, Levels
from drafter_service.runner import DraftRunner
from drafter_service.scheduler import DraftScheduler
from drafter_service.texts import DrafterText

EAGER, FUSED = "eager", "fused"
FORMS = (EAGER, FUSED)
"""EAGER computes with torch's operators, on any device, and is the reference of the others. FUSED runs compiled
kernels."""
CALL, NEXT, FOLD, RUN, APPLY = "call", "next", "fold", "run", "apply"
DRAFT_PARTS = (CALL, NEXT, FOLD, RUN, APPLY)
"""Parts of a draft: the calls with their texts, planning, folds of accepted nodes, forwards with ranking, growth."""
ROOM = 4096
"""Tokens by which a text may grow."""

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DrafterForms:
    """A drafter's model, loaded in every form that can be had."""

    name: str
    models: Mapping[str, DrafterModel]  # by form, in the order of FORMS; EAGER is among them
    missing: Mapping[str, str]  # form -> why it cannot be had


def load_forms(name: str, checkpoint: Path) -> DrafterForms:
    """Load a drafter in DRAFTER_DTYPE on the CPU. Raises BadRequest for a checkpoint that cannot be used."""
    load: Any = load_model
    dtype, models, missing = getattr(torch, DRAFTER_DTYPE), dict[str, DrafterModel](), dict[str, str]()
    if "form" not in inspect.signature(load_model).parameters:
        return DrafterForms(name, {EAGER: load(checkpoint, dtype, CPU)[0]}, {FUSED: "drafters have no fused form"})
    for form in FORMS:
        try:
            models[form] = load(checkpoint, dtype, CPU, form=form)[0]
        except BadRequest as error:
            if form == EAGER:
                raise
            missing[form] = str(error)
    return DrafterForms(name, models, missing)


@dataclass(frozen=True, slots=True)
class TimedDraft:
    """One draft of one or more texts."""

    trees: tuple[DraftTree, ...]  # of each text
    plans: tuple[DraftPlan, ...]  # of its forwards
    seconds: float
    parts: Mapping[str, float]  # seconds by DRAFT_PARTS, of all forwards together


class InlineDrafter:
    """A scheduler and a runner, used as the engine uses them, in the caller's thread."""

    def __init__(
        self, model: DrafterModel, texts: int, *, by_level: bool = False, head: AcceptanceHead | None = None
    ) -> None:
        """texts: the most that are open   by_level: every level is a forward of its own"""
        self.model = model
        slots, nodes = text_slots(texts), node_slots(MAX_ROWS, DEFAULT_DEPTH)
        self.runner = DraftRunner(model, slots, nodes, CPU, head)
        pools = SlotPool(slots), SlotPool(nodes)
        at_once = (lambda session: False) if by_level else self.runner.runs_levels
        self._scheduler = DraftScheduler("bench", *pools, texts, LONGEST_TRACE, runs_levels=at_once)
        self._lengths: dict[EngineText, int] = {}  # tokens of each text at the last call
        self._last: DraftPlan | None = None  # the last draft's last level

    @torch.inference_mode()
    def open(self, text: EngineText) -> DrafterText:
        """Open a text and prefill all of it but the root."""
        call = text.open_call(ROOM)
        session = self._scheduler.open(Ticket(0.0), call, 0, self.runner.vocabulary)
        self.runner.admit(session.number, call.parameters.sampling, self.runner.vocabulary)
        while (plan := self._scheduler.next().plan) is not None:
            self._scheduler.apply(self.runner.run(plan))
        self._scheduler.answers.clear()
        self._lengths[text] = len(text.text)
        return session

    @torch.inference_mode()
    def draft(self, texts: Sequence[EngineText], shape: TreeShape) -> TimedDraft:
        """Draft a tree of each text, all at once. Before the time starts, calls and noise are prepared, and the last
        draft's last level runs again: the model is then in the processor's caches."""
        scheduler, runner = self._scheduler, self.runner
        if self._last is not None:
            runner.run(self._last)
        calls = [DraftCall(text.update(self._lengths[text]), shape) for text in texts]
        tickets = [Ticket(scheduler.clock()) for _ in calls]
        self._prepare_noise()
        parts, plans = dict.fromkeys(DRAFT_PARTS, 0.0), list[DraftPlan]()
        started = clock = time.perf_counter()

        def ended(part: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            parts[part] += now - clock
            clock = now

        for ticket, call in zip(tickets, calls, strict=True):
            scheduler.draft(ticket, call)
        ended(CALL)
        while len(scheduler.answers) < len(calls):
            step = scheduler.next()
            ended(NEXT)
            if step.folds:
                runner.fold(step.folds)
            ended(FOLD)
            assert step.plan is not None
            outcome = runner.run(step.plan)
            ended(RUN)
            scheduler.apply(outcome)
            ended(APPLY)
            plans.append(step.plan)
        trees = {ticket: answer for ticket, answer in scheduler.answers if isinstance(answer, DraftTree)}
        if len(trees) < len(calls):
            raise EngineFailed(f"a draft of {shape} failed: {scheduler.answers}")
        scheduler.answers.clear()
        # A level writes the same into the kept nodes again; a chain would advance its text.
        self._last = plans[-1] if isinstance(plans[-1].rows, Level | Levels) else None
        self._lengths.update((text, len(text.text)) for text in texts)
        return TimedDraft(tuple(trees[ticket] for ticket in tickets), tuple(plans), clock - started, parts)

    def _prepare_noise(self) -> None:
        """Compute all noise that the scheduler expects to need, as an idle engine does."""
        wanted = self._scheduler.noise_wanted
        for session, positions in wanted.items():
            while self.runner.prepare(session, positions):
                pass
        wanted.clear()
