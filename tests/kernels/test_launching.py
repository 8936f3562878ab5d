"""Kernels are launched on the device of their tensors, whichever thread launches them and whatever its current one."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tree_layers.launching import device_fault, launching_on, on_its_device

from drafter_service.runner import DraftRunner
from verifier_service.models import load_target
from verifier_service.runner import StepRunner
from verifier_service.shards import AcceptedSlots

pytest.importorskip("triton", reason="triton is not installed")
from verifier_service.device import DeviceRunner

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch):
    """The devices that are current, one inside the other, without a GPU."""
    devices = []

    @contextmanager
    def device(made):
        devices.append(made)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return devices


def test_a_gpu_is_current_inside_and_a_cpu_changes_nothing(current):
    with launching_on(SECOND):
        assert current == [SECOND]
        with launching_on(torch.device("cpu")):
            assert current == [SECOND]
    assert not current


def test_a_method_runs_on_its_objects_device_also_when_it_fails(current):
    class Owner:
        device = SECOND

        @on_its_device
        def add(self, one, *, two):
            assert current == [SECOND]
            return one + two

    assert Owner().add(1, two=2) == 3
    with pytest.raises(TypeError):
        Owner().add(1, two="2")


@pytest.mark.parametrize("error", [None, "CUDA error: an illegal memory access was encountered\nCUDA kernel errors"])
def test_a_device_whose_stream_cannot_be_waited_for_is_lost(monkeypatch, error):
    """Out of memory is no fault of a device: its stream can be waited for afterwards."""

    def synchronize():
        if error is not None:
            raise torch.AcceleratorError(error)

    streams = {SECOND: SimpleNamespace(synchronize=synchronize)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    assert device_fault(torch.device("cpu")) == ""
    lost = "cuda:1 is lost: CUDA error: an illegal memory access was encountered"
    assert device_fault(SECOND) == ("" if error is None else lost)


class Reached(Exception):
    pass


class Parts:
    """Any attribute, call or item of it raises the devices that are current then."""

    def __init__(self, current):
        self._current = current

    def _reached(self, *_):
        raise Reached(list(self._current))

    __call__ = __getitem__ = __getattr__ = _reached


ROW = np.ones(1, np.int64)
STEPS = [
    (StepRunner.run, "_begin", [SimpleNamespace(draws=())]),
    (StepRunner.forward, "_begin", [None]),
    (StepRunner.keep, "pages", [AcceptedSlots(ROW, ROW, ROW, ROW)]),
    (DeviceRunner.run, "masks", [SimpleNamespace(draws=())]),
    (DeviceRunner.warm_up, "_warm", []),
    (DraftRunner.run, "_compiled", [SimpleNamespace(rows=(), sessions=[1])]),
    (DraftRunner.fold, "memory", [()]),
    (DraftRunner.fold, "_recorded_folds", [()]),
    (DraftRunner.scores_are_finite, "memory", []),
]


@pytest.mark.parametrize("method, first, given", STEPS, ids=[method.__qualname__ for method, *_ in STEPS])
def test_every_step_of_a_verifier_and_a_drafter_runs_on_its_device(current, method, first, given):
    runner = SimpleNamespace(device=SECOND, crew=None, _graphs=None, buckets=(8,), model=SimpleNamespace(vocabulary=8))
    runner._logits = runner._fused = runner._trees = None  # read before the rows are sent, and after their forward
    runner._recorded_folds, runner._fold = None, lambda folds: DraftRunner._fold(runner, folds)
    runner.ids, runner.vocabulary, runner._run = None, 8, lambda plan: DraftRunner._run(runner, plan)
    setattr(runner, first, Parts(current))
    with pytest.raises(Reached) as reached:
        method(runner, *given)
    assert reached.value.args == ([SECOND],)


def test_a_target_is_loaded_on_its_device(current, monkeypatch):
    monkeypatch.setattr("verifier_service.models._load", Parts(current))
    with pytest.raises(Reached) as reached:
        load_target("nowhere", torch.float32, SECOND, (8,))
    assert reached.value.args == ([SECOND],)
