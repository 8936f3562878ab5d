"""Pools scale by the load that their replicas report."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from dendro.client import AsyncClient
from dendro.errors import BadRequest
from ray.serve.config import AutoscalingConfig

from cluster.app import build
from cluster.config import Config
from cluster.scaling import LOAD, by_answers, by_load, replicas_for
from cluster.serve_config import APPLICATION
from tests.support.deployed import no_process_left, use_deployed
from tests.support.fakes import plain, slow_verifier
from tests.support.toy_cluster import LOADERS, toy_config

SCALING = {"min_replicas": 1, "max_replicas": 3, "requests": 4, "up_after_s": 0.5, "down_after_s": 2}


def test_each_replica_carries_the_target():
    assert replicas_for([], 4.0) == 0.0
    assert replicas_for([3.0], 4.0) == 0.75
    assert replicas_for([8.0, 0.0, 4.0], 4.0) == 3.0


@pytest.mark.parametrize("reported", [None, {}, {"other": {"a": 9.0}}])
def test_a_pool_that_reports_nothing_needs_no_replica(reported):
    context: Any = SimpleNamespace(aggregated_metrics=reported, config=SimpleNamespace(target_ongoing_requests=4.0))
    assert by_load(context) == (0.0, {})


def test_serve_scales_routers_by_their_running_requests():
    router = build(toy_config(router={"autoscaling": SCALING}), "redis://nowhere", **LOADERS)._bound_deployment
    scaling: Any = router._deployment_config.autoscaling_config
    assert isinstance(scaling, AutoscalingConfig)
    policy = scaling.policy.get_policy()
    assert policy.__module__ == by_load.__module__ and policy.__name__ == by_load.__name__
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 4)
    context: Any = SimpleNamespace(aggregated_metrics={LOAD: {"a": 7.0, "b": 3.0}}, config=scaling)
    assert policy(context) == (2.5, {})


def test_serve_scales_verifiers_and_drafters_by_their_texts_which_are_more_than_leases():
    scaled = {"checkpoint": "none", "autoscaling": {"min_replicas": 0, "max_replicas": 3, "leases": 4}}
    router = build(toy_config(targets={"toy": scaled}, drafters={"helper": scaled}), "redis://nowhere", **LOADERS)
    _, _, targets, drafters, _ = router._bound_deployment.init_args
    for pool in (targets["toy"], drafters["helper"]):
        scaling: Any = pool._bound_deployment._deployment_config.autoscaling_config
        policy = scaling.policy.get_policy()
        assert policy.__name__ == by_answers.__name__
        context: Any = SimpleNamespace(
            aggregated_metrics={LOAD: {"a": 16.0, "b": 2.0}},
            config=scaling,
            total_num_requests=5,
            total_queued_requests=2,
        )
        assert policy(context) == (5.0, {}), "18 texts and two leases that wait"
        context.aggregated_metrics = {}
        assert policy(context) == (1.25, {}), "nothing is reported yet: five leases"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"replicas": 2, "autoscaling": SCALING}, "router.replicas"),
        ({"autoscaling": SCALING | {"min_replicas": 0}}, "router.autoscaling.min_replicas"),
        ({"autoscaling": SCALING | {"leases": 3}}, "router.autoscaling.leases"),
    ],
)
def test_an_error_names_its_field(tmp_path, section, message):
    with pytest.raises(BadRequest, match=message):
        Config.of({"targets": {"toy": {"checkpoint": "none"}}, "router": section}, tmp_path)


def routers() -> int:
    """Running routers, without those that drain."""
    from ray import serve

    return serve.status().applications[APPLICATION].deployments["router"].replica_states.get("RUNNING", 0)


async def until_routers(holds) -> None:
    async with asyncio.timeout(240):
        while not holds(await asyncio.to_thread(routers)):  # noqa: ASYNC110  # Serve sets no event
            await asyncio.sleep(0.5)


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(600)
def test_on_serve_routers_are_added_and_removed_by_their_requests_and_no_stream_fails(monkeypatch):
    """A removed router's streams outlast its drain: their clients resume them at the one that stays."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    config = toy_config(router={"resources": {"cpu": 0.1}, "autoscaling": SCALING, "drain_s": 0.5})

    async def use(address: str) -> None:
        async def stream(client: AsyncClient, first: int, count: int) -> None:
            done = await client.generate_text([first, 6, 7], max_new_tokens=count, speculation="off")
            assert list(done.token_ids) == plain([first, 6, 7], count)

        grown = asyncio.Event()

        async def load(first: int) -> None:
            async with AsyncClient(address) as client:  # a connection of its own, to a router of the kernel's choice
                while not grown.is_set():
                    await stream(client, first, 60)

        loads = asyncio.gather(*(load(first) for first in range(12)))
        await until_routers(lambda count: count >= 2)
        clients = [AsyncClient(address) for _ in range(3)]
        long = asyncio.gather(*(stream(client, at, 1500) for at, client in enumerate(clients)))
        grown.set()
        await loads
        await until_routers(lambda count: count == 1)
        assert not long.done(), "they ran while routers were removed"
        await long
        for client in clients:
            await client.close()

    with no_process_left():
        use_deployed(config, use, **LOADERS | {"verifier": slow_verifier})
