"""The Python clients and the command line: tokens of a prompt, text of tokens, and the end of a request by its id."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from dendro.client import AsyncClient, Chat, Client
from dendro.errors import Aborted, BadRequest, PeerLost
from typer.testing import CliRunner

from cluster.api.grpc import serve_router
from cluster.cli import app
from tests.support.edge import EdgePeers, ingress
from tests.support.sockets import until

CHAT = Chat([{"role": "user", "content": "hi"}])
NOWHERE = "127.0.0.1:1"


@asynccontextmanager
async def routers(count=1, pause_s=0.0):
    """Yields routers, and their addresses as a client takes them."""
    peers = EdgePeers()
    peers.pause_s = pause_s
    servers = [await serve_router(ingress(peers)) for _ in range(count)]
    try:
        yield servers, ",".join(each.address for each in servers)
    finally:
        for each in servers:
            await each.stop()


async def test_a_client_gets_the_tokens_of_texts_and_conversations_and_their_texts_back():
    async with routers() as (_, address), AsyncClient(address) as client:
        for prompt, text in (("walk", "walk"), (CHAT, "[user]hi<end>[assistant]"), ("", "")):
            ids = await client.tokenize(prompt)
            assert await client.detokenize(ids, show_special_tokens=True) == text and isinstance(ids, tuple)
            done = await client.generate_text(prompt or "a", max_new_tokens=1, echo=True)
            assert not prompt or tuple(each for part in done.prompt for each in part.token_ids) == ids
        with Client(address) as blocking:
            ids = await asyncio.to_thread(blocking.tokenize, CHAT, model="demo")
            assert ids == await client.tokenize(CHAT)
            assert await asyncio.to_thread(blocking.detokenize, ids) == "[user]hi[assistant]"


async def test_a_wrong_argument_is_refused_by_its_name():
    async with routers() as (_, address), AsyncClient(address) as client:
        for call, name in (
            (client.tokenize("a", model="other"), "model"),
            (client.tokenize(5), "prompt"),
            (client.tokenize("a", literal_prompt="yes"), "literal_prompt"),
            (client.detokenize([5, 300]), r"token_ids\[1\]"),
            (client.detokenize([-1]), "token_ids"),
            (client.abort("\u20ac"), "request_id"),
        ):
            with pytest.raises(BadRequest, match=f"^{name}"):
                await call


async def begun(client, name, **options):
    """An answer's events, of which the first has come."""
    events = client.generate("walk", max_new_tokens=400, speculation="off", request_id=name, **options)
    await anext(events)
    return events


async def test_an_abort_ends_the_request_at_whichever_router_runs_it_and_its_client_does_not_ask_again():
    async with routers(3, 0.02) as (servers, address), AsyncClient(address) as client:
        answers = [await begun(client, f"r{at}") for at in range(3)]
        assert [each.stats()["running"] for each in servers] == [1, 1, 1]
        assert await client.abort("none") == 0
        for at, answer in enumerate(answers):
            assert await client.abort(f"r{at}") == 1
            with pytest.raises(Aborted, match="was aborted by its client"):
                async for _ in answer:
                    pass
        assert [each.stats()["running"] for each in servers] == [0, 0, 0]
        again = await begun(client, "b")
        with Client(address) as blocking:
            assert await asyncio.to_thread(blocking.abort, "b") == 1
        with pytest.raises(Aborted):
            async for _ in again:
                pass


async def test_a_router_that_cannot_be_reached_keeps_no_other_from_being_asked():
    async with routers(1, 0.02) as (_, address), AsyncClient(f"{NOWHERE},{address}", timeout_s=60) as client:
        running = await begun(client, "one")
        assert await client.abort("one") == 1
        await running.aclose()
    async with AsyncClient(NOWHERE, timeout_s=60) as client:
        with pytest.raises(PeerLost, match=NOWHERE):
            await client.abort("one")
    with Client(NOWHERE, timeout_s=60) as blocking, pytest.raises(PeerLost, match=NOWHERE):
        await asyncio.to_thread(blocking.abort, "one")


async def test_an_abort_ends_no_request_of_another_tenant():
    async with routers(1, 0.02) as (servers, address), AsyncClient(address, tenant="here") as client:
        running = await begun(client, "one")
        assert await client.for_tenant("there").abort("one") == 0
        assert servers[0].stats()["running"] == 1
        await running.aclose()


async def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `dendro`."""
    done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    return done.exit_code, done.stdout, done.stderr


async def test_the_commands_print_tokens_texts_and_whether_a_request_was_ended():
    async with routers(2, 0.02) as (_, address), AsyncClient(address) as client:
        at = ("--address", address)
        ids = await client.tokenize(CHAT)
        assert (await command("tokenize", "hi", "--message", *at))[:2] == (0, " ".join(map(str, ids)) + "\n")
        assert (await command("tokenize", "hi", *at))[1].split() == [*map(str, await client.tokenize("hi"))]
        assert (await command("detokenize", *map(str, ids), *at))[:2] == (0, "[user]hi[assistant]\n")
        running = await begun(client, "one")
        assert (await command("abort", "chatcmpl-one", *at))[0] == 0
        with pytest.raises(Aborted):
            async for _ in running:
                pass
        assert (await command("abort", "one", *at))[0] == 1


async def test_a_router_that_does_not_answer_keeps_no_other_from_being_asked(monkeypatch):
    monkeypatch.setattr("dendro.asked_addresses.LONGEST_CALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nothing is ever read
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        async with routers(1, 0.02) as (_, address), AsyncClient(f"{nobody},{address}", timeout_s=60) as client:
            running = await begun(client, "one")
            assert await client.abort("one") == 1
            await running.aclose()
            with pytest.raises(PeerLost, match=nobody):  # it may run there
                await client.abort("two")


async def test_the_command_ends_the_id_as_given_before_that_of_an_answer_over_http():
    async with routers(1, 0.02) as (servers, address), AsyncClient(address) as client:
        given, bare = await begun(client, "cmpl-7"), await begun(client, "7")
        for left in (1, 0):
            assert (await command("abort", "cmpl-7", "--address", address))[0] == 0
            await until(lambda left=left: servers[0].stats()["running"] == left)
        await given.aclose()
        await bare.aclose()
