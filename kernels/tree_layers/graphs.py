"""Graphs of steps on an accelerator: recorded once, then replayed, all in one pool of memory."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

Result = TypeVar("Result")

ATTEMPTS = 2
"""Attempts to record a shape: another thread may disturb the first one."""


class RecordedStep(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Called instead of the step. Runs it again on the current contents of the same addresses."""
        ...


class Graphs(Protocol):
    """Records steps."""

    def record(self, step: Callable[[], Result]) -> tuple[RecordedStep, Result]:
        """Called once per shape of step. Runs the step once without recording, then records it. Returns the recording
        and the tensors that each replay writes.

        Raises RuntimeError if the step cannot be recorded; the device is then unchanged.
        """
        ...


class StepSize(Protocol):
    """The padded sizes of a step. Hashable: steps of equal sizes share a recording."""

    @property
    def rows(self) -> int:
        """Called for the log. Returns the number of padded rows."""
        ...


Size = TypeVar("Size", bound=StepSize)


class Recordings(Generic[Size, Result]):
    """The recordings of one kind of step, one for each size, made when a size first occurs.

    After ATTEMPTS failures a size is never recorded again: its steps run without a graph. Other sizes are unaffected.
    """

    def __init__(self, graphs: Graphs, kind: str, log: logging.Logger) -> None:
        """kind: what the steps are called in the log, a plural"""
        self._graphs = graphs
        self._kind = kind
        self._log = log
        self.made: dict[Size, tuple[RecordedStep, Result]] = {}
        self.failures: Counter[Size] = Counter()

    def run(self, size: Size, step: Callable[[], Result]) -> Result:
        """Replay the recording of a size, made first if needed; run the step if it cannot be recorded. A step that is
        run twice on the same inputs must write the same to the same addresses."""
        made = self.made.get(size)
        if made is None and self.failures[size] < ATTEMPTS:
            self._record(size, step)
            made = self.made.get(size)
        if made is None:
            return step()
        recorded, result = made
        recorded.replay()
        return result

    def _record(self, size: Size, step: Callable[[], Result]) -> None:
        while self.failures[size] < ATTEMPTS:
            try:
                self.made[size] = self._graphs.record(step)
                return
            except RuntimeError as error:
                self.failures[size] += 1
                self._log.warning("%s of %d rows were not recorded: %s", self._kind, size.rows, error)
        self._log.warning("%s of %d rows run without a graph", self._kind, size.rows)


_recording = threading.Lock()
"""Held while a step is recorded: torch and the driver allow one recording at a time in a process, which may have the
engines of several models."""


class CudaGraphs:
    """CUDA graphs of one device. They share one pool, so the largest should be recorded first: later ones reuse its
    memory.

    Other threads of the process may allocate and launch meanwhile: a thread-local recording fails only through calls of
    its own thread. (In the default, global, mode any thread's cudaMalloc breaks it.)
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._beside: torch.cuda.Stream | None = None  # the stream of these recordings; torch's default is one for all

    def record(self, step: Callable[[], Result]) -> tuple[RecordedStep, Result]:
        with _recording:
            return self._record(step)

    def _record(self, step: Callable[[], Result]) -> tuple[RecordedStep, Result]:
        current = torch.cuda.current_stream()
        if self._beside is None:  # made here, where the runner's device is the current one
            self._beside = torch.cuda.Stream()
        beside = self._beside
        beside.wait_stream(current)
        with torch.cuda.stream(beside):  # the first run compiles kernels, and libraries choose theirs
            step()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            # A recording that fails leaves its own stream current: the outer context restores ours.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local"),
            ):
                result = step()
        except RuntimeError:
            self._pool = torch.cuda.graph_pool_handle()  # torch treats the old one as still being recorded to
            raise
        return graph, result
