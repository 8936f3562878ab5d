"""The ingress over a real socket, with fake peers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import redis
import redis.asyncio
from dendro.answer import REASON_KEY, Round
from dendro.client import AsyncClient
from dendro.errors import BadRequest, Conflict, EngineFailed, NotFound, PeerLost
from dendro.speculation import Mode, Speculation
from dendro.text import Finish, Sampling
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc
from redis.asyncio.client import Pipeline

from cluster.api.grpc import serve_router
from cluster.peers.pools import Peers
from cluster.redis_server import RedisServer
from cluster.router.ingress import AHEAD, Ingress
from cluster.sessions import KEPT_TURNS, MemorySessions, Record, RedisSessions, Sessions
from tests.support import fakes
from tests.support.edge import (
    END,
    HELLO,
    MAX_LENGTH,
    SERVED,
    VOCABULARY,
    EdgePeers,
    config,
    ingress,
    plain_answer,
    resume_of,
)
from tests.support.sockets import until

PROMPT = "walk the "
IDS = list(PROMPT.encode())
OFF = pb.Speculation(mode=pb.Speculation.MODE_OFF)
CHAIN = pb.Speculation(mode=pb.Speculation.MODE_FIXED, shape="(1,)")


@asynccontextmanager
async def serving(peers: EdgePeers | None = None, sessions: Sessions | None = None) -> AsyncIterator[str]:
    server = await serve_router(ingress(peers or EdgePeers(), sessions))
    try:
        yield server.address
    finally:
        await server.stop()


@asynccontextmanager
async def edge(peers: EdgePeers | None = None, sessions: Sessions | None = None) -> AsyncIterator[AsyncClient]:
    async with serving(peers, sessions) as address, AsyncClient(address) as client:
        yield client


@pytest.mark.parametrize("speculation", ["off", "auto", "(1,1,1)", "(2,1)", "3,2,1"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_no_speculation_setting_changes_a_token(speculation: str, temperature: float):
    async with edge() as client:
        done = await client.generate_text(
            PROMPT, speculation=speculation, temperature=temperature, seed=7, max_new_tokens=40
        )
    assert list(done.token_ids) == plain_answer(IDS, Sampling(temperature=temperature, seed=7), 40)
    assert done.text == bytes(done.token_ids).decode(errors="replace")
    assert done.complete.finish is Finish.LENGTH
    assert (done.complete.prompt_tokens, done.complete.completion_tokens) == (len(IDS), 40)


async def test_each_round_is_one_chunk_and_the_round_account_is_consistent():
    peers = EdgePeers()
    async with edge(peers) as client:
        done = await client.generate_text(PROMPT, speculation="(1,1,1)", max_new_tokens=10)
    stats = done.complete.speculation
    assert [len(part.token_ids) for part in done.rounds] == [4, 4, 2]
    assert [part.offset for part in done.rounds] == [0, 4, 8]
    assert {part.shape for part in done.rounds} == {"(1,1,1)"}
    assert stats.rounds == peers.rounds == 3 and stats.rounds_by_shape == {"(1,1,1)": 3}
    assert stats.emitted_tokens == 10 and stats.decode_tokens == 6 and stats.drafted_tokens == 9
    assert stats.rounds_by_tokens == {4: 2, 2: 1} and stats.cut_tokens == 2
    assert (stats.accepted_tokens, stats.discarded_tokens) == (8, 1)
    assert stats.policy == "fixed" and stats.contradictions == ()
    assert done.complete.target is not None and done.complete.target.processed_tokens == len(IDS) - 1


async def test_a_lost_drafter_costs_only_speculation():
    peers = EdgePeers()
    peers.drafter_lost = True
    async with edge(peers) as client:
        done = await client.generate_text(PROMPT, speculation="(2,1)", max_new_tokens=6)
    assert list(done.token_ids) == plain_answer(IDS, Sampling(), 6)
    assert done.complete.speculation.late_drafts == 6


async def test_a_drawn_seed_is_reported_and_gives_the_same_tokens_again():
    async with edge() as client:
        first = await client.generate_text(PROMPT, temperature=1.0, max_new_tokens=20)
        again = await client.generate_text(PROMPT, temperature=1.0, max_new_tokens=20, seed=first.started.seed)
        other = await client.generate_text(PROMPT, temperature=1.0, max_new_tokens=20)
    assert again.token_ids == first.token_ids != other.token_ids


@pytest.mark.parametrize(
    "field, options",
    [
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": "x" * MAX_LENGTH}),
        ("prompt", {"prompt": "x" * (1 << 20 | 1)}),
        ("prompt.token_ids[1]", {"prompt": [1, VOCABULARY]}),
        ("model", {"model": "another"}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.01}),
        ("min_p", {"min_p": 1.0}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("max_new_tokens", {"max_new_tokens": 5000}),
        ("max_new_tokens", {"max_new_tokens": MAX_LENGTH}),
        ("speculation.shape", {"speculation": "wide"}),
        ("speculation.shape", {"speculation": "(9,9)"}),
        ("speculation.shape", {"speculation": "(1,1,1,1,1,1,1,1,1)"}),
        ("speculation.policy", {"speculation": Speculation(policy="best")}),
        ("speculation.max_nodes", {"speculation": Speculation(Mode.FIXED, "(2,1)", max_nodes=3)}),
        ("speculation.deadline_ms", {"speculation": Speculation(deadline_ms=0)}),
        ("request_id", {"request_id": "x" * 200}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_is_refused_by_the_name_of_its_field_and_the_next_request_works(field: str, options: dict):
    async with edge() as client:
        prompt = options.pop("prompt", PROMPT)
        with pytest.raises(BadRequest) as refused:
            await client.generate_text(prompt, **options)
        assert refused.value.field == field
        assert (await client.generate_text(PROMPT, max_new_tokens=1)).token_ids


@pytest.mark.parametrize("field", ["resume.token_ids", "resume.token_ids[0]"])
async def test_a_resume_with_impossible_tokens_is_refused(field: str):
    async with edge() as client:
        held = [VOCABULARY] if field.endswith("]") else [1] * 5
        request = pb.GenerateRequest(text=PROMPT, max_new_tokens=4, resume=resume_of(IDS, held))
        with pytest.raises(BadRequest) as refused:
            [event async for event in client.send(request)]
    assert refused.value.field == field


async def test_every_error_has_its_status_code_and_reason():
    peers = EdgePeers()
    async with serving(peers) as address, grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def fault(request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str, str]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [event async for event in stub.Generate(request)]
            trailing = dict(caught.value.trailing_metadata() or ())
            return caught.value.code(), caught.value.details() or "", str(trailing[REASON_KEY])

        code, details, reason = await fault(pb.GenerateRequest(text=PROMPT, session="unknown"))
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "session-unknown")
        code, details, reason = await fault(pb.GenerateRequest(text=""))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BadRequest") and details.startswith("prompt: ")
        peers.broken = True
        code, details, reason = await fault(pb.GenerateRequest(text=PROMPT))
        assert (code, reason) == (grpc.StatusCode.INTERNAL, "EngineFailed") and "secret" not in details
        peers.broken, peers.dead = False, True
        code, details, reason = await fault(pb.GenerateRequest(text=PROMPT))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "PeerLost")


async def test_an_internal_error_is_not_retried():
    peers = EdgePeers()
    peers.broken = True
    async with edge(peers) as client:
        with pytest.raises(EngineFailed):
            await client.generate_text(PROMPT)
    assert peers.rounds == 1


@pytest.mark.parametrize("held", [0, 1, 7, 19, 20])
async def test_a_resumed_stream_continues_with_the_same_tokens_and_text(held: int):
    """Cuts inside multi-byte characters included: their text must be sent once."""
    sampling = Sampling(temperature=1.0, seed=3)
    whole = plain_answer(IDS, sampling, 20)
    async with edge() as client:
        full = await client.generate_text(PROMPT, temperature=1.0, seed=3, max_new_tokens=20, speculation="off")
        request = pb.GenerateRequest(
            text=PROMPT,
            sampling=pb.Sampling(temperature=1.0),
            max_new_tokens=20,
            resume=resume_of(IDS, whole[:held], seed=3),
        )
        async with client._stub(client.address, 20) as stub:
            events = [event async for event in stub.Generate(request)]
    chunks = [event.chunk for event in events if event.WhichOneof("event") == "chunk"]
    before = "".join(part.text for part in full.rounds[:held])
    assert events[0].started.offset == held
    assert whole[:held] + [token for chunk in chunks for token in chunk.token_ids] == whole
    assert before + "".join(chunk.text for chunk in chunks) == full.text
    assert events[-1].complete.usage.completion_tokens == 20


async def test_a_client_whose_router_dies_gets_the_same_tokens_from_another():
    """The other router has the same address and no state of the first."""
    sampling = Sampling(temperature=1.0, seed=5)
    here, there = EdgePeers(), EdgePeers()
    here.pause_s = 0.01
    first = await serve_router(ingress(here))
    second, tokens, text = None, [], ""
    try:
        async with AsyncClient(first.address) as client:
            async for event in client.generate(PROMPT, temperature=1.0, seed=5, max_new_tokens=40, speculation="2,1"):
                if isinstance(event, Round):
                    tokens += event.token_ids
                    text += event.text
                    if second is None and len(tokens) > 10:
                        await first.stop()
                        second = await serve_router(ingress(there), ports=[int(first.address.split(":")[1])])
    finally:
        await first.stop()
        if second is not None:
            await second.stop()
    assert there.rounds > 0
    assert tokens == plain_answer(IDS, sampling, 40)
    assert text == bytes(tokens).decode(errors="replace")


async def test_a_client_that_leaves_stops_the_work_within_a_round_and_releases_the_leases():
    peers = EdgePeers()
    peers.pause_s = 0.02
    async with edge(peers) as client:
        async for event in client.generate(PROMPT, max_new_tokens=400, speculation="(1,)"):
            if isinstance(event, Round) and event.offset >= 2:
                break
        await asyncio.wait_for(peers.all_closed.wait(), 10)
        rounds = peers.rounds
        await asyncio.sleep(0.1)
        assert peers.rounds == rounds < 20
    assert {kind for kind, _ in peers.closed} == {"drafter", "verifier"}


async def test_rounds_run_while_chunks_are_sent_but_at_most_a_few_ahead():
    peers = EdgePeers()
    events = ingress(peers).generate(pb.GenerateRequest(text=PROMPT, max_new_tokens=100, speculation=OFF))
    kinds = [(await anext(events)).WhichOneof("event") for _ in range(2)]
    assert kinds == ["started", "chunk"]
    await until(lambda: peers.rounds >= 1 + AHEAD)  # without reading
    await asyncio.sleep(0.1)
    assert peers.rounds <= 3 + AHEAD
    rest = [event async for event in events]
    assert peers.rounds == len(rest) == 100
    assert rest[-1].WhichOneof("event") == "complete"


async def test_the_next_rounds_call_is_made_before_a_rounds_text_is_decoded(monkeypatch):
    peers, calls = EdgePeers(), []
    peers.pause_s = 0.001
    tokenizer = SERVED["demo"].tokenizer
    plain_decode = tokenizer.decode

    def decode(ids: Sequence[int]) -> str:
        calls.append(peers.rounds)
        return plain_decode(ids)

    monkeypatch.setattr(tokenizer, "decode", decode)
    request = pb.GenerateRequest(text=PROMPT, max_new_tokens=8, speculation=OFF)
    async for _ in ingress(peers).generate(request):
        pass
    assert calls[0] == 0  # of the tokens that a resumed client has, of which there are none
    assert all(made >= decoded + 1 for decoded, made in enumerate(calls[1:8], start=1))


async def test_a_request_ends_at_its_time_limit():
    peers = EdgePeers()
    peers.pause_s = 0.01
    events = ingress(peers, router={"request_timeout_s": 0.05}).generate(
        pb.GenerateRequest(text=PROMPT, max_new_tokens=400, speculation=CHAIN)
    )
    with pytest.raises(Exception, match="not done within"):
        [event async for event in events]
    assert len(peers.closed) == 2


async def test_a_client_that_leaves_before_the_first_round_leaves_no_handle_open():
    class Leaving(EdgePeers):
        def drafters(self, *arguments, **named):
            reading.cancel()
            return super().drafters(*arguments, **named)

    peers = Leaving()
    events = ingress(peers).generate(pb.GenerateRequest(text=PROMPT, max_new_tokens=8, speculation=CHAIN))
    reading = asyncio.create_task(anext(events))
    await asyncio.wait({reading})
    assert reading.cancelled() and peers.rounds <= 1 and len(peers.closed) == 2


@pytest.mark.parametrize("keep", [False, True])
async def test_an_answer_without_trees_leases_no_drafter_even_if_its_session_is_kept(keep: bool):
    """With real handles: a later turn finds no saved state and processes the text."""
    drafter, verifier = fakes.FakeDrafter(), fakes.FakeVerifier()
    settings = config()
    peers = Peers(settings, {"demo": fakes.FakePool(verifier)}, {"mamba": fakes.FakePool(drafter)})
    router = Ingress(settings, peers, MemorySessions(), SERVED)

    async def turn(speculation: pb.Speculation, session: str = "") -> pb.GenerateComplete:
        ids = pb.TokenIds(ids=[5, 6, 7])
        request = pb.GenerateRequest(
            token_ids=ids, max_new_tokens=5, speculation=speculation, keep_session=keep, session=session
        )
        return [event async for event in router.generate(request)][-1].complete

    first = await turn(OFF)
    assert (drafter.opens, drafter.closes, verifier.opens) == (0, 0, 1)
    assert not first.HasField("drafter")
    second = await turn(CHAIN, first.session)
    assert (drafter.opens, drafter.closes, verifier.opens) == (1, 1, 2)
    assert second.drafter.processed_tokens == second.usage.prompt_tokens - 1


def toy_ingress(drafter: str, proposers: Sequence[str], arms: Sequence[str] = ()) -> Ingress:
    """An ingress with real handles. drafter: "works", "dead" (no replica) or "none" (not configured)"""
    drafters = {"mamba": {"checkpoint": "mamba"}} if drafter != "none" else {}
    # Without `off`, each round asks for a tree on a slow machine too.
    arms = arms or (["proposed(7)", "proposed(4)"] if drafter == "none" else ["(1,1,1)", "(2,1)"])
    settings = config(drafters=drafters, speculation={"proposers": list(proposers), "arms": list(arms)})
    pool = fakes.EmptyPool() if drafter == "dead" else fakes.FakePool(fakes.FakeDrafter())
    peers = Peers(settings, {"demo": fakes.FakePool(fakes.FakeVerifier())}, dict.fromkeys(drafters, pool))
    return Ingress(
        settings, peers, MemorySessions(), SERVED, clock=(count / 1000 for count in itertools.count()).__next__
    )


@pytest.fixture
def equal_times(monkeypatch):
    """A call of a fake takes a tenth of a millisecond, and by the clock of `toy_ingress` a round at least a whole one:
    what an answer's rounds choose does not depend on the machine."""
    monkeypatch.setattr(fakes, "time", SimpleNamespace(perf_counter_ns=itertools.count(step=100_000).__next__))


async def toy_answer(router: Ingress, speculation: pb.Speculation, count: int, temperature: float = 0.0):
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        max_new_tokens=count,
        sampling=pb.Sampling(temperature=temperature, seed=3),
        speculation=speculation,
    )
    events = [event async for event in router.generate(request)]
    return [token for event in events for token in event.chunk.token_ids], events[-1].complete.speculation


def repeating(ids: Sequence[int], sampling: Sampling) -> int:
    """A target that repeats the same eleven tokens."""
    return (7 * len(ids)) % 11


@pytest.mark.parametrize("drafter", ["works", "dead", "none"])
@pytest.mark.parametrize("proposers", [(), ("lookup",), ("suffix",), ("lookup", "suffix")], ids="+".join)
@pytest.mark.parametrize("target", [fakes.toy_token, repeating], ids=["any text", "repeating"])
async def test_proposals_change_no_token_and_need_no_drafter(monkeypatch, equal_times, drafter, proposers, target):
    monkeypatch.setattr(fakes, "toy_token", target)
    router, sampling = toy_ingress(drafter, proposers), Sampling(temperature=0.8, seed=3)
    for _ in range(2):  # in the second, proposers have the first answer
        tokens, stats = await toy_answer(router, pb.Speculation(), 200, 0.8)
        assert tokens == fakes.plain([5, 6, 7], 200, sampling)
    if drafter != "works":
        assert stats.late_drafts == (stats.rounds - stats.rounds_by_shape["off"] if drafter == "dead" else 0)
    if proposers and target is repeating:
        assert stats.rounds < 100
    if drafter != "works" and not proposers:
        assert stats.rounds == 200 and stats.drafted_tokens == 0


async def test_a_fixed_drafted_shape_gets_no_proposals(monkeypatch):
    monkeypatch.setattr(fakes, "toy_token", repeating)
    one = pb.Speculation(mode=pb.Speculation.MODE_FIXED, shape="(1)")
    tokens, stats = await toy_answer(toy_ingress("works", ("lookup", "suffix")), one, 100)
    assert tokens == fakes.plain([5, 6, 7], 100)
    assert stats.drafted_tokens <= stats.rounds
    _, off = await toy_answer(toy_ingress("none", ("lookup", "suffix")), OFF, 100)
    assert off.rounds == 100 and off.drafted_tokens == 0
    with pytest.raises(BadRequest, match="no drafter"):
        await toy_answer(toy_ingress("none", ("lookup", "suffix")), one, 100)


async def test_no_drafter_is_asked_where_proposals_suffice(monkeypatch, equal_times):
    """In the second answer, when the costs of both kinds of rounds are measured."""
    monkeypatch.setattr(fakes, "toy_token", repeating)
    router = toy_ingress("works", ("lookup",), ["proposed(15)", "(1,1,1)"])
    for _ in range(2):
        tokens, stats = await toy_answer(router, pb.Speculation(), 200)
        assert tokens == fakes.plain([5, 6, 7], 200)
    assert stats.rounds_by_shape["proposed(15)"] > stats.rounds / 2 and stats.rounds < 40


async def test_a_fixed_proposed_shape_asks_no_drafter_and_is_counted_as_requested(monkeypatch):
    monkeypatch.setattr(fakes, "toy_token", repeating)
    router = toy_ingress("works", ("lookup",))
    fixed = pb.Speculation(mode=pb.Speculation.MODE_FIXED, shape="proposed(5)")
    tokens, stats = await toy_answer(router, fixed, 100)
    assert tokens == fakes.plain([5, 6, 7], 100)
    assert dict(stats.rounds_by_shape) == {"proposed(5)": stats.rounds} and 30 > stats.rounds >= 100 // 6
    assert stats.drafted_tokens <= 5 * stats.rounds and (stats.late_drafts, stats.draft_us) == (0, 0)


@pytest.mark.parametrize("most", [0, 3, 5])
async def test_proposals_stay_within_max_nodes(monkeypatch, most):
    monkeypatch.setattr(fakes, "toy_token", repeating)
    tokens, stats = await toy_answer(toy_ingress("none", ("lookup", "suffix")), pb.Speculation(max_nodes=most), 100)
    assert tokens == fakes.plain([5, 6, 7], 100)
    assert stats.drafted_tokens <= most * stats.rounds
    assert most == 0 or stats.rounds < 100


async def test_handles_are_closed_with_the_whole_text_before_complete():
    peers = EdgePeers()
    async for event in ingress(peers).generate(pb.GenerateRequest(text=PROMPT, max_new_tokens=5)):
        if event.WhichOneof("event") == "complete":
            assert sorted(peers.closed) == sorted(
                (kind, (*IDS, *plain_answer(IDS, Sampling(), 5))) for kind in ("drafter", "verifier")
            )


# Sessions, on both stores


@pytest.fixture(params=["memory", "redis"])
async def sessions(request: pytest.FixtureRequest) -> AsyncIterator[Sessions]:
    if request.param == "memory":
        yield MemorySessions()
        return
    store = RedisSessions(request.getfixturevalue("redis_url"), ttl_s=60)
    yield store
    await store.close()


async def test_a_second_turn_continues_from_the_whole_text_with_the_sessions_seed(sessions: Sessions):
    peers = EdgePeers()
    async with edge(peers, sessions) as client:
        one = await client.generate_text(PROMPT, keep_session=True, temperature=1.0, max_new_tokens=9)
        two = await client.generate_text(" and", session=one.complete.session, temperature=1.0, max_new_tokens=9)
        three = await client.generate_text([5], session=one.complete.session, max_new_tokens=2)
    sampling = Sampling(temperature=1.0, seed=one.started.seed)
    text = [*IDS, *one.token_ids, *b" and"]
    assert two.started.seed == one.started.seed
    assert list(two.token_ids) == plain_answer(text, sampling, 9)
    assert peers.texts[1].marks == (len(IDS) + 9,)
    assert peers.texts[2].marks == (len(IDS) + 9, len(text) + 9)
    assert three.complete.prompt_tokens == len(text) + 9 + 1


async def test_the_record_is_written_before_complete_is_sent(sessions: Sessions):
    request = pb.GenerateRequest(text=PROMPT, keep_session=True, max_new_tokens=3, request_id="r")
    async for event in ingress(EdgePeers(), sessions).generate(request):
        if event.WhichOneof("event") == "complete":
            record = await sessions.read(event.complete.session, "")
            assert list(record.tokens) == IDS + plain_answer(IDS, Sampling(), 3)
            (turn,) = record.turns
            assert (turn.request, turn.start, turn.prompt, turn.end) == ("r", 0, len(IDS), len(record.tokens))
            assert record.version == 1


async def test_of_two_concurrent_turns_of_a_session_one_is_aborted(sessions: Sessions):
    peers = EdgePeers()
    async with edge(peers, sessions) as client:
        token = (await client.generate_text(PROMPT, keep_session=True, max_new_tokens=2)).complete.session
        # Both have read the record before one writes its turn.
        peers.before_round = partial(until, lambda: len(peers.texts) == 3)
        turns = await asyncio.gather(
            *(client.generate_text(f"{turn}", session=token, max_new_tokens=4) for turn in range(2)),
            return_exceptions=True,
        )
    assert sorted(type(turn).__name__ for turn in turns) == ["Completion", "Conflict"]
    assert any(isinstance(turn, Conflict) for turn in turns)


async def test_an_unknown_session_and_one_of_another_tenant_give_the_same_error(sessions: Sessions):
    async with (
        serving(None, sessions) as address,
        AsyncClient(address, tenant="a") as ours,
        AsyncClient(address, tenant="b") as theirs,
    ):
        token = (await ours.generate_text(PROMPT, keep_session=True, max_new_tokens=2)).complete.session
        messages = set()
        for client, name in ((theirs, token), (ours, token[:-1] + "_"), (ours, "../x"), (ours, "a.b"), (ours, "é.é")):
            with pytest.raises(NotFound) as lost:
                await client.generate_text(PROMPT, session=name)
            messages.add(str(lost.value))
        assert len(messages) == 1
        assert (await ours.generate_text("on", session=token, max_new_tokens=1)).token_ids


async def test_an_answer_whose_complete_was_lost_is_read_from_the_record_without_a_round(sessions: Sessions):
    peers = EdgePeers()
    async with edge(peers, sessions) as client:
        token = (await client.generate_text(PROMPT, keep_session=True, max_new_tokens=2)).complete.session
        turn: dict[str, Any] = {"session": token, "request_id": "turn-2", "max_new_tokens": 6}
        two = await client.generate_text(" on", **turn)
        rounds = peers.rounds
        again = await client.generate_text(" on", **turn)
    assert again.token_ids == two.token_ids and again.text == two.text
    assert again.complete.session == token and peers.rounds == rounds


async def test_a_session_cannot_change_its_model():
    async with edge() as client:
        token = (await client.generate_text(PROMPT, keep_session=True, max_new_tokens=2)).complete.session
        with pytest.raises(BadRequest, match="model"):
            await client.generate_text(PROMPT, session=token, model="another")


async def test_a_request_for_a_session_fails_with_the_reason_while_redis_is_gone_and_others_succeed():
    with RedisServer(memory_mb=16) as redis:
        sessions = RedisSessions(redis.url, ttl_s=60, budget_s=0.2)
        peers = EdgePeers()
        router = ingress(peers, sessions)
        request = pb.GenerateRequest(text=PROMPT, keep_session=True, max_new_tokens=12, speculation=OFF)
        stream, _, held = await begin(router, request, 3)
        redis.stop()
        with pytest.raises(PeerLost, match="session: the store"):
            async for event in stream:
                held += event.chunk.token_ids
        assert held == plain_answer(IDS, Sampling(), 12)
        rounds = peers.rounds
        with pytest.raises(PeerLost, match="session: the store"):
            await anext(router.generate(request))
        assert peers.rounds == rounds, "it is refused before any work"
        request.keep_session = False
        done = [event async for event in router.generate(request)]
        assert token_ids_of(done) == held and done[-1].complete.session == ""
        await sessions.close()


class UnsureSessions(MemorySessions):
    """A store whose next writes are made or not, and have no answer; the next reads fail too."""

    def __init__(self, made: bool, writes: int, reads: int = 0) -> None:
        super().__init__()
        self.made, self.writes, self.reads = made, writes, reads
        self.written = 0
        self.last = ""  # the token of the last write

    async def read(self, token: str, tenant: str) -> Record:
        if self.written and self.reads:
            self.reads -= 1
            raise PeerLost("session: the store does not answer")
        return await super().read(token, tenant)

    async def write(self, token: str, tenant: str, record: Record) -> None:
        self.last = token
        if not self.writes:
            await super().write(token, tenant, record)
            self.written += 1
            return
        self.writes -= 1
        if self.made:
            await super().write(token, tenant, record)
        self.written += 1
        raise PeerLost("session: the store does not answer")


@pytest.mark.parametrize("made", [True, False], ids=["made", "not made"])
async def test_a_write_without_an_answer_is_read_back_and_made_if_it_was_not(made: bool):
    store = UnsureSessions(made, writes=1)
    token = await first_turn(ingress(EdgePeers(), store))
    assert (await store.read(token, "")).version == 1


@pytest.mark.parametrize("kept", [False, True], ids=["a later turn", "the first turn"])
@pytest.mark.parametrize("made", [True, False], ids=["made", "not made"])
async def test_a_write_that_stays_unknown_is_repeated_by_the_client_and_the_turn_is_in_the_record_once(
    made: bool, kept: bool
):
    store = UnsureSessions(made, writes=0)
    async with edge(EdgePeers(), store) as client:
        token = (
            "" if kept else (await client.generate_text(PROMPT, keep_session=True, max_new_tokens=3)).complete.session
        )
        store.writes, store.reads = 2, 1
        options = {"keep_session": True} if kept else {"session": token}
        done = await client.generate_text(" and", max_new_tokens=9, speculation="off", **options)
        assert not store.reads, "the read failed as well"
        earlier = [] if kept else [*IDS, *plain_answer(IDS, Sampling(), 3)]
        text = [*earlier, *b" and"]
        assert list(done.token_ids) == plain_answer(text, Sampling(), 9)
        record = await store.read(done.complete.session, "")
        assert list(record.tokens) == [*text, *done.token_ids]
        assert record.version == len(record.turns) == (1 if kept else 2)
        assert done.complete.session == store.last == (token or done.started.session)
        assert len(store._records) == 1, "no other session was begun"


async def test_an_end_of_text_token_that_the_client_has_ends_a_resumed_answer():
    peers = EdgePeers()
    request = pb.GenerateRequest(text=PROMPT, max_new_tokens=9, resume=resume_of(IDS, [65, END]))
    events = [event async for event in ingress(peers).generate(request)]
    assert [event.WhichOneof("event") for event in events] == ["started", "complete"]
    assert events[-1].complete.finish_reason == pb.FINISH_REASON_END_OF_TEXT and peers.rounds == 0


# Resumed answers: the tokens of the first attempt, or an error


def token_ids_of(events: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token for event in events for token in event.chunk.token_ids]


def resume_after(started: pb.GenerateStarted, held: Sequence[int]) -> pb.Resume:
    """The resume of a client that received `started` and the tokens `held`."""
    return pb.Resume(
        token_ids=held,
        seed=started.seed,
        prompt_tokens=started.prompt_tokens,
        prompt_digest=started.prompt_digest,
        target=started.target,
    )


async def begin(router: Ingress, request: pb.GenerateRequest, tokens: int):
    """The stream of a request, its `started`, and its first tokens."""
    stream = router.generate(request)
    started, held = (await anext(stream)).started, []
    while len(held) < tokens:
        held += (await anext(stream)).chunk.token_ids
    return stream, started, held


def turn_of(session: str, text: str, request_id: str, count: int = 9, **more: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text, session=session, request_id=request_id, max_new_tokens=count, speculation=OFF, **more
    )


async def first_turn(router: Ingress) -> str:
    """The token of a new session."""
    request = pb.GenerateRequest(text=PROMPT, keep_session=True, max_new_tokens=3, speculation=OFF)
    return [event async for event in router.generate(request)][-1].complete.session


async def test_a_broken_turn_is_not_resumed_after_another_turn_was_written(sessions: Sessions):
    """Turn A breaks after 5 tokens, turn B completes: A's next tokens would follow another text than its first ones."""
    router = ingress(EdgePeers(), sessions)
    token = await first_turn(router)
    stream, started, held = await begin(router, turn_of(token, " and", "A"), 5)
    await stream.aclose()
    [event async for event in router.generate(turn_of(token, " or", "B"))]
    before = await sessions.read(token, "")
    with pytest.raises(Conflict, match="begin the turn again"):
        await anext(router.generate(turn_of(token, " and", "A", resume=resume_after(started, held))))
    assert await sessions.read(token, "") == before
    again = [event async for event in router.generate(turn_of(token, " and", "A2"))]
    assert token_ids_of(again) == plain_answer([*before.tokens, *b" and"], Sampling(), 9)


async def test_a_resumed_turn_whose_session_was_lost_meanwhile_is_of_an_unknown_session():
    sessions = MemorySessions()
    router = ingress(EdgePeers(), sessions)
    token = await first_turn(router)
    turn = turn_of(token, " and", "A", keep_session=True)
    stream, started, held = await begin(router, turn, 5)
    await stream.aclose()
    sessions._records.clear()
    turn.resume.CopyFrom(resume_after(started, held))
    with pytest.raises(NotFound, match="there is no such session"):
        await anext(router.generate(turn))


@pytest.mark.parametrize("changed", ["prompt_tokens", "prompt_digest"])
async def test_a_resume_after_another_text_is_aborted(changed: str):
    resume = resume_of(IDS, plain_answer(IDS, Sampling(), 3))
    setattr(resume, changed, getattr(resume, changed) + 1)
    with pytest.raises(Conflict, match="begin the turn again"):
        await anext(ingress(EdgePeers()).generate(pb.GenerateRequest(text=PROMPT, resume=resume)))


async def test_an_answer_is_not_resumed_at_a_target_with_other_weights():
    peers = EdgePeers()
    router = ingress(peers)
    request = pb.GenerateRequest(text=PROMPT, max_new_tokens=9, speculation=OFF)
    stream, started, held = await begin(router, request, 4)
    await stream.aclose()
    peers.hello = replace(HELLO, fingerprint="updated weights")
    request.resume.CopyFrom(resume_after(started, held))
    rounds = peers.rounds
    with pytest.raises(Conflict, match="the target has changed"):
        await anext(router.generate(request))
    await asyncio.wait_for(peers.all_closed.wait(), 10)
    assert peers.rounds == rounds and len(peers.closed) == 4, "both handles were closed, without a round"
    request.resume.CopyFrom(resume_after(started, []))  # no token was sent yet
    events = [event async for event in router.generate(request)]
    assert events[0].started.target == peers.hello.target != started.target
    assert token_ids_of(events) == plain_answer(IDS, Sampling(), 9)


async def test_a_resume_at_an_updated_target_is_not_answered_from_a_record_of_the_old_one(
    sessions: Sessions,
):
    """The first attempt began before the update and wrote the turn; the second began after it and broke."""
    peers = EdgePeers()
    router = ingress(peers, sessions)
    token = await first_turn(router)
    request = turn_of(token, " and", "A")
    orphan, _, _ = await begin(router, request, 3)
    peers.hello = replace(HELLO, fingerprint="updated weights")
    second, started, held = await begin(router, request, 4)
    await second.aclose()
    written = [event async for event in orphan]
    assert written[-1].complete.session == token
    resumed = turn_of(token, " and", "A", resume=resume_after(started, held))
    with pytest.raises(Conflict, match="the target has changed"):
        await anext(router.generate(resumed))
    again = [event async for event in router.generate(request)]
    assert again[0].started.target == HELLO.target and token_ids_of(again)[3:] == token_ids_of(written)


@pytest.mark.parametrize("field", ["prompt_tokens", "target"])
async def test_a_resume_without_a_field_of_started_is_refused_by_its_name(field: str):
    resume = resume_of(IDS, plain_answer(IDS, Sampling(), 3))
    resume.ClearField(field)
    with pytest.raises(BadRequest) as refused:
        await anext(ingress(EdgePeers()).generate(pb.GenerateRequest(text=PROMPT, resume=resume)))
    assert refused.value.field == f"resume.{field}"


async def test_started_reports_all_fields_that_a_resume_needs(sessions: Sessions):
    """For answers from rounds, from the client's own tokens, and from the record."""
    router = ingress(EdgePeers(), sessions)
    token = await first_turn(router)
    stream, started, held = await begin(router, turn_of(token, " and", "A"), 9)
    rest = [event async for event in stream]
    assert rest[-1].complete.session == token
    repeated = [event async for event in router.generate(turn_of(token, " and", "A"))]
    resumed = [
        event async for event in router.generate(turn_of(token, " and", "A", resume=resume_after(started, held)))
    ]
    whole = pb.GenerateRequest(text=PROMPT, max_new_tokens=2, resume=resume_of(IDS, plain_answer(IDS, Sampling(), 2)))
    had = [event async for event in router.generate(whole)]
    assert repeated[0].started == started and token_ids_of(repeated) == held
    assert resumed[0].started.target == started.target and token_ids_of(resumed) == []
    assert resume_after(had[0].started, whole.resume.token_ids) == whole.resume


@pytest.mark.parametrize("orphan_first", [True, False], ids=["orphan ends first", "resume ends first"])
async def test_an_abandoned_attempt_and_its_resume_write_one_turn_without_a_conflict(
    sessions: Sessions, orphan_first: bool
):
    router = ingress(EdgePeers(), sessions)
    token = await first_turn(router)
    orphan, started, held = await begin(router, turn_of(token, " and", "A"), 3)
    resumed, _, _ = await begin(router, turn_of(token, " and", "A", resume=resume_after(started, held)), 2)
    for stream in (orphan, resumed) if orphan_first else (resumed, orphan):
        *_, last = [event async for event in stream]
        assert last.complete.session == token
    record = await sessions.read(token, "")
    before = [*IDS, *plain_answer(IDS, Sampling(), 3), *b" and"]
    assert list(record.tokens) == [*before, *plain_answer(before, Sampling(), 9)] and record.version == 2


@pytest.mark.parametrize("later", [0, 1, KEPT_TURNS - 1], ids=["last", "last but one", "oldest kept"])
async def test_a_request_begun_again_is_answered_from_its_written_turn_after_other_turns(
    sessions: Sessions, later: int
):
    """The client left after 3 tokens, the attempt wrote its turn, other turns with other seeds followed. Begun again at
    another router, from the start or from its tokens, the request writes no second turn."""
    here, peers = ingress(EdgePeers(), sessions), EdgePeers()
    there = ingress(peers, sessions)
    token = await first_turn(here)
    request = turn_of(token, " and", "A", sampling=pb.Sampling(temperature=1.0, seed=5))
    orphan, started, held = await begin(here, request, 3)
    whole = held + token_ids_of([event async for event in orphan])
    for number in range(later):
        sampling = pb.Sampling(temperature=1.0, seed=100 + number)
        [event async for event in here.generate(turn_of(token, f" {number}", f"B{number}", 2, sampling=sampling))]
    record = await sessions.read(token, "")
    again = [event async for event in there.generate(request)]
    assert again[0].started == started and token_ids_of(again) == whole and again[-1].complete.session == token
    request.resume.CopyFrom(resume_after(started, held))
    assert token_ids_of([event async for event in there.generate(request)]) == whole[3:]
    assert peers.rounds == 0 and await sessions.read(token, "") == record


@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
async def test_a_first_turn_that_is_resumed_is_in_the_session_that_started_named_once(
    sessions: Sessions, written: bool
):
    """Whether an earlier attempt wrote it or not."""
    router = ingress(EdgePeers(), sessions)
    request = pb.GenerateRequest(text=PROMPT, keep_session=True, request_id="A", max_new_tokens=9, speculation=OFF)
    stream, started, held = await begin(router, request, 3)
    if written:
        assert [event async for event in stream][-1].complete.session == started.session
        before = await sessions.read(started.session, "")
    await stream.aclose()
    request.session = started.session
    request.resume.CopyFrom(resume_after(started, held))
    rest = [event async for event in router.generate(request)]
    assert held + token_ids_of(rest) == plain_answer(IDS, Sampling(), 9)
    assert rest[-1].complete.session == started.session
    record = await sessions.read(started.session, "")
    assert record.version == 1 and (not written or record == before)


async def test_an_attempt_that_ends_after_its_turn_was_written_and_another_followed_gets_no_conflict(
    sessions: Sessions,
):
    router = ingress(EdgePeers(), sessions)
    token = await first_turn(router)
    orphan, started, held = await begin(router, turn_of(token, " and", "A"), 3)
    resumed, _, _ = await begin(router, turn_of(token, " and", "A", resume=resume_after(started, held)), 2)
    assert [event async for event in orphan][-1].complete.session == token
    [event async for event in router.generate(turn_of(token, " or", "B"))]
    record = await sessions.read(token, "")
    assert [event async for event in resumed][-1].complete.session == token
    assert await sessions.read(token, "") == record


@pytest.mark.parametrize("later", [0, 1], ids=["last", "last but one"])
async def test_a_request_id_that_wrote_a_turn_is_refused_with_another_prompt(sessions: Sessions, later: int):
    peers = EdgePeers()
    router = ingress(peers, sessions)
    token = await first_turn(router)
    answer = token_ids_of([event async for event in router.generate(turn_of(token, " and", "A"))])
    for number in range(later):
        [event async for event in router.generate(turn_of(token, " on", f"B{number}", 2))]
    rounds, record = peers.rounds, await sessions.read(token, "")
    for other in (" or", " and more", " an"):
        with pytest.raises(BadRequest) as refused:
            await anext(router.generate(turn_of(token, other, "A")))
        assert refused.value.field == "request_id"
    same = pb.GenerateRequest(token_ids=pb.TokenIds(ids=b" and"), session=token, request_id="A", max_new_tokens=9)
    assert token_ids_of([event async for event in router.generate(same)]) == answer
    assert peers.rounds == rounds and await sessions.read(token, "") == record


@pytest.mark.parametrize("first, other", [("coupled", "lenient"), ("lenient", ""), ("naive", "lenient")])
async def test_a_request_id_that_wrote_a_turn_is_refused_in_another_mode_and_answered_with_the_turns(
    sessions: Sessions, first: str, other: str
):
    """So `started` never reports the target's law for an answer that was written in mode lenient."""
    peers = EdgePeers()
    router = ingress(peers, sessions, verification_modes=["naive", "lenient"])
    token = await first_turn(router)

    def repeated(mode: str) -> pb.GenerateRequest:
        sampling = pb.Sampling(temperature=1.0, seed=5, mode=mode)
        if mode == "lenient":
            sampling.lenience = 0.5
        request = turn_of(token, " and", "A", sampling=sampling)
        if mode in ("naive", "lenient"):
            request.speculation.CopyFrom(pb.Speculation())
        return request

    events = [event async for event in router.generate(repeated(first))]
    rounds, record = peers.rounds, await sessions.read(token, "")
    with pytest.raises(BadRequest, match=f"is that of a written turn in mode {first}") as refused:
        await anext(router.generate(repeated(other)))
    assert refused.value.field == "request_id"
    again = [event async for event in router.generate(repeated(first))]
    assert again[0].started == events[0].started and token_ids_of(again) == token_ids_of(events)
    assert (again[0].started.mode, again[0].started.lossy) == (first, first == "lenient")
    assert peers.rounds == rounds and await sessions.read(token, "") == record


@pytest.mark.parametrize("other_first", [True, False], ids=["other router first", "this router first"])
@pytest.mark.parametrize("turn", [1, 2])
async def test_a_session_whose_store_loses_its_data_during_a_turn_is_written_whole_and_read_by_all_routers(
    turn: int, other_first: bool
):
    with RedisServer(memory_mb=16) as server:
        stores = [RedisSessions(server.url, ttl_s=60) for _ in range(2)]
        here, there = (ingress(EdgePeers(), store) for store in stores)
        token = await first_turn(here) if turn == 2 else ""
        request = turn_of(token, " and", "A", keep_session=True)
        stream, started, _ = await begin(here, request, 3)
        raw = redis.asyncio.Redis.from_url(server.url)
        await raw.flushall()
        if other_first:
            await first_turn(there)
        *_, last = [event async for event in stream]
        if not other_first:
            await first_turn(there)
        for router in (there, here):
            events = [event async for event in router.generate(turn_of(last.complete.session, " on", "", 2))]
            assert events[0].started.prompt_tokens > started.prompt_tokens
            last = events[-1]
        await raw.aclose()
        for store in stores:
            await store.close()


@pytest.mark.parametrize("lost", [False, True], ids=["with its data", "without its data"])
async def test_a_turn_is_kept_if_the_connection_breaks_between_compare_and_set(monkeypatch, lost: bool):
    """redis-py reports a connection broken after WATCH like a write by another client."""
    with RedisServer(memory_mb=16) as server:
        store, begin, breaks = RedisSessions(server.url, ttl_s=60), Pipeline.multi, [False, True]

        def break_and_begin(pipe: Pipeline) -> None:
            begin(pipe)
            if breaks.pop():
                with redis.Redis.from_url(server.url) as raw:
                    if lost:
                        raw.flushall()
                    raw.client_kill_filter(_type="normal", skipme=True)

        router = ingress(EdgePeers(), store)
        token = await first_turn(router)
        monkeypatch.setattr(Pipeline, "multi", break_and_begin)
        *_, last = [event async for event in router.generate(turn_of(token, " and", "A"))]
        assert last.complete.session == token and not breaks
        record = await store.read(token, "")
        before = [*IDS, *plain_answer(IDS, Sampling(), 3), *b" and"]
        assert list(record.tokens) == [*before, *plain_answer(before, Sampling(), 9)] and record.version == 2
        await store.close()


async def test_a_record_that_expires_during_a_turn_is_written_whole():
    now = 0.0
    sessions = MemorySessions(10, clock=lambda: now)
    router = ingress(EdgePeers(), sessions)
    token = await first_turn(router)
    stream, _, _ = await begin(router, turn_of(token, " and", "A"), 3)
    now = 11.0
    *_, last = [event async for event in stream]
    assert last.complete.session == token
    assert len((await sessions.read(token, "")).tokens) == len(IDS) + 3 + len(b" and") + 9
    now = 30.0
    with pytest.raises(NotFound):
        await anext(router.generate(turn_of(token, " on", "B")))
