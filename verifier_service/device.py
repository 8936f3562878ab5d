"""Steps on an accelerator: one upload of a plan, one download of its walks, and no synchronisation in between.

Forward, noise, filters, walk and the copying of accepted keys are one sequence of operations on tensors of a fixed
shape. A step without prompt rows is recorded as a graph when the engine is loaded, once for each kind of drawing and
number of rows that steps are padded to, and replayed from then on. A step that has a text whose parameters change
logits before the temperature runs without a graph, and uploads that text's history; so does one with a text that asks
for log-probabilities, which are computed from the rows of its path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from dendro.errors import BadRequest, DendroError
from dendro.logprobs import TokenLogprobs
from dendro.shapes import MAX_ROWS
from torch import Tensor
from tree_kernels.commit.triton import commit_rows
from tree_kernels.noise.triton import gumbel_rows
from tree_kernels.row_slots import Ints
from tree_kernels.runs import places_in_runs
from tree_kernels.tree_attention import PAGE
from tree_kernels.tree_attention.splits import ITEM, FarSplits
from tree_kernels.tree_attention.tensor_cores import SplitRows
from tree_kernels.tree_attention.triton import TableRows
from tree_kernels.tree_walk import Walk
from tree_kernels.tree_walk.triton import walk_rows
from tree_kernels.warp import History, Warp
from tree_kernels.warp.batched import WarpRows, tokens_of_rows
from tree_layers.graphs import CudaGraphs, Graphs, Recordings
from tree_layers.launching import on_its_device
from tree_layers.step_buffers import StepBuffers
from triton.runtime.errors import OutOfResources

from verifier_service.device_states import DeviceStates, folds_in_place
from verifier_service.models import LoadedTarget
from verifier_service.models.head import Logits
from verifier_service.rows import StepOutcome, StepPlan
from verifier_service.runner import StepRunner, accepted_rows
from verifier_service.shards import Bounds, Crew
from verifier_service.walk import UNUSABLE, BegunMasks, Draw, before_unusable, echo_logprobs, guarded, token_logprobs

log = logging.getLogger("dendro.verifier")

Array = TypeVar("Array")

GREEDY, SAMPLED, FILTERED = range(3)
"""Kinds of drawing: without noise where all texts are greedy, without sorting where none has a filter."""

PLAIN = Warp()
WARP_NUMBERS = tuple(each.name for each in fields(Warp) if each.name != "top_k")
"""The fields of a warp that are real numbers, whose bits are uploaded among whole numbers: a step has one upload."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Padded sizes of a step, and its kind of drawing."""

    rows: int
    drawn: int  # rows whose logits are needed
    drawing: int  # GREEDY, SAMPLED or FILTERED
    alone: bool  # True: the step has rows of trees alone and its folds need no room, so it may be captured


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's result, on the device."""

    walks: Tensor  # [texts, 2 * max_depth + 3] wanted rows that were visited, the token drawn at each, and how many of
    # them are valid; 0 for a text that is walked on the host
    raw: dict[int, Tensor] = field(default_factory=dict)  # by draw that asks for log-probabilities: its rows' logits
    rows: Tensor = field(default_factory=lambda: torch.zeros(0))  # logits of wanted rows, in a step with echoes
    scores: dict[int, Tensor] = field(default_factory=dict)  # by draw that is walked on the host: its rows' logits
    failed: dict[int, DendroError] = field(default_factory=dict)  # by draw; MasksPending: its masks were not ready


class DeviceRunner(StepRunner):
    """A runner whose attention, noise and walks are accelerator kernels."""

    def __init__(
        self,
        target: LoadedTarget,
        bounds: Bounds,
        buckets: Sequence[int],
        crew: Crew | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """graphs: by default CUDA's where one GPU has the whole target; without any, steps run unrecorded."""
        super().__init__(target, bounds, buckets, crew)
        self._bounds = bounds
        layers = zip(target.run.probed, target.layouts, strict=True)
        groups = [layer.group for layer, layout in layers if layout.dtype != torch.float32]
        self._splits = FarSplits.of(len(self.own_pages) * PAGE, self.near, max(groups)) if groups else None
        self._states: DeviceStates | None = None
        if target.run.recurrent is not None:
            recurrent = target.run.recurrent, bounds.arrangement
            self._states = DeviceStates(*recurrent, bounds.max_texts, self.buckets[-1])
        self._inputs: dict[StepShape, StepBuffers] = {}
        if graphs is None and self.device.type == "cuda" and crew is None:
            graphs = CudaGraphs()
        self.recordings: Recordings[StepShape, Drawn] | None = None
        if graphs is not None:
            self.recordings = Recordings(graphs, "verifier: steps", log)
        self._ran: set[StepShape] = set()  # shapes whose kernels are compiled

    def check_rows(self) -> list[str]:
        """Check the rows (`StepRunner.check_rows`). Raises BadRequest where a kernel for the target's sizes, such as
        attention of wide heads in float32, needs more shared memory than the device has."""
        try:
            return super().check_rows()
        except OutOfResources as error:
            needs = f"a kernel for its sizes needs {error.required} bytes of {error.name}"
            raise BadRequest("checkpoint", f"{needs}; {self.device} has {error.limit}") from error

    @on_its_device
    def warm_up(self) -> None:
        """Run a step of each number of rows and each kind of drawing, and record those that can be recorded, the
        largest first: graphs share memory, which the first one must be large enough for.

        All rows are padding, so only the zero page is written. For steps with prompt rows, one number of wanted rows is
        enough: the same kernels run for any.
        """
        if self.crew is not None or (self.device.type == "cpu" and self.recordings is None):
            return  # workers ran every number of rows in the checks; Triton's interpreter compiles nothing
        began = time.perf_counter()
        with torch.inference_mode():
            for rows in sorted(self.buckets, reverse=True):
                self._warm(StepShape(rows, self.buckets[0], GREEDY, alone=False))
                for drawing in (FILTERED, SAMPLED, GREEDY):
                    self._warm(StepShape(rows, rows, drawing, alone=True))
        log.info(
            "verifier: %d steps warmed up in %.1f s, %d of them recorded",
            len(self._ran),
            time.perf_counter() - began,
            len(self.recordings.made) if self.recordings is not None else 0,
        )

    @on_its_device
    def run_rows(self, count: int) -> None:
        """Run a step of a tree of `count` rows to its end, to be timed. It is a recorded step where steps of texts are
        recorded."""
        if self.crew is not None:
            super().run_rows(count)
        else:
            with torch.inference_mode():
                rows = self._bucket(count)
                self._warm(StepShape(rows, rows, GREEDY, alone=True)).walks.cpu()

    def timed_steps(self) -> tuple[tuple[int, int], ...]:
        """Rows and microseconds of timed steps; empty in Triton's interpreter, whose times say nothing about a
        device."""
        return () if self.device.type == "cpu" else super().timed_steps()

    @on_its_device
    def run(self, plan: StepPlan) -> StepOutcome:
        """Run one forward, walk its trees and keep accepted guesses."""
        started = time.perf_counter()
        if self.crew is not None:
            self.crew.broadcast(replace(plan, draws=(), echoes=()))
        with torch.inference_mode():
            masks = self.masks.begin([(draw.structure, draw.tree) for draw in plan.draws])
            shape = self._shape_of(plan)
            inputs = self._upload(plan, shape)
            began = time.perf_counter()
            cold = shape not in self._ran
            # A graph reads no text's history and keeps no logits, so a step that needs either runs without one.
            alone = plan.echoes or any(
                draw.history is not None or draw.logprobs is not None or not draw.sampling.keeps_tokens
                for draw in plan.draws
            )
            drawn = self._step(shape, inputs, plan, masks) if alone else self._replayed(shape, inputs)
            by_host = self._walked_on_host(plan, drawn.scores)
            found = drawn.walks.cpu().numpy()
        forwarded = time.perf_counter()
        walks = [
            by_host[number] if number in by_host else guarded(partial(_walk, draw, row, self._bounds.max_depth + 1))
            for number, (draw, row) in enumerate(zip(plan.draws, found, strict=False))
        ]
        walks = self.masks.settled([drawn.failed.get(number, each) for number, each in enumerate(walks)], masks)
        logprobs = {
            number: self._logprobs(plan.draws[number], walked, raw)
            for number, raw in drawn.raw.items()
            if isinstance(walked := walks[number], Walk)
        }
        echoed = tuple(
            guarded(partial(echo_logprobs, echo, lambda row: drawn.rows[row : row + 1])) for echo in plan.echoes
        )
        if self.crew is not None and len((kept := self._accepted(plan, walks)).source):
            self.crew.broadcast(kept)  # this process's step has copied its own part already
        ended = time.perf_counter()
        return StepOutcome(
            tuple(walks), int(1e6 * (forwarded - began)), int(1e6 * (ended - started)), cold, logprobs, echoed
        )

    def _logprobs(self, draw: Draw, walked: Walk, raw: Tensor) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of a walk's tokens. raw [rows, vocabulary]: logits of the draw's tree"""
        top = draw.logprobs or 0
        pairs = zip(walked.path, walked.tokens, strict=True)
        return tuple(token_logprobs(raw[row : row + 1], token, top) for row, token in pairs)

    def _walked_on_host(self, plan: StepPlan, scores: Mapping[int, Tensor]) -> dict[int, Walk | DendroError]:
        """Walks of the draws that need the host, by the draws' numbers; copies the keys of accepted rows to their
        homes. scores: logits of each draw's rows, with the effect of its history"""
        walks: dict[int, Walk | DendroError] = {}
        for number, rows in scores.items():
            draw = replace(plan.draws[number], history=None, wanted=0)

            def logits(row: int, rows: Tensor = rows) -> Tensor:
                return rows[row : row + 1]

            walks[number] = guarded(partial(self.walker.walk, draw, logits))
        if walks:
            draws = tuple(plan.draws[number] for number in walks)
            # The device's step has copied the certain rows, and after them the accepted guesses of the texts that it
            # walked itself. One of these may lie where a certain row was, so certain rows are not copied again.
            guesses = np.sort(accepted_rows(replace(plan, draws=draws), list(walks.values())))
            self.keep(self._slots_of(plan, guesses, guesses))
        return walks

    # The arrays

    def _shape_of(self, plan: StepPlan) -> StepShape:
        drawing = GREEDY
        for draw in plan.draws:
            if not draw.warp.greedy:
                drawing = max(drawing, FILTERED if draw.warp.masks else SAMPLED)
        rows, wanted = self._bucket(len(plan.tokens)), self._bucket(len(plan.wanted))
        in_place = plan.recurrent is None or folds_in_place(plan.recurrent)
        return StepShape(rows, wanted, drawing, len(plan.wanted) == len(plan.tokens) and in_place)

    def _inputs_of(self, shape: StepShape) -> StepBuffers:
        """The upload buffers of a shape, cleared: every row is padding."""
        if shape not in self._inputs:
            rows, drawn, texts = (shape.rows,), (shape.drawn,), (self._bounds.max_texts,)
            whole = {
                **dict.fromkeys(("tokens", "places", "positions", "slots", "texts"), rows),
                "near": (shape.rows, 2 * self.near),
                "tables": (self._bounds.max_texts, self._bounds.own_pages),
                **dict.fromkeys(("wanted", "guesses", "parents", "draws_at", "seeds", "samples", "top_k"), drawn),
                **dict.fromkeys(("from_slots", "to_slots"), drawn),
                **dict.fromkeys(("first", "count"), texts),
            }
            if self._splits is not None:
                most = self._splits.most_items(shape.rows, self._bounds.max_texts)
                whole |= {"items": (most, ITEM), "splits": (shape.rows, 2), "jobs": (1,)}
            if self._states is not None:
                whole |= {f"states.{name}": size for name, size in self._states.sizes(shape.rows, shape.drawn).items()}
            whole |= dict.fromkeys(WARP_NUMBERS, drawn)
            self._inputs[shape] = StepBuffers(whole, torch.int64, self.device)
        inputs = self._inputs[shape]
        inputs.clear()
        for name in WARP_NUMBERS:
            inputs.host[name].view(np.float64)[:] = getattr(PLAIN, name)
        return inputs

    def _upload(self, plan: StepPlan, shape: StepShape) -> StepBuffers:
        inputs = self._inputs_of(shape)
        self._fill(plan, inputs.host)
        inputs.upload()
        return inputs

    def _warm(self, shape: StepShape) -> Drawn:
        """Run a step whose rows are all padding."""
        inputs = self._inputs_of(shape)
        inputs.upload()
        return self._replayed(shape, inputs)

    def _fill(self, plan: StepPlan, whole: dict[str, Ints]) -> None:
        rows, wanted = len(plan.tokens), plan.wanted
        whole["tokens"][:rows] = plan.tokens
        whole["positions"][:rows] = plan.positions
        # A guess may lie past the model's last position, the text may not. The result of such a row is never used.
        whole["places"][:rows] = np.minimum(plan.positions, self.target.max_positions - 1)
        whole["slots"][:rows] = plan.slots
        whole["near"][:rows] = plan.near
        for text, far in enumerate(plan.far):
            whole["tables"][text, far.first : far.first + len(far.pages)] = far.pages
            whole["texts"][far.start : far.stop] = text
        if self._splits is not None:
            whole["jobs"][0] = self._splits.fill(plan.positions, plan.far, whole["items"], whole["splits"])
        if self._states is not None:
            self._states.fill(plan, _of_states(whole))
        whole["wanted"][: len(wanted)] = wanted
        whole["draws_at"][: len(wanted)] = plan.positions[wanted] + 1
        whole["from_slots"][: len(wanted)] = plan.slots[wanted]
        whole["to_slots"][: len(wanted)] = plan.homes[wanted]
        if draws := plan.draws:
            first, counts = np.array([(draw.wanted, draw.tree.rows) for draw in draws]).T
            each = np.repeat(np.arange(len(draws)), counts)  # [rows of trees] number of the draw
            mine = first[each] + places_in_runs(counts)
            whole["guesses"][mine] = np.concatenate([draw.tree.tokens for draw in draws])
            whole["parents"][mine] = np.concatenate([draw.tree.parents for draw in draws])
            whole["seeds"][mine] = np.array([draw.sampling.seed for draw in draws], np.uint64).view(np.int64)[each]
            whole["samples"][mine] = np.array([draw.sampling.sample_index for draw in draws])[each]
            whole["top_k"][mine] = np.array([draw.warp.top_k for draw in draws])[each]
            for name in WARP_NUMBERS:
                whole[name].view(np.float64)[mine] = np.array([getattr(draw.warp, name) for draw in draws])[each]
            whole["first"][: len(draws)] = first
            whole["count"][: len(draws)] = [draw.tree.rows if draw.sampling.keeps_tokens else 0 for draw in draws]

    def _begin(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Prepare a forward without drawing: one of a check, or of a worker other than the leader."""
        if self.crew is not None:
            self.crew.broadcast(replace(plan, draws=(), echoes=()))
        alone = replace(plan, draws=(), echoes=())
        shape = self._shape_of(alone)
        return self._seen(self._upload(alone, shape).device, shape)

    def _logits(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Logits:
        """Logits of all wanted rows in one product: the checks at start must multiply as many rows as steps do."""
        return Logits.made(self.target.logits(*inputs))

    def _seen(self, given: dict[str, Tensor], shape: StepShape) -> tuple[Tensor, Tensor, Tensor]:
        rows = given["positions"], given["slots"], given["near"], given["texts"], given["tables"]
        if self._splits is None:
            self.target.run.begin(TableRows(*rows))
        else:
            items = given["items"], given["jobs"], given["splits"]
            self.target.run.begin(SplitRows(*rows, *items, self._splits.count))
        if self._states is not None:
            self.target.run.recurrent_step = self._states.step(_of_states(given), moves=not shape.alone)
        return given["tokens"], given["places"], given["wanted"]

    # The step

    def _step(
        self,
        shape: StepShape,
        inputs: StepBuffers,
        plan: StepPlan | None = None,
        masks: Sequence[BegunMasks | None] = (),
    ) -> Drawn:
        """Run a step, from rows to copied keys. Nothing synchronises, unless some draws of `plan` have a history.

        plan: None for a graph's step, in which no draw has a history and no text asks for log-probabilities
        masks: one per draw of the plan, begun by `StepMasks`; a draw whose masks are late is in `failed`"""
        given = inputs.device
        logits = self.target.logits(*self._seen(given, shape))
        self.masks.wait(masks)
        usable = logits.amax(1).isfinite()  # True for usable rows of raw logits (`walk.usable`)
        raw, scores, failed = dict[int, Tensor](), dict[int, Tensor](), dict[int, DendroError]()
        for number, draw in enumerate(plan.draws if plan is not None else ()):
            mine = slice(draw.wanted, draw.wanted + draw.tree.rows)
            if draw.logprobs is not None:
                raw[number] = logits[mine].clone()
            if draw.history is not None:
                changed = guarded(partial(_with_history, draw, draw.history, logits[mine], masks[number]))
                if isinstance(changed, DendroError):
                    failed[number] = changed  # the token drawn without the history is dropped
                    continue
                logits[mine] = changed
            if not draw.sampling.keeps_tokens:
                scores[number] = logits[mine]
        if shape.drawing == GREEDY:
            picked = logits.argmax(1)
        else:
            noise = gumbel_rows(given["seeds"], given["draws_at"], given["samples"], self.target.vocabulary)
            warp = WarpRows.of(given | {name: given[name].view(torch.float64) for name in WARP_NUMBERS})
            picked = tokens_of_rows(logits, warp, noise, masks=shape.drawing == FILTERED)
        picked = torch.where(usable, picked, UNUSABLE)
        paths, lengths = walk_rows(
            given["guesses"], given["parents"], picked, given["first"], given["count"], MAX_ROWS, self._bounds.max_depth
        )
        below = paths[:, 1:]
        accepted = torch.arange(1, self._bounds.max_depth + 1, device=self.device)[None] < lengths[:, None]
        source = torch.where(accepted, given["from_slots"][below], 0)  # 0 where a guess was not accepted: skipped
        target = torch.where(accepted, given["to_slots"][below], 0)
        for store in self.pages.stores:
            commit_rows(store, source.view(-1), target.view(-1))
        if self._states is not None:
            self._states.keep(_of_states(given), below, accepted)
        # Echoes read raw logits: a draw with a history has changed only rows of its own tree, which are never echoed.
        rows = logits if plan is not None and plan.echoes else torch.zeros(0)
        walks = torch.cat([paths, picked[paths], lengths[:, None]], 1)
        return Drawn(walks, raw, rows, scores, failed)

    def _replayed(self, shape: StepShape, inputs: StepBuffers) -> Drawn:
        """Replay a step's graph, recorded first if needed. Run the step if it cannot be recorded.

        A step may be run again on the same inputs: it writes the same keys to the same places.
        """
        self._ran.add(shape)
        if not shape.alone or self.recordings is None:
            return self._step(shape, inputs)
        return self.recordings.run(shape, lambda: self._step(shape, inputs))


def _of_states(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays for mixers, by their names in `DeviceStates`."""
    return {name.removeprefix("states."): each for name, each in arrays.items() if name.startswith("states.")}


def _with_history(draw: Draw, history: History, logits: Tensor, masks: BegunMasks | None) -> Tensor:
    """Logits [rows, V] of a draw with the effect of the text's history and structure. logits [rows, V]: raw"""
    allowed = [masks.result().allowed(row) for row in range(draw.tree.rows)] if masks is not None else ()
    return history.scores(logits, [draw.path(row) for row in range(draw.tree.rows)], allowed)


def _walk(draw: Draw, found: Ints, width: int) -> Walk:
    """Make a walk from a download. found: visited rows, emitted tokens and their number, side by side"""
    length = int(found[-1])
    path = (found[:length] - draw.wanted).tolist()
    parents = draw.tree.parents.tolist()
    ranks = (parents[:row].count(parents[row]) for row in path[1:])
    walked = Walk(tuple(path), tuple(found[width : width + length].tolist()), tuple(ranks))
    return before_unusable(walked, draw.base)
