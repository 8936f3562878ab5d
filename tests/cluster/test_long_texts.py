"""Work on long texts leaves the router's event loop free."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from dendro import text as text_module
from dendro import wire
from dendro.calls import Hello, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.tasks import LONG, PART
from dendro.text import Limits, Sampling, Tokens
from dendro.v1 import generation_pb2 as pb

from cluster import sessions as sessions_module
from cluster.redis_server import RedisServer
from cluster.router import prompts
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.sessions import RedisSessions
from tests.support.edge import END, VOCABULARY, ByteTokenizer, EdgePeers, config
from tests.support.fakes import FakeVerifier
from tests.support.sockets import verifier_at

TOKENS = 30_000
IDS = [index * index % 256 for index in range(TOKENS)]
SERVED = {"demo": Served("demo", ByteTokenizer(), VOCABULARY, 3 * TOKENS, frozenset({END}), "float32")}


class Watch:
    """Counts the tokens that functions handle on the event loop's thread. In another thread they first wait until the
    loop has run once more, which it cannot while that thread's work holds it up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop_tokens: dict[str, int] = {}
        self.threaded: dict[str, int] = {}  # tokens handled elsewhere
        self._patch = monkeypatch
        self._thread = threading.current_thread()
        self._ticked = threading.Event()

    def add(self, owner, name: str, tokens_of) -> None:
        work = getattr(owner, name)
        self.loop_tokens[name] = self.threaded[name] = 0

        def watched(*args):
            if threading.current_thread() is self._thread:
                self.loop_tokens[name] += tokens_of(*args)
            else:
                self.threaded[name] += tokens_of(*args)
                self._ticked.clear()
                assert self._ticked.wait(30), f"the loop does not run beside {name}"
            return work(*args)

        self._patch.setattr(owner, name, watched)

    @asynccontextmanager
    async def ticking(self):
        async def tick():
            while True:
                self._ticked.set()
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticker.cancel()

    def check(self) -> None:
        assert max(self.loop_tokens.values()) < LONG, self.loop_tokens
        assert min(self.threaded.values()) >= TOKENS, self.threaded


async def test_the_loop_runs_while_a_router_reads_hashes_and_stores_long_texts(monkeypatch):
    """Two turns of a session: the first as token ids, the second as text."""
    watch = Watch(monkeypatch)
    watch.add(prompts, "_below_vocabulary", lambda name, raw, vocabulary: len(raw))
    watch.add(ByteTokenizer, "encode", lambda tokenizer, text, begins: len(text))
    watch.add(text_module, "packed_ids", len)
    watch.add(sessions_module, "pack_record", lambda record, name: len(record.tokens))
    watch.add(sessions_module, "unpack_record", lambda blob, name: len(blob) // sessions_module.TOKEN_BYTES)
    with RedisServer(memory_mb=64) as server:
        store = RedisSessions(server.url, ttl_s=60, budget_s=30)
        router = Ingress(config(router={"max_prompt_bytes": TOKENS}), EdgePeers(), store, SERVED)
        first = pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), max_new_tokens=3, keep_session=True)
        async with watch.ticking():
            *_, last = [event async for event in router.generate(first)]
            second = pb.GenerateRequest(text="x" * TOKENS, max_new_tokens=3, session=last.complete.session)
            started, *_, last = [event async for event in router.generate(second)]
        await store.close()
    assert started.started.prompt_tokens == 2 * TOKENS + 3 and last.complete.session == second.session
    watch.check()


async def test_the_loop_runs_while_an_opening_of_a_long_text_becomes_a_message(monkeypatch):
    watch = Watch(monkeypatch)
    watch.add(wire, "_fill_update", lambda message, update: len(update.tokens))
    tokens = tuple(token % 100 for token in IDS)
    update = TextUpdate(new_opening(), TOKENS, Tokens(tokens).digest(), 0, tokens)
    call = OpenCall(update, RequestParameters(Sampling(), Limits(TOKENS + 9), "", ()))
    async with verifier_at(FakeVerifier()) as (_, pool), watch.ticking():
        leased = await pool.lease()
        assert isinstance(leased.hello, Hello)
        assert (await leased.peer.open(call)).processed == TOKENS - 1
    watch.check()


def test_a_long_message_has_the_tokens_in_order():
    """They are added in parts."""
    tokens = tuple(range(2 * PART + 1))
    update = TextUpdate(new_opening(), len(tokens) + 4, 5, 4, tokens)
    call = OpenCall(update, RequestParameters(Sampling(), Limits(1 << 20), "", ()))
    assert wire.verifier_call_message(7, call).update.tokens == list(tokens)
