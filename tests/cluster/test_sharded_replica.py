"""A sharded replica on Ray Serve: the tokens of its degree, also after a worker was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import psutil
import pytest
from dendro.answer import Round
from dendro.client import AsyncClient
from dendro.text import Sampling

from cluster.config import Config
from tests.support import tiny_models
from tests.support.deployed import use_deployed
from tests.support.routers import RoundByRound
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

PROMPT, COUNT = list(range(40, 75)), 300
LAW = Sampling(temperature=0.8, seed=7)


async def truth(folder) -> list[int]:
    engine = VerifierEngine.load(folder, VerifierOptions(name="tiny", tensor_parallel=2))
    await engine.start()
    try:
        return await RoundByRound(engine, PROMPT, LAW, COUNT).finish()
    finally:
        await engine.stop()


def worker_pids() -> list[int]:
    pids = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # just ended
            pids += [each.pid] * ("ray::Worker" in " ".join(each.cmdline()))
    return pids


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(600)  # two starts of Ray's processes and three of torch's, on two cores
def test_a_sharded_replica_on_serve_gives_the_tokens_of_its_degree_and_survives_a_killed_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    tiny_models.make_checkpoint(tmp_path)
    expected = asyncio.run(truth(tmp_path))
    share = {"cpu": 0.1}
    config = Config.model_validate(
        {
            "targets": {"tiny": {"checkpoint": tmp_path, "tensor_parallel": 2, "resources": share}},
            "router": {"resources": share},
        }
    )

    async def use(address: str) -> None:
        async with AsyncClient(address) as client:
            for victims in (0, 1):
                first, ids = worker_pids(), []
                assert len(first) == 1
                async for event in client.generate(
                    PROMPT, max_new_tokens=COUNT, temperature=LAW.temperature, seed=LAW.seed, ignore_end=True
                ):
                    if isinstance(event, Round):
                        ids += event.token_ids
                        if victims and len(ids) > 30:
                            os.kill(first[0], signal.SIGKILL)
                            victims = 0
                assert ids == expected
            assert worker_pids() and worker_pids() != first, "another replica, with its own worker"

    use_deployed(config, use)
    assert worker_pids() == []
