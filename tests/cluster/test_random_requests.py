"""Random requests to a cluster on Ray Serve, with real engines: speculation changes nothing that a client sees."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import grpc.aio
import pytest
from dendro.client import CHANNEL_OPTIONS
from dendro.options import Options
from dendro.text import Finish

from cluster.running import running_cluster
from tests.random_requests import OTHER, WAYS, Cases, remote, settings

CASES = 100
AT_ONCE = 4


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(900)  # starting Ray and the engines alone may take more than 100 s
async def test_on_a_cluster_answers_to_random_requests_are_those_without_speculation(tmp_path: Path, monkeypatch):
    """Tokens, text, ending and log-probabilities, bit for bit, also of answers that are resumed, and of turns that are
    repeated; four cases at a time, so that texts share steps."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(cases: Cases, number: int) -> None:
        async with slots:
            await cases.run(number)

    async with (
        running_cluster(settings(tmp_path)) as address,
        grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel,
    ):
        cases = Cases(remote(channel), (*WAYS, *OTHER))
        await asyncio.gather(*(one(cases, number) for number in range(CASES)))
    assert not cases.differences
    offered = set(Options.__annotations__) - {"model", "mode", "lenience", "speculation", "request_id", "session"}
    unused = offered - set(cases.used) - {"keep_session"}
    assert unused <= ({"structure"} if "structure" not in cases.used else set())
    assert cases.refusals.total() <= CASES // 20, cases.refusals
    assert {Finish.LENGTH, Finish.STOP_STRING, Finish.STOP_TOKEN} <= set(cases.ends)
