"""Ray nodes with simulated accelerators: pools are placed by resources, grow, shrink and survive the loss of a node."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import psutil
import pytest
from dendro.answer import Round
from dendro.client import AsyncClient

from cluster import deploy
from cluster.redis_server import RedisServer
from cluster.serve_config import APPLICATION, ENVIRONMENT
from tests.support.fakes import plain, slow_verifier
from tests.support.toy_cluster import LOADERS, toy_config

SCALING = {"min_replicas": 1, "max_replicas": 2, "leases": 2, "up_after_s": 0.5, "down_after_s": 2}


def pool(name, **more):
    return {
        "checkpoint": "none",
        "resources": {"cpu": 0.1, "gpu": 1, "custom": {name: 1}},
        "max_sessions": 64,
        "autoscaling": SCALING,
        **more,
    }


def config():
    return toy_config(
        targets={"toy": pool("verifier")},
        drafters={"helper": pool("drafter")},
        router={"resources": {"cpu": 0.1, "custom": {"router": 1}}},
    )


def replicas():
    """Running replicas of each deployment."""
    from ray import serve

    deployed = serve.status().applications[APPLICATION].deployments
    return {name: each.replica_states.get("RUNNING", 0) for name, each in deployed.items()}


def nodes_of_actors():
    """Custom resources of the nodes of each deployment's replicas."""
    import ray
    from ray.util.state import list_actors

    node_resources = {node["NodeID"]: set(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    found: dict[str, set[str]] = {}
    for actor in list_actors(filters=[("state", "=", "ALIVE")]):
        for name in ("router", "verifier-toy", "drafter-helper"):
            if f":{name}" in actor.class_name or actor.class_name.endswith(name):
                found.setdefault(name, set()).update(node_resources[actor.node_id] & {"router", "verifier", "drafter"})
    return found


async def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (found := await asyncio.to_thread(condition)):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.3)
    return found


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(900)  # five nodes of Ray on two cores
def test_pools_are_placed_by_resources_grow_shrink_and_survive_the_loss_of_a_node(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})

    def both(count):
        return lambda: (
            {name: each for name, each in replicas().items() if each >= count}.keys()
            >= {
                "verifier-toy",
                "drafter-helper",
            }
        )

    async def use(address, verifiers):
        async with AsyncClient(address) as client:
            placed = await asyncio.to_thread(nodes_of_actors)
            assert placed == {"router": {"router"}, "verifier-toy": {"verifier"}, "drafter-helper": {"drafter"}}

            async def stream(first, count):
                ids = []
                async for event in client.generate([first, 6, 7], max_new_tokens=count, speculation="(1,1,1)"):
                    if isinstance(event, Round):
                        ids += event.token_ids
                assert ids == plain([first, 6, 7], count)

            scaled = asyncio.Event()

            async def load(first):  # a new replica may take longer to start than any one request
                while not scaled.is_set():
                    await stream(first, 1200)

            # Scale up: eight requests, at two leases per replica.
            loads = asyncio.gather(*(load(first) for first in range(1, 9)))
            await until(both(2), 240)
            scaled.set()
            # Scale down: one stream continues while replicas are removed.
            long = asyncio.create_task(stream(0, 1900))
            await loads
            await until(lambda: max(replicas()[name] for name in ("verifier-toy", "drafter-helper")) == 1, 240)
            await long

            # Kill a node under a running stream.
            running = asyncio.create_task(stream(9, 1500))
            await asyncio.sleep(1.0)
            busy = [node for node in verifiers if _has_replica(node)]
            assert len(busy) == 1
            await asyncio.to_thread(cluster.remove_node, busy[0], False)
            await running

    def _has_replica(node):
        from ray.util.state import list_actors

        alive = list_actors(filters=[("state", "=", "ALIVE"), ("node_id", "=", node.node_id)])
        return any("verifier-toy" in actor.class_name for actor in alive)

    try:
        cluster.add_node(num_cpus=1, resources={"router": 1})
        verifiers = [cluster.add_node(num_cpus=1, num_gpus=1, resources={"verifier": 1}) for _ in range(2)]
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=1, resources={"drafter": 1})
        with RedisServer() as server:
            address = deploy.start(config(), server.url, cluster.address, **LOADERS | {"verifier": slow_verifier})
            try:
                asyncio.run(use(address, verifiers))
            finally:
                deploy.stop()
    finally:
        cluster.shutdown()
    _, left = psutil.wait_procs([each for each in psutil.Process().children(recursive=True) if each not in before], 60)
    assert left == []
