"""A Redis that freezes during a call costs a request the budget of one call. With a real server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from dendro.errors import PeerLost

from cluster.sessions import Record, RedisSessions
from cluster.state_store import RedisStates

BUDGET_S = 1.0
SOON_S = 4.0
"""Far above the budget of one call, and below redis-py's own timeout of 5 s."""
RECORD = Record((1, 2), 0, 0, (2,), 1, "m", "t", ())


@asynccontextmanager
async def freezing(url: str, word: bytes):
    """The server's address behind a proxy that forwards no answer once a command contains `word`."""
    path = urlsplit(url).path  # the socket's
    frozen = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asks: bool) -> None:
        while data := await reader.read(1 << 16):
            if asks and word in data:
                frozen.set()
                writer.write(data)  # executed by the server; its answer is dropped
                continue
            if not frozen.is_set():
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(path)
        writers.extend((writer, back))
        await asyncio.gather(forward(reader, back, True), forward(there, writer, False), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", frozen
    finally:
        server.close()
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("word", [b"WATCH", b"MULTI", b"dendro:session:"], ids=["WATCH", "MULTI", "the record's key"])
async def test_a_store_that_freezes_in_a_write_costs_one_budget(redis_url, word):
    async with freezing(redis_url, word) as (url, frozen):
        sessions = RedisSessions(url, ttl_s=60, budget_s=60)
        token = await sessions.new_token("")  # connect first: on a busy machine that takes longer than a budget
        sessions.budget_s = BUDGET_S
        with pytest.raises(PeerLost):
            async with asyncio.timeout(SOON_S):
                await sessions.write(token, "", RECORD)
        assert frozen.is_set()


async def test_a_store_that_freezes_at_the_first_command_costs_one_budget_for_all_round_trips(redis_url):
    async with freezing(redis_url, b"dendro:session-secret") as (url, frozen):
        sessions = RedisSessions(url, ttl_s=60, budget_s=BUDGET_S)
        with pytest.raises(PeerLost):
            async with asyncio.timeout(SOON_S):
                await sessions.new_token("")
        assert frozen.is_set()


async def test_reading_a_state_from_a_frozen_store_is_a_miss_within_the_budget(redis_url):
    async with freezing(redis_url, b"GET") as (url, frozen):
        states = RedisStates(url, ttl_s=60, budget_s=BUDGET_S)
        async with asyncio.timeout(SOON_S):
            assert await states.load("name", 1 << 20) is None
        assert frozen.is_set() and states.counters.errors == 1
