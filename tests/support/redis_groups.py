"""Groups of real redis-server processes: a primary with a replica and Sentinels, and a cluster."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from cluster.redis_server import find_redis_server

SERVICE = "sessions"
PASSWORD = "wombat"
START_S = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that are free, as are those of a cluster's bus, 10000 above."""
    with ExitStack() as held:
        found: list[int] = []
        for port in random.sample(range(20_000, 30_000), 2000):
            if len(found) == count:
                break
            sockets = [held.enter_context(socket.socket()) for _ in range(2)]
            with contextlib.suppress(OSError):
                for each, where in zip(sockets, (port, port + 10_000), strict=True):
                    each.bind(("127.0.0.1", where))
                found.append(port)
        return found


def until(holds, what: str) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            if holds():
                return
        except redis.RedisError:
            pass
        time.sleep(0.05)
    raise TimeoutError(what)


class Node:
    """A process, and a client of it."""

    def __init__(self, folder: Path, port: int, lines: list[str], sentinel: bool = False) -> None:
        folder = folder / str(port)
        folder.mkdir()
        common = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", "protected-mode no"]
        (folder / "conf").write_text("\n".join([*common, *lines]) + "\n")
        words = [str(find_redis_server()), str(folder / "conf"), *(["--sentinel"] if sentinel else [])]
        self.port = port
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = redis.Redis(port=port, password=None if sentinel else PASSWORD)

    def ready(self) -> None:
        until(self.client.ping, "ping")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGCONT)
        self.kill()


PLAIN = ["save ''", "appendonly no", f"requirepass {PASSWORD}", f"masterauth {PASSWORD}"]


def watching(primary: int, quorum: int) -> list[str]:
    """The lines of a Sentinel's configuration; it takes a second to notice a loss. primary: its port"""
    return [
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary} {quorum}",
        f"sentinel auth-pass {SERVICE} {PASSWORD}",
        f"sentinel down-after-milliseconds {SERVICE} 1000",
        f"sentinel failover-timeout {SERVICE} 5000",
    ]


@contextmanager
def sentinels(folder: Path) -> Iterator[tuple[str, Node, Node, list[Node]]]:
    """Yields a url, the primary, its replica, and three Sentinels, which take a second to notice a loss."""
    first, second, *ports = free_ports(5)
    with ExitStack() as stack:

        def start(port: int, lines: list[str], sentinel: bool = False) -> Node:
            node = Node(folder, port, lines, sentinel)
            stack.callback(node.stop)
            node.ready()
            return node

        primary = start(first, PLAIN)
        replica = start(second, [*PLAIN, f"replicaof 127.0.0.1 {first}"])
        until(lambda: replica.client.info("replication")["master_link_status"] == "up", "replication")
        nodes = [start(port, watching(first, 2), True) for port in ports]
        for node in nodes:
            until(lambda node=node: _knows_others(node), "Sentinels")
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}", primary, replica, nodes


def _knows_others(node: Node) -> bool:
    (seen,) = node.client.sentinel_masters().values()
    return seen["num-other-sentinels"] == 2 and seen["num-slaves"] == 1


@contextmanager
def cluster_of(folder: Path, replicas: int = 0) -> Iterator[tuple[str, list[Node]]]:
    """Yields a url and the nodes of a cluster of 3 primaries, with so many replicas of the first."""
    ports = free_ports(3 + replicas)
    lines = [*PLAIN, "cluster-enabled yes", "cluster-node-timeout 1000", "cluster-config-file nodes"]
    with ExitStack() as stack:
        nodes = [Node(folder, port, lines) for port in ports]
        for node in nodes:
            stack.callback(node.stop)
            node.ready()
        for number, node in enumerate(nodes[:3]):
            last = 16384 if number == 2 else (number + 1) * 5461
            node.client.execute_command("CLUSTER", "ADDSLOTS", *range(number * 5461, last))
        for number, node in enumerate(nodes):
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            until(
                lambda node=node: node.client.execute_command("CLUSTER", "NODES").count(b"\n") == len(nodes), "meeting"
            )
        first = nodes[0].client.execute_command("CLUSTER", "MYID").decode()
        for node in nodes[3:]:
            until(lambda node=node: node.client.execute_command("CLUSTER", "REPLICATE", first), "replicas")
            until(lambda node=node: node.client.info("replication")["master_link_status"] == "up", "replication")
        for node in nodes:
            until(lambda node=node: b"cluster_state:ok" in node.client.execute_command("CLUSTER", "INFO"), "cluster")
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[1:])
        yield f"redis+cluster://:{PASSWORD}@{hosts}", nodes
