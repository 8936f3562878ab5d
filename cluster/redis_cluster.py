"""A client of a Redis Cluster, for commands and transactions of one key each."""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio
import redis.exceptions
from dendro.tasks import BackgroundTasks
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection


class RedisClusterClient(redis.asyncio.RedisCluster):
    """redis-py's client, whose transactions go through plain clients of the nodes: its own sends a transaction again
    over a new connection, where no key is watched."""

    def __init__(self, nodes: tuple[tuple[str, int], ...], tls: bool, options: dict[str, Any]) -> None:
        found = [ClusterNode(*each) for each in nodes]
        # redis-py closes all connections after five redirections by default, which a key whose slot moves can cause.
        super().__init__(startup_nodes=found, ssl=tls, reinitialize_steps=0, **options)
        self._options = options | ({"connection_class": SSLConnection} if tls else {})
        self._nodes: dict[tuple[str, int], redis.asyncio.Redis] = {}
        self._background = BackgroundTasks(expected=Exception)
        self._learning: asyncio.Task[None] | None = None

    async def node_of(self, key: str) -> redis.asyncio.Redis:
        """A client of the node that has the key now. Raises one of redis-py's errors where none has it."""
        await self.initialize()
        node = self.get_node_from_key(key)
        if node is None:
            raise redis.exceptions.ClusterError(f"no node has the slot {self.keyslot(key)}")
        where = node.host, int(node.port)
        if where not in self._nodes:
            pool = redis.asyncio.ConnectionPool(host=where[0], port=where[1], **self._options)
            self._nodes[where] = redis.asyncio.Redis(connection_pool=pool)
        return self._nodes[where]

    async def learn_nodes(self) -> None:
        """Ask the cluster anew which node has which key."""
        await self.nodes_manager.initialize()

    async def drop_idle(self) -> None:
        """Close idle connections and, in the background, ask for the nodes again. Called when a node did not answer in
        time: a replica may have become the primary. No call waits, since the silent node may be asked first."""
        if self._learning is None or self._learning.done():
            self._learning = self._background.start(self.learn_nodes())
        for node in self.get_nodes():
            await node.disconnect_free_connections()
        for client in self._nodes.values():
            await client.connection_pool.disconnect(inuse_connections=False)

    async def aclose(self) -> None:
        """Also called by redis-py after a fault, whereupon its next command asks for the nodes anew."""
        self._background.cancel()
        nodes, self._nodes = self._nodes, {}
        for client in nodes.values():
            await client.connection_pool.disconnect(inuse_connections=False)
        await super().aclose()
