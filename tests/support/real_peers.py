"""Real engines behind sockets and routers before them, each in a process of its own, which tests stop and kill.

python -m tests.support.real_peers FOLDER

The process loads the engines of `config_of(FOLDER)` and prints a line. For each line that it reads, which says what to
serve, it forks a process, which prints its `PeerProcess`. A control port takes one word of a connection: `stats`,
`stop`, `lease`, which stands for a call of Serve, or a fault of `PeerFaults`, which is then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA, serve_engine
from dendro.serving import Leases
from dendro.state import MemoryStates
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.api.grpc import serve_router
from cluster.arms import Arm
from cluster.config import Config
from cluster.engines import load_drafter, load_verifier
from cluster.peers import drafter as drafter_module
from cluster.peers import opening as opening_module
from cluster.peers.links import StreamLinks
from cluster.peers.pools import Peers
from cluster.peers.verifier import CallLimit
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions
from tests.support import other_tokenizers, tiny_models
from tests.support.fakes import RemotePool
from verifier_service import orders

SLOW_S = 0.4
"""Delay of each draft of a slow drafter; longer than routers wait."""


def make_models(folder: Path) -> Path:
    """A target, and the same model under other ids."""
    tiny_models.make_checkpoint(folder / "target", "llama")
    other_tokenizers.write_permuted(folder / "target", folder / "permuted")
    return folder


def config_of(folder: Path, draft_timeout_ms: float = 300) -> Config:
    """One target. Each of its drafters has its weights, so that it guesses well: `own`, and `other` behind a bridge."""
    shared = {"dtype": "float32", "max_sessions": 3}
    drafters = {"own": {"checkpoint": folder / "target"}, "other": {"checkpoint": folder / "permuted"}}
    drafters["other"]["bridge"] = "intersection"
    for drafter in drafters.values():
        drafter["draft_ahead"] = "on"
    return Config.of(
        {
            "targets": {"t": {"checkpoint": folder / "target", "max_length": 1024, **shared}},
            "drafters": {name: drafter | shared for name, drafter in drafters.items()},
            "speculation": {"proposers": []},
            "router": {"draft_timeout_ms": draft_timeout_ms},
        },
        folder,
    )


@dataclass(frozen=True)
class PeerProcess:
    """A process."""

    pid: int
    address: str
    control: str

    async def ask(self, word: str) -> dict[str, Any]:
        """What the control port answers first."""
        host, port = self.control.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{word}\n".encode())
        answer: dict[str, Any] = json.loads(await reader.readline())
        writer.close()
        await writer.wait_closed()
        return answer

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class PeerProcesses:
    """Starts the processes of a test."""

    def __init__(self, loader: subprocess.Popen[str]) -> None:
        self._loader = loader

    def start(self, kind: str, **words: Any) -> PeerProcess:
        assert self._loader.stdin is not None and self._loader.stdout is not None
        print(json.dumps({"kind": kind, **words}), file=self._loader.stdin, flush=True)
        return PeerProcess(**json.loads(self._loader.stdout.readline()))

    def router(
        self, verifiers: list[PeerProcess], drafters: dict[str, list[PeerProcess]], **options: float
    ) -> PeerProcess:
        named = {"t": verifiers, **drafters}
        places = {name: [[part.address, part.control] for part in parts] for name, parts in named.items()}
        return self.start("router", places=places, options=options)


@contextmanager
def real_peers(folder: Path) -> Iterator[PeerProcesses]:
    """All processes are killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.real_peers", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    ) as loader:
        assert loader.stdout is not None
        try:
            assert loader.stdout.readline() == "loaded\n"
            yield PeerProcesses(loader)
        finally:
            os.killpg(loader.pid, signal.SIGKILL)


# In the processes


class PeerFaults:
    """PeerFaults that a control port turns on."""

    def __init__(self) -> None:
        self.on: set[str] = set()

    def slow(self, engine: Any) -> None:
        draft_for = engine.draft_for

        def slowly(call: Any, deliver: Any) -> None:
            pause_s = SLOW_S if "slow" in self.on else 0.0
            asyncio.get_running_loop().call_later(pause_s, draft_for, call, deliver)

        engine.draft_for = slowly

    def lying_verdicts(self, number: int, outcome: Any) -> Any:
        """Says that the ordered tree has another root."""
        message = VERIFIER_REPLICA.answer(number, outcome)
        if "lie" in self.on and message.WhichOneof("answer") == "verdict" and message.verdict.HasField("tree"):
            message.verdict.tree.tokens[0] ^= 1
        return message

    def lying_texts(self, links: StreamLinks) -> None:
        """Sends the drafter other tokens than the router."""
        draft = links.draft

        def lying(drafter: str, call: Any, deliver: Any) -> None:
            update = call.update
            if "lie to the drafter" in self.on and update.tokens:
                call = replace(call, update=replace(update, tokens=(*update.tokens[:-1], update.tokens[-1] ^ 1)))
            draft(drafter, call, deliver)

        links.draft = lying


async def serve_peer(kind: str, engine: Any) -> tuple[str, str]:
    faults, leases = PeerFaults(), Leases()
    if kind == "verifier":
        links = StreamLinks()
        faults.lying_texts(links)
        engine.link(links)
        orders.MESSAGE_S = 1e-12  # each prepared tree is sent before its verdict
        served = replace(VERIFIER_REPLICA, answer=faults.lying_verdicts)
    else:
        faults.slow(engine)
        served = DRAFTER_REPLICA
    await engine.start()
    replica = await serve_engine(served, engine, leases, fault=engine.fault)

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        word, answer = (await reader.readline()).decode().strip(), {}
        match word:
            case "lease":
                async for item in replica.lease():
                    writer.write(json.dumps(item).encode() + b"\n")
            case "stop":
                await replica.stop()
            case "stats":
                awaited = len(engine.scheduler.orders.awaited) if kind == "verifier" else 0
                answer = engine.stats() | replica.stats() | {"awaited": awaited}
            case _:
                faults.on.add(word)
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    return replica.address, await control_port(control)


async def control_port(control: Any) -> str:
    server = await asyncio.start_server(control, "127.0.0.1", 0)
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Alternating:
    """A policy of two drafters in turn, which is sometimes wrong about its next arm."""

    def __init__(self) -> None:
        self._arms = [Arm.parse(f"{drafter}:(1,1)") for drafter in ("own", "own", "other")]
        self._chosen = 0

    @property
    def next_arm(self) -> Arm:
        return self._arms[0 if self._chosen % 7 == 0 else self._chosen % 3]

    def choose(self, offer: object = None) -> Arm:
        self._chosen += 1
        return self._arms[(self._chosen - 1) % 3]

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        return


async def serve_ingress(folder: Path, places: dict[str, list[list[str]]], options: dict[str, float]) -> tuple[str, str]:
    """options: draft_timeout_ms, and `step_s`, after which a verifier that does not answer is left"""
    config = config_of(folder, options.get("draft_timeout_ms", 300))
    drafter_module.FROZEN_S, opening_module.CLOSE_S = 0.5, 1.0
    patch("cluster.router.speculation.policy_named", lambda *given: Alternating()).start()
    if "step_s" in options:
        patch("cluster.peers.verifier.CallLimit", lambda limit_s: CallLimit(options["step_s"])).start()

    def pool(name: str) -> RemotePool:
        controls = {address: PeerProcess(0, address, control) for address, control in places[name]}

        async def lease_at(address: str) -> str:
            return str((await controls[address].ask("lease"))["lease"])

        return RemotePool("verifier" if name == "t" else "drafter", list(controls), lease_at)

    peers = Peers(config, {"t": pool("t")}, {name: pool(name) for name in places if name != "t"})
    server = await serve_router(Ingress(config, peers, MemorySessions()))

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(json.dumps(server.stats()).encode() + b"\n")
        writer.close()

    return server.address, await control_port(control)


async def serve(folder: Path, engines: dict[str, Any], words: dict[str, Any]) -> None:
    if words["kind"] == "router":
        address, control = await serve_ingress(folder, words["places"], words["options"])
    else:
        address, control = await serve_peer(words["kind"], engines[words.get("name", "t")])
    print(json.dumps({"pid": os.getpid(), "address": address, "control": control}), flush=True)
    await asyncio.Event().wait()


def main(folder: Path) -> None:
    config = config_of(folder)
    engines: dict[str, Any] = {"t": load_verifier("t", config.targets["t"], MemoryStates())}
    for name, drafter in config.drafters.items():
        engines[name] = load_drafter(name, drafter, MemoryStates(), config.targets)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process is waited for
    print("loaded", flush=True)
    for line in sys.stdin:
        if not os.fork():
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(serve(folder, engines, json.loads(line)))
            os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
