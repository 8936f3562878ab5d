"""An ingress with the toy fakes behind real sockets."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

from dendro.v1 import generation_pb2 as pb

from cluster.peers.pools import Peers
from cluster.policies.prior import PriorKey, pack_prior
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.sessions import MemorySessions
from tests.support.fakes import END, VOCABULARY, FakeDrafter, FakeVerifier
from tests.support.sockets import drafter_at, verifier_at
from tests.support.toy_cluster import ToyTokenizer, toy_config

PROMPT = [5, 6, 7]
COUNT = 30


class RecordedPriors:
    """Keeps saved priors as bytes; loads none."""

    def __init__(self) -> None:
        self.blobs: dict[PriorKey, bytes] = {}

    async def load(self, key):
        return None

    async def save(self, key, prior) -> bool:
        self.blobs[key] = pack_prior(prior)
        return True


@asynccontextmanager
async def edge(drafter: FakeDrafter, verifier: FakeVerifier, **sections: object):
    """Yields an ingress with both engines behind sockets, and its priors; `sections` are of its configuration."""
    async with AsyncExitStack() as stack:
        _, drafters = await stack.enter_async_context(drafter_at(drafter))
        _, verifiers = await stack.enter_async_context(verifier_at(verifier))
        config, priors = toy_config(**sections), RecordedPriors()
        served = Served("toy", ToyTokenizer(), VOCABULARY, 2048, frozenset({END}), "float32")
        peers = Peers(config, {"toy": verifiers}, {"helper": drafters}, patience_s=1.0)
        yield Ingress(config, peers, MemorySessions(), {"toy": served}, priors), priors


def asking(speculation: str) -> pb.GenerateRequest:
    """A request with PROMPT and speculation `auto` or a fixed shape."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_new_tokens=COUNT)
    if speculation != "auto":
        request.speculation.mode, request.speculation.shape = pb.Speculation.MODE_FIXED, speculation
    return request


async def answer(ingress: Ingress, speculation: str) -> list[int]:
    ids: list[int] = []
    async for event in ingress.generate(asking(speculation)):
        ids += event.chunk.token_ids
    return ids
