"""`dendro bench drafter`: the time of a drafter (levels, whole drafts, many sessions) and its memory by text length.

Every form of a model does the same work in turns, in one thread of this process, at temperature 1 with prepared noise.
Before it is measured, a form runs one forward untimed: its weights are then in the caches, as in a process that only
drafts.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dendro.calls import DraftCall
from dendro.engine import Ticket
from dendro.errors import BadRequest, EngineFailed
from dendro.shapes import DEFAULT_DEPTH, MAX_ROWS, TreeShape
from dendro.text import Sampling
from dendro.tree import LONGEST_TRACE, DraftTree
from tree_layers.states import SlotPool

from cluster.demo.prompts import Prompt, held_out_prompts, load_tokenizer
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, models, option
from cluster.measure.in_process import DRAFTER_DTYPE, EngineText
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.measure.statistics import estimates, over
from cluster.measure.targets import parameter_count
from drafter_service.engine import node_slots, text_slots
from drafter_service.models import DrafterModel, load_model
from drafter_service.plan import DraftPlan, Level, Levels, OneForward
from drafter_service.runner import DraftRunner
from drafter_service.scheduler import DraftScheduler
from drafter_service.texts import DrafterText

EAGER, FUSED = "eager", "fused"
FORMS = (EAGER, FUSED)
"""EAGER computes with torch's operators, on any device, and is the reference of the other. FUSED runs compiled
kernels."""
MAMBA2, MAMBA, LLAMA = DRAFTERS = ("mamba2", "mamba", "llama")
"""Folders of the demo's drafters."""
LEVELS = TreeShape.parse("(4,3,1)")
LEVEL_ROWS = (1, 4, 12)
"""Rows of the first levels of LEVELS that go through the model."""
TREE = "(3,2,1)"
SHAPES = ("(1,1,1,1)", TREE, "beam(5,3)", "dynamic(4,5,15)")
ACCEPTED = 2
"""The most guesses by which a text grows between two of its drafts; a token of the corpus follows them."""
PROMPT_TOKENS, PASSAGE_TOKENS = 128, 256
"""Tokens of a drafted text, and of each of the prompts that together are a longer one."""
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
"""Tokens of the longer texts, by default."""
ROOM = 4096
"""Tokens by which a text may grow."""
LEVEL_BARS = {MAMBA2: {1: 7.0, 4: 6.0, 12: 3.3}, MAMBA: {1: 4.5, 4: 3.8, 12: 2.2}}
DRAFT_BARS = {MAMBA2: dict(zip(SHAPES, (6.0, 6.0, 5.0, 5.0), strict=True))}
"""Least ratios of EAGER's time to FUSED's, by drafter and rows of a level, and by drafter and shape of a draft."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DrafterBenchOptions:
    repetitions: int = option("Repetitions of everything.", 60, 7, least=1)
    sessions: tuple[int, ...] = option("Texts that draft at once.", (1, 2, 4, 8, 16, 32), (1, 8, 32), least=1)
    contexts: tuple[int, ...] = option("Tokens of the longer texts.", CONTEXTS, (256, 2048), least=2)
    models: Path = models()


# Forms
@dataclass(frozen=True, slots=True)
class DrafterForms:
    """A drafter's model, loaded in every form that can be had."""

    name: str
    models: Mapping[str, DrafterModel]  # EAGER and, where it can be had, FUSED
    missing: str = ""  # why FUSED cannot be had


def load_forms(name: str, checkpoint: Path) -> DrafterForms:
    """Load a drafter in DRAFTER_DTYPE on the CPU. Raises BadRequest for a checkpoint that cannot be used."""
    load = partial(load_model, checkpoint, getattr(torch, DRAFTER_DTYPE), CPU)
    models = {EAGER: load(form=EAGER)[0]}
    try:
        return DrafterForms(name, models | {FUSED: load(form=FUSED)[0]})
    except BadRequest as error:
        return DrafterForms(name, models, str(error))


@dataclass(frozen=True, slots=True)
class TimedDraft:
    """One draft of one or more texts."""

    trees: tuple[DraftTree, ...]  # one of each text
    plans: tuple[DraftPlan, ...]  # one of each forward
    seconds: float


class InlineDrafter:
    """A scheduler and a runner, used as the engine uses them, in the caller's thread."""

    def __init__(self, model: DrafterModel, texts: int, *, by_level: bool = False, prepares: bool = False) -> None:
        """texts: the most that are open   by_level: every level is a forward of its own
        prepares: while no call waits, steps prepare trees that texts may ask for next
        """
        slots, nodes = text_slots(texts), node_slots(MAX_ROWS, DEFAULT_DEPTH)
        self.runner = DraftRunner(model, slots, nodes, CPU)
        pools = SlotPool(slots), SlotPool(nodes)
        at_once = (lambda session: OneForward()) if by_level else self.runner.one_forward
        longest = model.max_length if prepares else 0
        self.scheduler = DraftScheduler(
            "bench", *pools, texts, LONGEST_TRACE, one_forward=at_once, longest_prepared=longest
        )
        self._last: DraftPlan | None = None  # the last draft's last level

    @torch.inference_mode()
    def open(self, text: EngineText) -> DrafterText:
        """Open a text and prefill all of it but the root."""
        call = text.open_call(ROOM)
        session = self.scheduler.open(Ticket(0.0), call, 0, self.runner.vocabulary)
        self.runner.admit(session.number, call.parameters.sampling, self.runner.vocabulary)
        while self.step() is not None:
            pass
        self.scheduler.answers.clear()
        return session

    def step(self) -> DraftPlan | None:
        """The next folds and forward; returns the forward's plan, if there is one."""
        step = self.scheduler.next()
        if step.folds:
            self.runner.fold(step.folds, step.plan)
        if step.plan is not None:
            self.scheduler.apply(self.runner.run(step.plan))
        return step.plan

    @torch.inference_mode()
    def draft(self, texts: Sequence[EngineText], shape: TreeShape) -> TimedDraft:
        """Draft a tree of each text, all at once. Before the time starts, calls and noise are prepared, and the last
        draft's last level runs again: the model is then in the processor's caches."""
        if self._last is not None:
            self.runner.run(self._last)
        calls = [DraftCall(text.update(), shape) for text in texts]
        self._prepare_noise()
        found = self.answer(calls)
        # A level writes the same into the kept nodes again; a chain would advance its text.
        self._last = found.plans[-1] if isinstance(found.plans[-1].rows, Level | Levels) else None
        return found

    @torch.inference_mode()
    def answer(self, calls: Sequence[DraftCall]) -> TimedDraft:
        """A tree for each call, all at once. Raises EngineFailed where a draft failed."""
        scheduler, plans = self.scheduler, list[DraftPlan]()
        tickets = [Ticket(scheduler.clock()) for _ in calls]
        started = time.perf_counter()
        for ticket, call in zip(tickets, calls, strict=True):
            scheduler.draft(ticket, call)
        while len(scheduler.answers) < len(calls):
            if (plan := self.step()) is not None:
                plans.append(plan)
        seconds = time.perf_counter() - started
        trees = {ticket: answer for ticket, answer in scheduler.answers if isinstance(answer, DraftTree)}
        if len(trees) < len(calls):
            raise EngineFailed(f"a draft failed: {scheduler.answers}")
        scheduler.answers.clear()
        scheduler.calibrations.learn()  # The engine learns after its answers, too.
        return TimedDraft(tuple(trees[ticket] for ticket in tickets), tuple(plans), seconds)

    def _prepare_noise(self) -> None:
        """Compute all noise that the scheduler expects to need, as an idle engine does."""
        wanted = self.scheduler.noise_wanted
        for session, positions in wanted.items():
            self.runner.forget_noise(session, positions.start)
            while self.runner.prepare(session, positions):
                pass
        wanted.clear()


# Cases: work that forms do in turns
class LevelCase:
    """A level of a tree below one text, of so many rows."""

    def __init__(self, forms: DrafterForms, ids: Sequence[int], rows: int) -> None:
        self.name, self.context, self.rows = forms.name, len(ids), rows
        self.times: dict[str, list[float]] = {form: [] for form in forms.models}
        self.held: dict[str, int] = {}  # by form: bytes that the text takes
        self._runs: dict[str, Callable[[], Any]] = {}
        for form, model in forms.models.items():
            drafter, text = InlineDrafter(model, 1, by_level=True), EngineText(ids, Sampling(temperature=1.0))
            drafter.open(text)
            self.held[form] = drafter.runner.memory.text_bytes(len(ids))
            plans = {plan.rows.count: plan for plan in drafter.draft([text], LEVELS).plans}
            self._runs[form] = partial(drafter.runner.run, plans[rows])

    def seconds(self, form: str) -> float:
        run = self._runs[form]
        run()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def after_turns(self) -> None:
        """Nothing changes: the level is the same in each turn."""

    def row(self) -> Row:
        held = {form: round(each / 1024, 1) for form, each in self.held.items()}
        bar = LEVEL_BARS.get(self.name, {}).get(self.rows)
        return timed(self) | {"context": self.context, "rows": self.rows, "bar": bar, "text_kib": held}


def accepted_path(tree: DraftTree) -> list[int]:
    """The tokens of the path of best guesses, at most ACCEPTED."""
    tokens, row = list[int](), 0
    while len(tokens) < ACCEPTED and (below := tree.children(row)):
        row = below[0]
        tokens.append(int(tree.tokens[row]))
    return tokens


class DraftCase:
    """Drafts of one shape for one or more texts at once."""

    def __init__(self, forms: DrafterForms, shape: str, prompts: Sequence[Prompt]) -> None:
        """prompts: one for each session"""
        self.name, self.shape, self.sessions = forms.name, TreeShape.parse(shape), len(prompts)
        self.times: dict[str, list[float]] = {form: [] for form in forms.models}
        self.trees = self.equal = 0  # trees in all; trees that all forms drafted alike
        self._prompts, self._rounds = prompts, 0
        self._drafted: dict[str, tuple[DraftTree, ...]] = {}
        self._texts = [
            EngineText(each.token_ids, Sampling(temperature=1.0, seed=seed)) for seed, each in enumerate(prompts)
        ]
        self._drafters = {form: InlineDrafter(model, len(prompts)) for form, model in forms.models.items()}
        for drafter in self._drafters.values():
            for text in self._texts:
                drafter.open(text)

    def seconds(self, form: str) -> float:
        draft = self._drafters[form].draft(self._texts, self.shape)
        self._drafted[form] = draft.trees
        return draft.seconds

    def after_turns(self) -> None:
        """Every text grows by guesses of EAGER's tree and a token of the corpus."""
        for text, prompt, *trees in zip(self._texts, self._prompts, *self._drafted.values(), strict=True):
            self.trees += 1
            self.equal += all(np.array_equal(trees[0].tokens, tree.tokens) for tree in trees) and all(
                np.array_equal(trees[0].parents, tree.parents) for tree in trees
            )
            following = prompt.continuation_ids[self._rounds % len(prompt.continuation_ids)]
            text.grow([*accepted_path(trees[0]), following])
        self._rounds += 1

    def row(self) -> Row:
        counted = {"sessions": self.sessions, "trees": self.trees, "equal": self.equal}
        bar = DRAFT_BARS.get(self.name, {}).get(str(self.shape))
        return timed(self) | {"shape": str(self.shape), "bar": bar} | counted


Case = LevelCase | DraftCase


def timed(case: Case) -> Row:
    """Milliseconds by form, and their ratio where there are two."""
    ratio = over(case.times[EAGER], case.times[FUSED]) if FUSED in case.times else None
    return {"drafter": case.name, "ms": estimates(case.times), "eager_over_fused": ratio}


def measure_in_turns(cases: Sequence[Case], repetitions: int, step: Step) -> None:
    """Measure all cases in turns, after a warm-up of each; forms in random order, as caches depend on what ran
    before."""
    order = random.Random(0)
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            for case in cases:
                for form in order.sample(list(case.times), len(case.times)):
                    seconds = case.seconds(form)
                    if repetition:
                        case.times[form].append(seconds)
                case.after_turns()
            step()


# The measurement
def with_positions(checkpoint: Path, positions: int, folder: Path) -> Path:
    """Copy a checkpoint to `folder` with a greater last position. The copy costs the same as a model trained for such
    texts; its output for them is meaningless."""
    made = folder / checkpoint.name
    made.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            os.symlink(file.resolve(), made / file.name)
    config = json.loads((checkpoint / "config.json").read_text())
    config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
    (made / "config.json").write_text(json.dumps(config))
    return made


def measure(options: DrafterBenchOptions, begin: Begin) -> dict[str, Any]:
    load, tokenizer, folder = os.getloadavg()[0], load_tokenizer(options.models), options.models
    prompts = held_out_prompts(max(options.sessions), PROMPT_TOKENS, tokenizer, folder)
    passages = held_out_prompts(-(-options.contexts[-1] // PASSAGE_TOKENS), PASSAGE_TOKENS, tokenizer, folder)
    with tempfile.TemporaryDirectory() as copies:
        paths = {name: folder / name for name in DRAFTERS}
        paths[LLAMA] = with_positions(paths[LLAMA], options.contexts[-1] + MAX_ROWS, Path(copies))
        drafters = [load_forms(name, path) for name, path in paths.items()]
    parameters = ", ".join(f"{name} {parameter_count(folder / name):,}" for name in DRAFTERS)
    ids = [token for passage in passages for token in passage.token_ids]
    found = measure_drafters(drafters, prompts, ids, options, begin)
    missing = "; ".join(f"{each.name}: {each.missing}" for each in drafters if each.missing)
    return {"plan": {"parameters": parameters, "missing": missing, "load": load}, **found}


def measure_drafters(
    drafters: Sequence[DrafterForms],
    prompts: Sequence[Prompt],
    ids: Sequence[int],
    options: DrafterBenchOptions,
    begin: Begin,
) -> dict[str, list[Row]]:
    """Rows of levels, of longer texts, of drafts and of many sessions.

    prompts: at least one for each session   ids: a text of at least the longest context
    """
    levels = [LevelCase(forms, prompts[0].token_ids, rows) for forms in drafters for rows in LEVEL_ROWS]
    lengths = [LevelCase(forms, ids[:context], LEVEL_ROWS[0]) for context in options.contexts for forms in drafters]
    drafts = [DraftCase(forms, shape, prompts[:1]) for shape in SHAPES for forms in drafters]
    batches = [DraftCase(forms, TREE, prompts[:count]) for count in options.sessions for forms in drafters]
    work: dict[str, list[Case]] = {"levels": [*levels, *lengths], "drafts": [*drafts, *batches]}
    for title, cases in work.items():
        measure_in_turns(cases, options.repetitions, begin(title, options.repetitions + 1))
    tables: dict[str, Sequence[Case]] = {"levels": levels, "lengths": lengths, "drafts": drafts, "sessions": batches}
    return {name: [case.row() for case in cases] for name, cases in tables.items()}


TIMES = "* ms = ms/*:.3f; eager over fused = eager_over_fused:.2f"
FASTER: dict[str, Any] = {
    "path": "eager_over_fused",
    "least": "bar",
    "end": "low",
    "where": lambda row: row["bar"] is not None,
}
DRAFTER = Bench(
    "drafter",
    "Time the demo's drafters in every form, in this process, with one thread, at temperature 1: levels of a tree, "
    "whole drafts, 1 to 32 sessions at once; and the time and memory of the three drafters from 256 to 8,192 tokens.",
    "Under a minute: fewer lengths, sessions, repetitions.",
    DrafterBenchOptions,
    measure,
    facts=(
        "Load average at the start {load:.2f}",
        f"Parameters of the demo's drafters, in {DRAFTER_DTYPE}: {{parameters}}",
        "Not measured in form fused: {missing}",
        "Forms take turns in random order. Before the time starts, noise is computed and the form runs one forward. No "
        "router, sockets or thread of an engine: a scheduler and a runner are called in turn. Ratios are of "
        "neighbouring measurements; aims are judged by the lower end of the interval",
        f"Levels: forwards of {', '.join(map(str, LEVEL_ROWS))} rows, the first of tree {LEVELS}, with ranking. "
        f"Drafts: between two drafts a text of {PROMPT_TOKENS} tokens grows by at most {ACCEPTED} guesses and a token "
        "of the corpus. Equal: trees that all forms drafted alike, the warm-up's included",
        "Longer texts: as in Figure 1 of Mamba Drafters for Speculative Decoding (arXiv 2506.01206), drafters of equal "
        f"size. The last position of {LLAMA} is raised to the longest text: its costs are valid, its guesses there are "
        "meaningless. Memory: bytes of a text, which a test compares with torch.profiler's",
    ),
    tables=(
        ReportTable("A level with ranking, median and 90 %", "levels", f"drafter; rows; {TIMES}"),
        ReportTable("A draft, median and 90 %", "drafts", f"drafter; shape; {TIMES}; trees; equal"),
        ReportTable(
            f"Sessions that draft {TREE} at once, median and 90 %",
            "sessions",
            f"drafter; sessions; {TIMES}; trees; equal",
        ),
        ReportTable(
            "A level of 1 row by the length of the text, median and 90 %",
            "lengths",
            f"tokens = context:,; drafter; {TIMES}; * text KiB = text_kib/*:,.1f",
        ),
    ),
    aims=(
        Aim("{drafter}, a level of {rows} rows: eager over fused, at least", "levels", **FASTER),
        Aim("{drafter}, a draft of {shape}: eager over fused, at least", "drafts", **FASTER),
    ),
    plots=(
        Plot("lengths", "tokens of the text = context", "time of a level * (ms) = ms/*", line="{drafter}", log="x"),
        Plot(
            "lengths",
            "tokens of the text = context",
            "memory of a text * (KiB) = text_kib/*",
            line="{drafter}",
            log="xy",
        ),
    ),
    threads=1,
    code=("drafter_service", "kernels/tree_kernels/mamba_level"),
)
