"""`dendro explain`: rounds that routers keep of a share of their requests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import aclosing

import pytest
from dendro.answer import build_request
from dendro.client import AsyncClient
from dendro.errors import BadRequest, NotFound, PeerLost
from dendro.explanation import Explanation
from dendro.progress import RequestProgress
from dendro.v1 import generation_pb2 as pb
from pydantic import ValidationError
from typer.testing import CliRunner

from cluster import cli
from cluster.api.grpc import serve_router
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.explaining import explained_answers
from cluster.router.allowance import KeyLimits
from cluster.router.explained import ExplainedRequest, ExplainedRequests
from tests.support.edge import EdgePeers, config, ingress

KEEPING = {"router": {"explained_share": 1.0, "explained_requests": 2}}
ASKED = {"max_new_tokens": 12, "speculation": "(2,1)"}


async def events_of(made, request_id, tenant="", **options):
    request = build_request("walk the ", request_id=request_id, **{**ASKED, **options})
    return [event async for event in made.generate(request, tenant)]


async def test_nothing_is_kept_unless_it_is_configured():
    made = ingress(EdgePeers())
    assert config().router.explained_share == 0
    await events_of(made, "a")
    with pytest.raises(NotFound, match="^request: its rounds are not kept here"):
        made.explain(pb.ExplainRequest(request_id="a"), "")


async def test_a_kept_request_has_its_trees_and_its_client_gets_what_it_asked_for():
    made = ingress(EdgePeers(), **KEEPING)
    plain, with_trees = await events_of(made, "a"), await events_of(made, "b", trees=True)
    assert not any(event.chunk.HasField("tree") for event in plain)
    for name, sent in (("a", plain), ("b", with_trees)):
        kept = made.explain(pb.ExplainRequest(request_id=name), "")
        chunks = [event.chunk for event in kept.events if event.HasField("chunk")]
        assert len(kept.events) == len(sent) and chunks and all(chunk.HasField("tree") for chunk in chunks)
        assert [list(chunk.token_ids) for chunk in chunks] == [
            list(event.chunk.token_ids) for event in sent if event.HasField("chunk")
        ]


async def test_the_newest_requests_are_kept_and_an_echoed_prompt_is_not():
    made = ingress(EdgePeers(), **KEEPING)
    for name in ("a", "b", "c"):
        await events_of(made, name, echo=True)
    with pytest.raises(NotFound):
        made.explain(pb.ExplainRequest(request_id="a"), "")
    kept = made.explain(pb.ExplainRequest(request_id="b"), "")
    assert "prompt" not in [event.WhichOneof("event") for event in kept.events]


async def test_another_tenants_request_and_an_unknown_one_look_alike(tmp_path):
    (alice, one), (bob, other) = new_key("alice", "alice", KeyLimits()), new_key("bob", "bob", KeyLimits())
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(one, other)))
    server = await serve_router(ingress(EdgePeers(), auth={"keys": tmp_path / "keys.json"}, **KEEPING))
    try:
        async with AsyncClient(server.address, key=alice) as hers, AsyncClient(server.address, key=bob) as his:
            await hers.generate_text("walk the ", request_id="mine", max_new_tokens=4)
            assert (await hers.explain("mine")).events
            with pytest.raises(NotFound) as foreign:
                await his.explain("mine")
            with pytest.raises(NotFound) as unknown:
                await his.explain("none")
    finally:
        await server.stop()
    assert str(foreign.value) == str(unknown.value)


async def test_the_rounds_are_found_though_another_router_does_not_answer():
    server = await serve_router(ingress(EdgePeers(), **KEEPING))
    try:
        async with AsyncClient(server.address) as client:
            await client.generate_text("walk the ", request_id="mine", max_new_tokens=4)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            gone = f"127.0.0.1:{closed.getsockname()[1]}"
            for addresses in (f"{gone},{server.address}", f"{server.address},{gone}"):
                async with AsyncClient(addresses, timeout_s=20) as client:
                    assert (await client.explain("mine")).events
            async with AsyncClient(f"{server.address},{gone}", timeout_s=2) as client:
                with pytest.raises(PeerLost):  # the router that does not answer may have them
                    await client.explain("none")
    finally:
        await server.stop()


async def test_a_router_that_hangs_takes_no_more_than_its_share_of_the_time(monkeypatch):
    monkeypatch.setattr("dendro.asked_addresses.LONGEST_CALL_S", 0.3)
    server = await serve_router(ingress(EdgePeers(), **KEEPING))
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nothing is ever read
            hung = f"127.0.0.1:{silent.getsockname()[1]}"
            async with AsyncClient(server.address) as client:
                await client.generate_text("walk the ", request_id="mine", max_new_tokens=4)
            async with AsyncClient(f"{hung},{server.address}", timeout_s=3) as client:
                assert (await client.explain("mine")).events
                with pytest.raises(PeerLost, match=hung):  # it may have them
                    await client.explain("none")
    finally:
        await server.stop()


def test_a_share_of_the_requests_is_kept():
    chances = iter([0.1, 0.3, 0.2])
    kept = ExplainedRequests(0.25, 8, lambda: next(chances))
    assert [kept.begin("", name) is not None for name in "abc"] == [True, False, True]
    assert ExplainedRequests(0.0, 8, lambda: 0.0).begin("", "a") is None


def test_the_events_of_a_request_are_bounded_and_say_where_they_were_cut():
    kept = ExplainedRequest(most_bytes=1000)
    for offset in range(100):
        kept.take(pb.GenerateResponse(chunk=pb.GenerateChunk(offset=offset, token_ids=[1], text="x" * 50)), True)
    kept.take(pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=pb.FINISH_REASON_LENGTH)), True)
    found = kept.message()
    assert found.cut and found.ByteSize() < 1200 and found.events[-1].HasField("complete")
    assert [event.chunk.offset for event in found.events[:-1]] == list(range(len(found.events) - 1))
    (answer,) = explained_answers("a", found)
    assert answer["note"] == "Later rounds were too many to be kept."


@pytest.mark.parametrize("router", [{"explained_share": 1.5}, {"explained_share": -1}, {"explained_requests": 5000}])
def test_what_is_kept_has_bounds(router):
    with pytest.raises((BadRequest, ValidationError), match="explained_"):
        config(router=router)


async def broken_answer(request, *calls):
    """The progress of a request whose call at each router, but the last, breaks after so many events."""
    progress = RequestProgress(request, 60)
    for router, left in calls:
        async with aclosing(router.generate(progress.next_request())) as events:
            async for event in events:
                progress.take(event)
                left -= 1
                if not left:
                    break
    assert progress.finished
    return progress


def explained(*routers):
    """The answers to the request `a` as a client of routers gets them."""
    asked = Explanation("a", 60, ())
    for router in routers:
        asked.answered(router.explain(asked.request, ""))
    return explained_answers("a", asked.joined)


def tokens_of(answer):
    return [token for each in answer["rounds"] for token in each["round"]["token_ids"]]


@pytest.mark.parametrize("count", [1, 3])
async def test_answers_that_are_resumed_at_their_router_have_all_of_their_rounds(count: int):
    router = ingress(EdgePeers(), **KEEPING)
    request = build_request("walk the ", request_id="a", n=count, max_new_tokens=12, temperature=0.8, sample_index=2)
    progress = await broken_answer(request, (router, 2 * count + 1), *[(router, 0)] * count)
    answers = explained(router)
    assert [each["sample"] for each in answers] == [2, 3, 4][:count]
    for its, answer in zip(answers, progress.answers, strict=True):
        assert tokens_of(its) == answer.token_ids and its["note"] == ""


async def test_the_parts_of_an_answer_that_several_routers_have_are_joined():
    one, two = (ingress(EdgePeers(), **KEEPING) for _ in range(2))
    request = build_request("walk the ", request_id="a", max_new_tokens=12, speculation="off")
    progress = await broken_answer(request, (one, 4), (two, 4), (one, 0))
    for routers in ((one, two), (two, one)):
        (its,) = explained(*routers)
        assert tokens_of(its) == progress.answers[0].token_ids and its["note"] == ""
    for router in (one, two):  # the first has a gap, the other one the middle alone
        (its,) = explained(router)
        assert its["note"] == "Some rounds were not kept by the routers that answered."


def test_rounds_that_a_client_did_not_get_are_replaced_by_those_of_the_router_that_went_on():
    def part(*chunks):
        events = [pb.GenerateChunk(offset=offset, token_ids=range(offset, end)) for offset, end in chunks]
        return pb.ExplainResponse(events=[pb.GenerateResponse(chunk=each) for each in events])

    asked = Explanation("a", 60, ())
    for each in (part((5, 8), (8, 9)), part((0, 5), (5, 7), (9, 12)), part((5, 6))):
        asked.answered(each)
    assert [event.chunk.offset for event in asked.joined.events] == [0, 5, 8, 9]


def test_a_resumed_call_replaces_what_is_kept_from_its_offset_on_and_the_memory_stays_bounded():
    kept = ExplainedRequests(1.0, 8)
    for _ in range(50):
        call = kept.begin("", "a")
        assert call is not None
        call.take(pb.GenerateResponse(started=pb.GenerateStarted(offset=1, model="x" * 1000)), True)
        for offset in range(1, 4):
            call.take(pb.GenerateResponse(chunk=pb.GenerateChunk(offset=offset, token_ids=[1], text="y" * 50000)), True)
    found = kept.find("", "a")
    assert not found.cut and [each.chunk.offset for each in found.events if each.HasField("chunk")] == [1, 2, 3]


async def test_the_command_writes_one_page_with_the_rounds_of_each_answer(tmp_path):
    first, second = [await serve_router(ingress(EdgePeers(), **KEEPING)) for _ in range(2)]
    page = tmp_path / "page.html"
    try:
        async with AsyncClient(second.address) as client:
            answers = await client.generate_samples("walk the ", request_id="abc", n=2, max_new_tokens=8)
        words = ["explain", "chatcmpl-abc", "--address", f"{first.address},{second.address}", "-o", str(page)]
        done = await asyncio.to_thread(CliRunner().invoke, cli.app, words)
        refused = await asyncio.to_thread(CliRunner().invoke, cli.app, [*words[:-1], str(tmp_path)])
    finally:
        await first.stop()
        await second.stop()
    assert done.exit_code == 0, done.output
    assert str(refused.exception) == f"--output: {tmp_path} cannot be written: Is a directory"
    (data,) = re.findall(r'<script type="application/json" id="explained">(.*?)</script>', page.read_text(), re.DOTALL)
    found = json.loads(data)
    assert [each["sample"] for each in found] == [0, 1] and [each["request_id"] for each in found] == ["abc"] * 2
    for its, answer in zip(found, answers, strict=True):
        assert "".join(each["text"] for each in its["rounds"]) == answer.text and its["model"] == "demo"
        assert its["stats"]["rounds"] == len(its["rounds"]) and its["note"] == ""


async def test_the_command_finds_the_id_as_given_before_that_of_an_answer_over_http(tmp_path):
    server = await serve_router(ingress(EdgePeers(), **KEEPING))
    page = tmp_path / "page.html"
    try:
        async with AsyncClient(server.address) as client:
            for kept in ("7", "cmpl-7"):
                await client.generate_text("walk the ", request_id=kept, max_new_tokens=4)
                words = ["explain", "cmpl-7", "--address", server.address, "-o", str(page)]
                done = await asyncio.to_thread(CliRunner().invoke, cli.app, words)
                assert done.exit_code == 0, done.output
                assert f'"request_id": "{kept}"' in page.read_text()
    finally:
        await server.stop()
