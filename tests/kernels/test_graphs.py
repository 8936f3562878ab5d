"""CudaGraphs, with a fake torch.cuda that records its calls, and the recordings of steps: there is no device here."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass

import pytest
import torch
from tree_layers.graphs import CudaGraphs, Recordings

from tests.support.recordings import RunAgain


class Cuda:
    """The parts of torch.cuda that a recording uses. As in torch, a recording that fails does not restore the stream,
    and its pool can be used for no other recording."""

    def __init__(self, failing):
        self.current, self.pools, self.failing, self.modes, self.spoilt = "main", 0, failing, [], set()
        self.streams = 0

    def new_stream(self):
        self.streams += 1
        return FakeCudaStream(f"stream {self.streams}")

    def current_stream(self):
        return FakeCudaStream(self.current)

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        if pool in self.spoilt:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.modes.append(capture_error_mode)
        before, self.current = self.current, f"recording on {stream.name}"
        yield
        if self.failing:
            self.failing -= 1
            self.spoilt.add(pool)
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


class FakeCudaStream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        pass


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda(failing=1)
    for name in ("current_stream", "graph_pool_handle", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    return fake


def test_a_recording_that_fails_leaves_the_device_as_it_was_and_the_next_one_works(cuda):
    graphs, ran = CudaGraphs(), []
    with pytest.raises(RuntimeError, match="during capture"):
        graphs.record(lambda: ran.append(cuda.current))
    assert cuda.current == "main"
    _, result = graphs.record(lambda: ran.append(cuda.current) or 7)
    assert result == 7 and cuda.current == "main"
    assert ran == ["stream 1", "recording on stream 1"] * 2  # each step runs once before it is recorded


def test_other_threads_may_allocate_while_a_step_is_recorded(cuda):
    cuda.failing = 0
    CudaGraphs().record(lambda: None)
    assert cuda.modes == ["thread_local"]


def test_graphs_of_one_process_are_recorded_one_after_another_each_on_a_stream_of_its_own(cuda):
    """The second recording begins while the first step runs, and waits."""
    cuda.failing, ran = 0, []
    second = threading.Thread(target=lambda: CudaGraphs().record(lambda: ran.append(cuda.current)))

    def step():
        if not ran:
            second.start()
        second.join(0.1)  # time enough for the second if nothing holds it back
        ran.append(cuda.current)

    CudaGraphs().record(step)
    second.join()
    assert ran == ["stream 1", "recording on stream 1", "stream 2", "recording on stream 2"]


@dataclass(frozen=True)
class StepOfRows:
    rows: int


def test_a_size_is_recorded_once_and_replayed_with_the_inputs_of_each_step():
    graphs, given = RunAgain(), torch.zeros(2)
    recordings = Recordings(graphs, "steps", logging.getLogger("test"))
    for value in range(3):
        given.fill_(value)
        assert recordings.run(StepOfRows(2), lambda: given * 2).tolist() == [2 * value] * 2
    assert (graphs.recordings, graphs.replays) == (1, 3) and list(recordings.made) == [StepOfRows(2)]


def test_a_disturbed_recording_is_tried_again_and_a_size_that_fails_twice_runs_without_one(caplog):
    graphs = RunAgain(fails={0, 2, 3})
    recordings = Recordings(graphs, "steps", logging.getLogger("test"))
    for rows in (2, 3, 3):
        assert recordings.run(StepOfRows(rows), lambda rows=rows: torch.ones(rows)).tolist() == [1.0] * rows
    assert graphs.attempts == 4 and recordings.failures == {StepOfRows(2): 1, StepOfRows(3): 2}
    assert [*recordings.made] == [StepOfRows(2)] and caplog.text.count("steps of 3 rows run without a graph") == 1
