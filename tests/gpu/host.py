"""Times the host's part of a verifier's step and of a drafter's tree on a device's path, on any machine: from the
scheduler's plan to the answers. Replays of graphs do nothing, so neither their time nor their launch is in it. Times
are of the thread's processor time, in microseconds; calls are those of functions of Python and C.

TRITON_INTERPRET=1 python -m tests.gpu.host
"""

from __future__ import annotations

import argparse
import cProfile
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from dendro.calls import DraftCall, OpenCall, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.engine import Ticket
from dendro.shapes import DEFAULT_DEPTH, LevelShape
from dendro.text import Limits, Sampling, Tokens, Verdict
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE, near_window
from tree_layers.memory import pages_for
from tree_layers.states import SlotPool

from cluster.config import DEMO_MODELS
from cluster.measure.machine import processor_name
from drafter_service.engine import node_slots, text_slots
from drafter_service.models import load_model
from drafter_service.options import DrafterOptions
from drafter_service.plan import EMPTY_TEXT
from drafter_service.runner import DraftRunner
from drafter_service.scheduler import DraftScheduler
from tests.support import tiny_mamba, tiny_models
from verifier_service.device import DeviceRunner, Drawn
from verifier_service.models import LoadedTarget, load_target
from verifier_service.models.device_pages import device_layouts
from verifier_service.recurrent import Arrangement
from verifier_service.requests import Capacity, PendingCall
from verifier_service.rows import StepOutcome
from verifier_service.runner import buckets_up_to
from verifier_service.scheduler import StepScheduler
from verifier_service.shards import Bounds

CPU = torch.device("cpu")
ROWS = 32
"""Of each text's tree, four children to a row."""
TREE_PARENTS = [-1, *(row // 4 for row in range(ROWS - 1))]
ACCEPTED = (0, 1, 5)
"""Rows on the path of each verdict."""
STEP_US = 7000
"""The time of a step that the scheduler learns from."""
SHAPES = ((4,), (4, 4), (1, 1, 1, 1))


class Spent:
    """Microseconds of rounds, whole or by phases. Reading a thread's time takes several microseconds on some machines,
    so the time of a whole round is that of rounds whose phases are not timed."""

    def __init__(self) -> None:
        self.rounds = list[dict[str, float]]()
        self.phases = False  # whether the phases of a round are timed
        self.counted: AbstractContextManager[object] = nullcontext()  # entered for the timed part of each round
        self._inside = list[float]()  # time of the phases within each phase that is running

    @contextmanager
    def round(self) -> Iterator[None]:
        self.rounds.append(defaultdict(float))
        with self._timed("other"), self.counted:
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = time.thread_time() - began
            own = took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took
            if self.rounds:
                self.rounds[-1][name] += 1e6 * own

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the time of a method as the phase `name`."""
        call = getattr(owner, method)

        def watched(*args: Any, **named: Any) -> Any:
            if not self.phases:
                return call(*args, **named)
            with self._timed(name):
                return call(*args, **named)

        setattr(owner, method, watched)

    def found(self, times: int) -> dict[str, Any]:
        """Of the last rounds: `times` whole ones, and after them `times` by phases."""
        whole = [each["other"] for each in self.rounds[-2 * times : -times]]
        low, *_, high = quantiles(whole, n=10)
        split = {name: round(median(each[name] for each in self.rounds[-times:]), 1) for name in self.rounds[-1]}
        return {"us": round(median(whole), 1), "tenth": round(low, 1), "nine_tenths": round(high, 1), "split": split}


class NoReplay:
    """A recording whose replay does nothing."""

    def replay(self) -> None:
        pass


class Once:
    """Records by running a step once: its results stay."""

    def record(self, step: Callable[[], Any]) -> tuple[NoReplay, Any]:
        return NoReplay(), step()


class VerifierHost:
    """A scheduler and a runner whose steps accept the rows ACCEPTED of each tree."""

    def __init__(self, target: LoadedTarget, texts: int, length: int) -> None:
        depth, rows = DEFAULT_DEPTH, max(256, ROWS * texts)
        buckets = buckets_up_to(rows)
        near, longest = near_window(depth), length + 1000
        arrangement = Arrangement.of(texts, near, depth, buckets[-1])
        pages = texts * pages_for(longest + depth)
        self.capacity = Capacity(
            vocabulary=target.vocabulary,
            max_length=longest,
            max_rows=ROWS,
            max_depth=depth,
            max_sessions=texts,
            max_waiting=0,
            step_rows=buckets[-1],
            sizes=buckets,
            prefill_rows=buckets[-1] // 4,
            pages=pages,
            share_prefixes=True,
            first_scratch=(1 + pages + pages_for(longest)) * PAGE,
            end_ids=frozenset(),
            recurrent=arrangement if target.mixers else None,
        )
        bounds = Bounds(near, pages, pages_for(longest), texts, depth, arrangement)
        self.runner = DeviceRunner(target, bounds, buckets, graphs=Once())
        self.scheduler = StepScheduler(self.capacity)
        self.texts = [
            (new_opening(), Tokens((7 * at * at + at + number) % 90 for at in range(length))) for number in range(texts)
        ]
        self.known = length  # tokens of each text that the scheduler has
        self._open()
        self.scheduler.costs.learn(buckets[0], STEP_US - 100)
        self.spent = Spent()
        setattr(self.runner, "_step", self._drawn)  # noqa: B010
        self.spent.watch(sys.modules["verifier_service.scheduler"], "packed", "plan")
        self.spent.watch(self.runner, "_upload", "arrays")
        self.spent.watch(self.runner, "_replayed", "replay")
        self.spent.watch(self.scheduler, "next", "schedule")
        self.spent.watch(self.scheduler, "apply", "verdicts")
        self.spent.watch(self.runner, "run", "walks")

    def _open(self) -> None:
        for number, (opening, text) in enumerate(self.texts):
            law = Sampling(temperature=1.0, seed=number)
            given = RequestParameters(law, Limits(self.capacity.max_length, ignore_end=True), "", ())
            self.scheduler.submit(PendingCall(OpenCall(TextUpdate.of(opening, text, 0), given), Ticket(0.0)))
        while self.scheduler.next() is not None:  # as if these rows had run
            self.scheduler.apply(StepOutcome((), STEP_US, STEP_US))

    def _drawn(self, shape: Any, inputs: Any) -> Any:
        """The results of each replay: ACCEPTED of each tree."""
        paths = torch.zeros(len(self.texts), self.capacity.max_depth + 1, dtype=torch.int64)
        emitted, lengths = paths.clone(), torch.full((len(self.texts), 1), len(ACCEPTED))
        for number in range(len(self.texts)):
            paths[number, : len(ACCEPTED)] = ROWS * number + torch.tensor(ACCEPTED)
            emitted[number, : len(ACCEPTED)] = torch.tensor([*(49 + row for row in ACCEPTED[1:]), 7])
        return Drawn(torch.cat([paths, emitted, lengths], 1))

    def round(self) -> None:
        calls = []
        for opening, text in self.texts:
            tree = DraftTree.of([text.ids[-1], *range(50, 49 + ROWS)], TREE_PARENTS, -0.05 * np.arange(ROWS))
            update = TextUpdate.of(opening, text, self.known)
            calls.append(PendingCall(VerifyCall(update, tree), Ticket(time.monotonic())))
        self.known = len(update.tokens) + self.known
        with self.spent.round():
            for call in calls:
                self.scheduler.submit(call)
            plan = self.scheduler.next()
            assert plan is not None and len(plan.tokens) == ROWS * len(self.texts)
            outcome = self.runner.run(plan)
            self.scheduler.apply(replace(outcome, run_us=STEP_US))
        for (_, text), call in zip(self.texts, calls, strict=True):
            assert isinstance(call.ticket.value, Verdict) and call.ticket.value.path == ACCEPTED, call.ticket.value
            text.extend(call.ticket.value.tokens)


class DrafterHost:
    """A scheduler and a runner whose trees are all the first one of their shape."""

    def __init__(self, model: Any, length: int) -> None:
        options = DrafterOptions(name="d")
        slots = text_slots(4), node_slots(options.max_rows, options.max_depth)
        self.runner = DraftRunner(model, *slots, CPU, graphs=Once())
        empty = self.runner.memory.save(EMPTY_TEXT, 0)
        for slot in range(1, slots[0]):  # folds are not replayed, and a slot that nothing wrote may hold anything
            self.runner.memory.load(slot, empty)
        texts, nodes = map(SlotPool, slots)
        self.scheduler = DraftScheduler(
            "d", texts, nodes, 4, options.prefill_chunk, one_forward=self.runner.one_forward
        )
        self.text, self.opening = Tokens(3 + at % 200 for at in range(length)), new_opening()
        law = Sampling(temperature=1.0, seed=1)
        parameters = RequestParameters(law, Limits(10**6, ignore_end=True), "", ())
        call = OpenCall(TextUpdate.of(self.opening, self.text, 0), parameters)
        session = self.scheduler.open(Ticket(0.0), call, 0, model.vocabulary)
        self.runner.admit(session.number, law, model.vocabulary)
        self.known, self.spent = length, Spent()
        self._run()
        self.spent.watch(self.scheduler, "draft", "call")
        self.spent.watch(self.scheduler, "next", "schedule")
        self.spent.watch(self.scheduler, "apply", "growth")
        self.spent.watch(self.runner, "fold", "folds")
        self.spent.watch(self.runner, "run", "arrays")

    def _run(self) -> None:
        """Run forwards until a call is answered."""
        while not self.scheduler.answers and (step := self.scheduler.next()).plan is not None:
            if step.folds:
                self.runner.fold(step.folds, step.plan)
            self.scheduler.apply(self.runner.run(step.plan))

    def round(self, widths: tuple[int, ...]) -> None:
        """A tree, of which the text goes through two guesses."""
        self.scheduler.answers.clear()
        call = DraftCall(TextUpdate.of(self.opening, self.text, self.known), LevelShape(widths))
        self.known = len(self.text)
        with self.spent.round():
            self.scheduler.draft(Ticket(time.monotonic()), call)
            self._run()
        self.scheduler.calibrations.learn()  # as an engine does after its answers
        ((_, tree),) = self.scheduler.answers
        assert isinstance(tree, DraftTree)
        path = [int(tree.tokens[1])]
        if len(widths) > 1:
            path.append(int(tree.tokens[tree.children(1)[0]]))
        self.text.extend([*path[:2], 7])


def targets(folder: Path) -> Iterator[tuple[str, LoadedTarget]]:
    """Small targets whose steps have the arrays of large ones: groups of four heads, blocks of 16 tokens."""
    small = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    made = {"llama": lambda at: tiny_models.make_checkpoint(at, "llama", **small, max_position_embeddings=16384)}
    made["mamba2"] = lambda at: tiny_mamba.make_checkpoint(at, "mamba2")
    for name, make in made.items():
        (folder / name).mkdir()
        make(folder / name)
        loaded = load_target(folder / name, torch.bfloat16, CPU, (8,))
        yield name, replace(loaded, layouts=device_layouts(loaded.run.probed)) if loaded.layouts else loaded


def times_of(round: Callable[[], None], spent: Spent, times: int) -> dict[str, Any]:
    for spent.phases, count in ((False, WARM_UPS + times), (True, times)):
        for _ in range(count):
            round()
    found = spent.found(times)
    spent.rounds.clear()
    spent.phases, spent.counted = False, (profile := cProfile.Profile())
    round()
    spent.counted = nullcontext()
    return found | {"calls": sum(each.callcount for each in profile.getstats())}


def main(times: int, length: int) -> None:
    print(processor_name())
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name, target in targets(Path(folder)):
            for texts in TEXTS:
                host = VerifierHost(target, texts, length)
                print(
                    f"step of {texts} texts of {ROWS} rows, {name}", times_of(host.round, host.spent, times), flush=True
                )
    with torch.inference_mode():
        for name in ("mamba2", "mamba"):
            model, _ = load_model(DEMO_MODELS / name, torch.float32, CPU, None, "eager")
            for widths in SHAPES:
                drafter = DrafterHost(model, 200)
                found = times_of(partial(drafter.round, widths), drafter.spent, times)
                print(f"tree {widths}, {name}", found, flush=True)


WARM_UPS = 3
TEXTS = (1, 8, 32)
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--times", type=int, default=100)
parser.add_argument("--length", type=int, default=4096, help="tokens before a verifier's step")
if __name__ == "__main__":
    given = parser.parse_args()
    torch.set_num_threads(1)
    main(given.times, given.length)
