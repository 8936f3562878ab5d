"""Graphs of steps on an accelerator: recorded once, then replayed, all in one pool of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


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


class CudaGraphs:
    """CUDA graphs. They share one pool, so the largest should be recorded first: later ones reuse its memory.

    Other threads of the process may allocate and launch meanwhile: a thread-local recording fails only through calls of
    its own thread. (In the default, global, mode any thread's cudaMalloc breaks it.)
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Result]) -> tuple[RecordedStep, Result]:
        current = torch.cuda.current_stream()
        beside = torch.cuda.Stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):  # the first run compiles kernels, and libraries choose theirs
            step()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            # A recording that fails leaves its own stream current: the outer context restores ours.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                result = step()
        except RuntimeError:
            self._pool = torch.cuda.graph_pool_handle()  # torch treats the old one as still being recorded to
            raise
        return graph, result
