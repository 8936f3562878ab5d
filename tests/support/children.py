"""Processes that tests start and kill: `drafter`, `verifier`, `router ADDRESS TOKEN`, which holds an opening, or
`edge [PORT]`, a router's server with fake peers, which a SIGTERM stops."""

from __future__ import annotations

import asyncio
import signal
import sys

from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA, serve_engine

from cluster.api.grpc import serve_router
from cluster.peers.opening import Leased, Opening
from cluster.peers.stream import VERIFIER, PeerStream, RemoteVerifier
from tests.support.edge import EdgePeers, ingress
from tests.support.fakes import FakeDrafter, FakeVerifier, new_text


async def main(kind: str, *words: str) -> None:
    if kind == "drafter":
        replica = await serve_engine(DRAFTER_REPLICA, FakeDrafter(pause_s=0.005))
        print(replica.address, flush=True)
    elif kind == "verifier":
        replica = await serve_engine(VERIFIER_REPLICA, FakeVerifier(pause_s=0.01))
        print(replica.address, flush=True)
    elif kind == "edge":
        peers = EdgePeers()
        peers.pause_s = 0.005
        server = await serve_router(ingress(peers), ports=[int(word) for word in words] or [0])
        print(server.address, flush=True)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        return await server.stop(drain_s=0.2)
    else:
        address, token = words
        stream = await PeerStream.connect(address, VERIFIER)
        await Opening(Leased(RemoteVerifier(stream), stream.hello, token), new_text()).open(new_text())
        print("open", flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
