"""Engines on a CPU with the forms that they have on a GPU: kernels in Triton's interpreter, steps as if recorded."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from tests.support.device_forms import load_as_on_a_gpu
from tests.support.opened_drafters import wait_for_openings
from tests.support.recordings import RunAgain

LEAST_ROWS = 8
"""Steps are padded to so many rows, or else to the largest number: the check of rows runs a step of each."""
CHECKED_ROWS = 16
LONGEST_S = 600.0
"""Limit of a draft, of a step and of a round."""


@dataclass
class Made:
    """What recorded the steps of targets, and the levels and trees of drafters."""

    of_targets: list[RunAgain] = field(default_factory=list)
    of_drafters: list[RunAgain] = field(default_factory=list)

    def recordings(self):
        made = {"steps": self.of_targets, "levels": self.of_drafters}
        return {what: sum(each.recordings for each in graphs) for what, graphs in made.items()}


def serve_as_on_a_gpu(monkeypatch):
    """Make targets and drafters that are loaded later run as on a GPU. Returns what records their steps and levels.
    Drafters must have the form `eager`."""
    from tree_kernels.rows_product import triton as products
    from triton.runtime.interpreter import interpreter_builder

    from drafter_service.runner import DraftRunner
    from verifier_service.device import DeviceRunner
    from verifier_service.models.mixers import run_from_tables
    from verifier_service.runner import StepRunner

    made = Made()
    look_once(monkeypatch)
    launch_one_at_a_time(monkeypatch)
    # Each sum of integers is otherwise made twice, to compare the two.
    unchecked = replace(interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter_builder, "options", unchecked)

    def load(path, dtype, device, buckets, threads=1, group=None, tokenizer=None):
        return load_as_on_a_gpu(path, buckets, monkeypatch, dtype)

    def verifier(target, *given):
        if not run_from_tables(target.mixers):
            return StepRunner(target, *given)
        made.of_targets.append(RunAgain())
        return DeviceRunner(target, *given, graphs=made.of_targets[-1])

    def drafter(*given):
        made.of_drafters.append(RunAgain())
        return DraftRunner(*given, graphs=made.of_drafters[-1])

    monkeypatch.setattr("verifier_service.engine.load_target", load)
    monkeypatch.setattr("verifier_service.engine.runner_for", verifier)
    monkeypatch.setattr("verifier_service.engine.with_few_rows", lambda buckets: buckets)
    monkeypatch.setattr("verifier_service.engine.buckets_up_to", lambda step_rows: (LEAST_ROWS, step_rows))
    monkeypatch.setattr("verifier_service.runner.CHECKED_ROWS", CHECKED_ROWS)
    monkeypatch.setattr(DeviceRunner, "warm_up", lambda self: None)  # each shape is recorded when it first occurs
    monkeypatch.setattr("drafter_service.engine.DraftRunner", drafter)
    monkeypatch.setattr(products, "FEW_PROGRAMS", 1)  # the interpreter runs them one after another
    return made


def wait_for_interpreted_engines(monkeypatch):
    """Make rounds wait for drafts and verdicts as long as the interpreter takes. Otherwise drafts would be late, and
    peers would be taken for hung."""
    from cluster.peers import drafter, opening, verifier

    limit = verifier.CallLimit
    wait_for_openings(monkeypatch)
    monkeypatch.setattr(opening.Pace, "deadline_s", lambda *_: LONGEST_S)
    monkeypatch.setattr(drafter, "FROZEN_S", LONGEST_S)
    monkeypatch.setattr(verifier, "CallLimit", lambda step_s: limit(LONGEST_S))


def look_once(monkeypatch):
    """Make the interpreter look for functions to replace once. At each call of a function inside a kernel, such as
    `tl.sum`, it otherwise looks through the whole language, which triples a kernel's time."""
    import triton.language as tl
    from triton.runtime import interpreter

    parts = {}  # key: a function; the parts of the language that it names

    def call(self, *args, **named):
        if self.fn not in parts:
            names = self.fn.__globals__.values()
            parts[self.fn] = [part for part in (tl, tl.core) if any(part is each for each in names)]
        if any(tl.core.is_builtin(part.load) for part in parts[self.fn]):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def launch_one_at_a_time(monkeypatch):
    """Make launches of several threads run one after another. The interpreter replaces functions of the language for
    the time of a launch, and has one place for the number of the program that runs."""
    from triton.runtime.interpreter import GridExecutor

    library, lock = GridExecutor.__call__, threading.RLock()

    def launch(self, *given, **named):
        with lock:
            return library(self, *given, **named)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
