"""Runs a step: rows through the model, logits into walks, accepted rows into their slots. Handles no requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import median

import numpy as np
import torch
from dendro.errors import DendroError
from dendro.tree import DraftTree
from torch import Tensor
from tree_kernels import FEW_ROWS, ROW_MULTIPLE
from tree_kernels.row_slots import Ints
from tree_kernels.tree_attention import PAGE, TreeRows
from tree_kernels.tree_walk import Walk
from tree_layers.launching import on_its_device
from tree_layers.memory import Pages
from tree_layers.tree_mixers import Array, RecurrentMemory

from verifier_service.models import LoadedTarget
from verifier_service.models.head import HEAD_ROWS, Logits
from verifier_service.recurrent import TextStates, last_writers, recurrent_rows, recurrent_step
from verifier_service.row_check import RowTrace
from verifier_service.rows import NO_ROWS, StepOutcome, StepPlan, text_rows
from verifier_service.shards import AcceptedSlots, Bounds, Crew
from verifier_service.walk import BegunMasks, StepMasks, Walker, echo_logprobs, guarded, walk_with_logprobs

SMALL_BUCKETS = tuple(range(ROW_MULTIPLE, 65, ROW_MULTIPLE))

CHECKED_ROWS = 32
"""Rows that the check at start compares in each smaller bucket."""

TIMED_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Numbers of rows of the steps that are timed while a target loads."""
TIMED_TURNS = 5
TIMED_S = 2.0
"""Seconds of timing steps after which no further turn over TIMED_ROWS begins."""


def buckets_up_to(step_rows: int) -> tuple[int, ...]:
    """Numbers of rows that a step is padded to where its products are a library's: multiples of ROW_MULTIPLE up to 64,
    then 96, 128, 192, 256, ... The last is `step_rows`, rounded up to a multiple of ROW_MULTIPLE."""
    buckets = [bucket for bucket in SMALL_BUCKETS if bucket < step_rows]
    size = 64
    while size < step_rows:
        buckets += [bucket for bucket in (size * 3 // 2, size * 2) if bucket < step_rows]
        size *= 2
    return (*buckets, -(-step_rows // ROW_MULTIPLE) * ROW_MULTIPLE)


def with_few_rows(buckets: Sequence[int]) -> tuple[int, ...]:
    """The padded numbers of rows for a target whose products are this project's own: `buckets`, and the FEW_ROWS below
    the largest of them."""
    return tuple(sorted({*buckets, *(few for few in FEW_ROWS if few < buckets[-1])}))


class StepRunner:
    """Owns the model and its pages. Not thread-safe: one thread at a time."""

    def __init__(self, target: LoadedTarget, bounds: Bounds, buckets: Sequence[int], crew: Crew | None = None) -> None:
        """crew: the workers with the other shards of the target, whose runners have the same bounds; None: no shards"""
        self.target = target
        self.crew = crew
        self.near = bounds.near
        self.device = target.model.device
        self.buckets = tuple(buckets)
        self.walker = Walker(target.vocabulary)
        self.masks = StepMasks()
        self.own_pages = range(1 + bounds.pages, 1 + bounds.pages + bounds.own_pages)
        self._own_text: list[int] = []  # tokens whose keys are on them
        self.pages = Pages(target.layouts, bounds.pages + bounds.own_pages, buckets[-1], self.device)
        target.run.pages = self.pages
        self.arrangement = bounds.arrangement
        if target.mixers:
            tokens, states = self.arrangement.tokens, self.arrangement.states
            target.run.recurrent = RecurrentMemory(target.mixers, tokens, states, self.device)
        self._own_place = self.arrangement.own_place()

    @on_its_device
    def run(self, plan: StepPlan) -> StepOutcome:
        """Run one forward, walk its trees and keep accepted guesses."""
        started = time.perf_counter()
        with torch.inference_mode():
            masks: list[BegunMasks | None] = [None] * len(plan.draws)
            if structured := any(draw.structure is not None for draw in plan.draws):
                masks = self.masks.begin([(draw.structure, draw.tree) for draw in plan.draws])
            inputs = self._begin(plan)
            began = time.perf_counter()
            logits = self._logits(inputs)
            forward_s = time.perf_counter() - began - logits.took_s
            if structured:
                self.masks.wait(masks)
            drawn = zip(plan.draws, masks, strict=True)
            walked = [
                guarded(partial(walk_with_logprobs, self.walker, draw, logits.row, allowed)) for draw, allowed in drawn
            ]
            walks = [each if isinstance(each, DendroError) else each[0] for each in walked]
            if structured:
                walks = self.masks.settled(walks, masks)
            echoed = tuple(guarded(partial(echo_logprobs, echo, logits.row)) for echo in plan.echoes)
            self._keep(self._accepted(plan, walks))
        ended = time.perf_counter()
        return StepOutcome(
            tuple(walks),
            int(1e6 * (forward_s + logits.took_s)),
            int(1e6 * (ended - started)),
            logprobs={
                number: each[1] for number, each in enumerate(walked) if not isinstance(each, DendroError) and each[1]
            },
            echoed=echoed,
        )

    @on_its_device
    def forward(self, plan: StepPlan) -> Tensor:
        """Logits [wanted rows, vocabulary] float32. Writes every row's keys and values."""
        return self._logits(self._begin(plan)).all()[: len(plan.wanted)]

    def _logits(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Logits:
        """Logits of the padded wanted rows. A single block, and a head that workers share, run in one call of the model
        with the layers: a second call costs time."""
        if len(inputs[2]) <= HEAD_ROWS or self.target.head.together:
            return Logits.made(self.target.logits(*inputs))
        return Logits(self.target.hidden(*inputs), self.target.logits_of)

    def _begin(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Send a step's rows to the crew and set them for the attention modules. Returns the padded tokens, positions
        and wanted rows."""
        if self.crew is not None:
            self.crew.broadcast(replace(plan, draws=(), echoes=()))
        count = len(plan.tokens)
        padded = self._bucket(count)
        self.target.run.begin(
            TreeRows(
                positions=self._tensor(plan.positions),
                slots=self._tensor(plan.slots),
                near=self._tensor(plan.near),
                far=plan.far,
                padded=padded,
            )
        )
        if plan.recurrent is not None:
            self.target.run.recurrent_step = recurrent_step(
                plan.recurrent, padded, self.arrangement.scratch, self.device
            )
        tokens, places = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
        tokens[:count] = plan.tokens
        # A guess may lie past the model's last position, the text may not. The result of such a row is never used.
        places[:count] = np.minimum(plan.positions, self.target.max_positions - 1)
        wanted = np.zeros(self._bucket(len(plan.wanted)), np.int64)
        wanted[: len(plan.wanted)] = plan.wanted
        return self._tensor(tokens), self._tensor(places), self._tensor(wanted)

    @on_its_device
    def keep(self, kept: AcceptedSlots) -> None:
        """Copy accepted guesses' keys from scratch slots to their homes, and accepted rows' mixer inputs into rings."""
        if len(kept.source):
            self.pages.append(self._tensor(kept.source), self._tensor(kept.target))
        if len(kept.inputs):
            assert self.target.run.recurrent is not None
            self.target.run.recurrent.keep(self._tensor(kept.inputs), self._tensor(kept.rings))

    def save(self, place: TextStates, length: int) -> dict[str, Array]:
        """Memory with which a text of `length` consumed tokens can go on at another replica."""
        assert self.target.run.recurrent is not None
        block = place.base_of(length)
        slots = place.token_slots(np.arange(block * place.extent.block, length))
        return self.target.run.recurrent.save(self._tensor(slots), place.state_slot(block))

    def restore(self, place: TextStates, length: int, tokens: int, arrays: Mapping[str, Array]) -> None:
        """Load what `save` returned into a text's place: a checkpoint, and the inputs of the `tokens` tokens after it,
        up to `length`. `place.folded` may be past that checkpoint by now, so its number is computed from `length` and
        `tokens`."""
        assert self.target.run.recurrent is not None
        slots = place.token_slots(np.arange(length - tokens, length))
        block = (length - tokens) // place.extent.block
        self.target.run.recurrent.load(arrays, self._tensor(slots), place.state_slot(block))

    def warm_up(self) -> None:
        """Compile, record and prepare in advance, so that no kind of step is slow the first time. Called once, before
        any text is open."""
        if self.target.direct is not None:
            for rows in reversed(self.buckets):
                self.target.direct.prepare(rows, 2 * self.near, self.buckets[0])

    def tree_logits(self, ids: Sequence[int], tree: DraftTree) -> Tensor:
        """Logits [rows, vocabulary] float32 of a tree whose root is the last token of a text.

        For drafters made from the target itself. Uses the runner's own pages, which keep the last text; texts of
        sessions are not affected.
        """
        if len(ids) + tree.depth > len(self.own_pages) * PAGE:
            raise ValueError(f"ids: {len(ids)} tokens; there is room for {len(self.own_pages) * PAGE}")
        chunk, root = self.buckets[-1], len(ids) - 1
        common = 0
        while common < min(root, len(self._own_text)) and self._own_text[common] == ids[common]:
            common += 1
        if self.target.mixers:
            if self._own_place.can_cut(common):
                self._own_place.cut(common)
            else:
                common, self._own_place = 0, self.arrangement.own_place()
        self._own_text = list(ids[:common])
        for start in range(common, root, chunk):
            self._text_rows(ids, np.arange(start, min(start + chunk, root)), None)
        self._own_text = list(ids[:root])
        return self._text_rows(ids, NO_ROWS, tree)

    def logits_are_finite(self) -> bool:
        """True if the logits of a few random tokens are finite: float16 has no number above 65504."""
        rows = min(ROW_MULTIPLE, self.target.max_positions)
        ids = np.random.default_rng(0).integers(0, self.target.vocabulary, rows).tolist()
        return bool(torch.isfinite(self._whole_text(ids)).all())

    def run_rows(self, count: int) -> None:
        """Run a step of the first `count` rows of some text to its end, to be timed."""
        count = min(count, self.target.max_positions, len(self.own_pages) * PAGE)
        self._whole_text([0] * count)[0, 0].item()  # waits for the device

    def timed_steps(self) -> tuple[tuple[int, int], ...]:
        """Time steps of a few numbers of rows. Returns rows, ascending, and microseconds, which do not fall. Called
        after `warm_up`, before any text is open."""
        most = min(self.target.max_positions, len(self.own_pages) * PAGE)
        sizes = sorted({self._bucket(rows) for rows in TIMED_ROWS if self._bucket(rows) <= most})
        return median_times(self.run_rows, sizes)

    def check_rows(self) -> list[str]:
        """Run the largest bucket, then every bucket and a single row, on shuffled rows of it.

        Returns the numbers of rows whose logits have other bits, each with the first module whose results differ.
        """
        largest = min(self.buckets[-1], self.target.max_positions, len(self.own_pages) * PAGE)
        generator = np.random.default_rng(0)
        ids = generator.integers(0, self.target.vocabulary, largest).tolist()
        order = generator.permutation(largest)
        truth = self._whole_text(ids)
        differ = {}
        for count in (*self.buckets, 1):
            # A single row is padded to the smallest bucket; products over pairs of a row and a kv head are not padded.
            if count == 1 and self.buckets[0] in differ:
                continue
            for start in range(0, min(largest, CHECKED_ROWS), max(count, self.buckets[0])):
                rows = order[start : start + count]
                if not torch.equal(self._text_rows(ids, rows, None), truth[self._tensor(rows)]):
                    differ[count] = rows
                    self._whole_text(ids)  # these rows wrote their keys, which the next rows read
                    break
        places = self._first_in(ids, differ) if differ else {}
        return [f"{count} row{'s' * (count > 1)}, first in {place}" for count, place in places.items()]

    def _whole_text(self, ids: Sequence[int]) -> Tensor:
        """Logits of all rows of a text in one step."""
        self._own_place = self.arrangement.own_place()
        logits = self._text_rows(ids, np.arange(len(ids)), None)
        self._own_text = []
        return logits

    def _first_in(self, ids: Sequence[int], differ: Mapping[int, Ints]) -> dict[int, str]:
        """Name of the first place where rows have other bits than in a step of the whole text, by number of rows."""
        places = {}
        for count, rows in differ.items():
            whole, part = RowTrace(), RowTrace()
            with whole.of(self.target.model, self._bucket(len(ids))):
                self._whole_text(ids)
            with part.of(self.target.model, self._bucket(len(rows))):
                self._text_rows(ids, rows, None)
            places[count] = whole.first_difference(part, self._tensor(rows))
        return places

    def _text_rows(self, ids: Sequence[int], committed: Ints, tree: DraftTree | None) -> Tensor:
        """Logits of these rows of a text on the runner's own pages, in one step."""
        plan = text_rows(ids, committed, tree, self.own_pages, self.pages.scratch, self.near, self.target.window)
        plan = replace(plan, wanted=np.arange(len(plan.tokens)))
        if self.target.mixers:
            scratch = self.arrangement.scratch
            rows = recurrent_rows(self._own_place, committed, len(ids) - 1, tree, scratch)
            plan = replace(plan, recurrent=rows)
        with torch.inference_mode():
            logits = self.forward(plan)
            if self.target.mixers and tree is None:
                self._keep(self._accepted(plan, ()))
                self._own_place.append(int(committed.max()) + 1)
        return logits

    def _accepted(self, plan: StepPlan, walks: Sequence[Walk | DendroError]) -> AcceptedSlots:
        """Slots of the keys of the rows that walks accepted, and of the inputs of these and of the certain rows."""
        rows = accepted_rows(plan, walks)
        certain = np.flatnonzero(plan.certain) if plan.recurrent is not None else NO_ROWS
        return self._slots_of(plan, rows, np.sort(np.concatenate([certain, rows])))

    def _slots_of(self, plan: StepPlan, rows: Ints, kept: Ints) -> AcceptedSlots:
        """Slots of the keys of `rows`, and of the mixer inputs of the rows `kept`."""
        inputs = rings = NO_ROWS
        if plan.recurrent is not None:
            inputs, rings = last_writers(self.arrangement.scratch + kept, plan.recurrent.homes[kept])
        return AcceptedSlots(plan.slots[rows], plan.homes[rows], inputs, rings)

    def _keep(self, kept: AcceptedSlots) -> None:
        """Run `keep` in this process and at all workers of the crew."""
        if not len(kept.source) and not len(kept.inputs):
            return
        if self.crew is not None:
            self.crew.broadcast(kept)
        self.keep(kept)

    def _bucket(self, rows: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= rows), self.buckets[-1])

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def median_times(run: Callable[[int], None], sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Numbers of rows and the median microseconds of their steps, which do not fall with more rows. Sizes are timed in
    turn, so that other work of the machine lengthens all of them. run: runs a step of the given number of rows sizes:
    ascending

    >>> median_times(lambda rows: None, [1, 8])[1][0]
    8
    """
    took: dict[int, list[float]] = {size: [] for size in sizes}
    ends = time.perf_counter() + TIMED_S
    for turn in range(1 + TIMED_TURNS):  # the first one warms up
        if turn > 1 and time.perf_counter() > ends:
            break
        for size in sizes:
            began = time.perf_counter()
            run(size)
            took[size].append(time.perf_counter() - began)
    times = accumulate((max(int(1e6 * median(took[size][1:])), 1) for size in sizes), max)
    return tuple(zip(sizes, times, strict=True))


def accepted_rows(plan: StepPlan, walks: Sequence[Walk | DendroError]) -> Ints:
    """The rows of guesses that walks accepted. walks: one for each draw of the plan"""
    rows = [
        draw.first + row
        for draw, walked in zip(plan.draws, walks, strict=True)
        if isinstance(walked, Walk)
        for row in walked.path[1:]
    ]
    return np.array(rows, np.int64)
