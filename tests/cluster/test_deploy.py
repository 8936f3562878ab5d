"""Ray itself as a cluster's start uses it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from dendro.errors import EngineFailed

from cluster import deploy
from cluster.config import Redis, demo_config
from cluster.running import running_cluster
from tests.support.toy_cluster import LOADERS, toy_config


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Ray's own process objects
def test_a_ray_that_does_not_start_is_one_sentence_and_leaves_no_process(monkeypatch):
    from ray._private import node

    started = node.Node.start_head_processes

    def slow(self):
        started(self)
        raise Exception("The current node timed out during startup.")  # as Ray raises it on a busy machine

    monkeypatch.setattr(node.Node, "start_head_processes", slow)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineFailed, match="ray: did not start: The current node timed out during startup"):
        deploy.start(toy_config(), "redis://127.0.0.1:1", **LOADERS)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    gc.collect()


async def test_a_sigterm_while_ray_starts_ends_no_process(monkeypatch):
    """Ray sets a handler beneath Python's, which ends the process, long before the cluster runs."""
    noted, beneath = asyncio.Event(), ctypes.CDLL(None)

    def start(*given: object) -> str:
        beneath.signal(signal.SIGTERM, 0)  # the system's own action, which ends a process
        until = time.monotonic() + 60
        while not caught_below_python() and time.monotonic() < until:
            time.sleep(0.01)
        if caught_below_python():
            os.kill(os.getpid(), signal.SIGTERM)
        return "address"

    monkeypatch.setattr(deploy, "start", start)
    monkeypatch.setattr(deploy, "stop", lambda: None)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, noted.set)
    try:
        async with running_cluster(demo_config().model_copy(update={"redis": Redis(url="redis://none")}), "auto"):
            await asyncio.wait_for(noted.wait(), 60)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def caught_below_python() -> bool:
    """Whether the kernel calls a function of this process at a SIGTERM."""
    caught = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
