"""The clients against a server whose streams break, are malformed or stall, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import grpc
import grpc.aio
import pytest
from dendro import attempts as attempts_module
from dendro.answer import REASON_KEY, Complete, Completion, Round, Started, build_request
from dendro.client import AsyncClient, Chat, Client
from dendro.errors import BadRequest, Conflict, EngineFailed, NotFound, Overloaded, PeerLost, one_line
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

WHOLE = list(range(10, 20))

Script = Callable[[int, pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateResponse]]


def started(request: pb.GenerateRequest) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id="r",
            model="m",
            seed=9,
            prompt_tokens=3,
            offset=len(request.resume.token_ids),
            prompt_digest=2**63 + 1,
            target="t",
        )
    )


def chunk(offset: int, *tokens: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateChunk(offset=offset, token_ids=tokens, text=f"<{len(tokens)}>"))


def complete(tokens: int = len(WHOLE)) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(completion_tokens=tokens))
    )


async def whole_answer(call, request, context):
    """A script: the answer at once."""
    yield started(request)
    yield chunk(0, *WHOLE)
    yield complete()


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Runs the script; records the requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls = count()
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        async for event in self.script(next(self.calls), request, context):
            yield event


@asynccontextmanager
async def serving(script: Script, options: Sequence[tuple[str, int]] = ()) -> AsyncIterator[tuple[Scripted, str]]:
    server = grpc.aio.server(options=options)
    servicer = Scripted(script)  # type: ignore[abstract] # Generate is all that is called
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def _time_flies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each look at the clock 10 s of a request's time have passed: a few calls, however long they take, use up
    100 s."""
    attempts = attempts_module.Attempts
    monkeypatch.setattr("dendro.progress.Attempts", lambda timeout_s: attempts(timeout_s, count(0.0, 10.0).__next__))


@pytest.fixture(params=["asyncio", "blocking"])
def ask(request: pytest.FixtureRequest):
    """Asks for a whole answer with the asyncio or the blocking client."""

    async def ask(address: str, timeout_s: float = 20.0, **options) -> Completion:
        if request.param == "asyncio":
            async with AsyncClient(address, tenant="t", timeout_s=timeout_s) as client:
                return await client.generate_text("p", **options)

        def blocking() -> Completion:
            with Client(address, tenant="t", timeout_s=timeout_s) as client:
                return client.generate_text("p", **options)

        return await asyncio.to_thread(blocking)

    return ask


BROKEN = [
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    None,  # the stream ends normally, but without `complete`
]


@pytest.mark.parametrize("code", BROKEN, ids=str)
async def test_a_broken_stream_is_resumed_from_its_offset_with_its_seed(ask, code: grpc.StatusCode | None):
    async def script(call, request, context):
        held = list(request.resume.token_ids)
        yield started(request)
        for offset in range(len(held), min(len(held) + 4, 10), 2):
            yield chunk(offset, *WHOLE[offset : offset + 2])
        if len(held) < 8:
            if code is not None:
                await context.abort(code, "broken")
            return
        yield complete()

    async with serving(script) as (servicer, address):
        done = await ask(address, temperature=0.5)
    assert list(done.token_ids) == WHOLE and done.text == "<2>" * 5
    assert [list(request.resume.token_ids) for request in servicer.requests] == [[], WHOLE[:4], WHOLE[:8]]
    assert [request.resume.seed for request in servicer.requests] == [0, 9, 9]
    assert len({request.request_id for request in servicer.requests}) == 1
    assert servicer.metadata[0]["dendro-tenant"] == "t"


async def test_clients_of_several_tenants_share_connections_and_the_key():
    async with serving(whole_answer) as (servicer, address), AsyncClient(address, tenant="t", key="k" * 20) as client:
        for tenant in ("one", "two", ""):
            await client.for_tenant(tenant).generate_text("p")
        await client.generate_text("p")
        assert client.for_tenant("one")._channels is client._channels
    assert [found.get("dendro-tenant", "") for found in servicer.metadata] == ["one", "two", "", "t"]
    assert {found["authorization"] for found in servicer.metadata} == {"Bearer " + "k" * 20}


async def test_a_message_that_resumes_an_answer_gets_its_rest_though_its_stream_breaks():
    async def script(call, request, context):
        held = list(request.resume.token_ids)
        yield started(request)
        yield chunk(len(held), *WHOLE[len(held) :][:3])
        if len(held) + 3 < len(WHOLE):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        yield complete()

    resuming = build_request("p")
    resuming.resume.CopyFrom(
        pb.Resume(token_ids=WHOLE[:4], seed=9, prompt_tokens=3, prompt_digest=2**63 + 1, target="t")
    )
    async with serving(script) as (servicer, address), AsyncClient(address) as client:
        events = [event async for event in client.send(resuming)]
    rounds = [event for event in events if isinstance(event, Round)]
    assert [each.offset for each in rounds] == [4, 7] and isinstance(events[-1], Complete)
    assert [token for each in rounds for token in each.token_ids] == WHOLE[4:]
    assert [list(request.resume.token_ids) for request in servicer.requests] == [WHOLE[:4], WHOLE[:7]]


async def test_a_status_after_an_answers_end_loses_none_of_several_answers():
    async def script(call, request, context):
        held = len(request.resume.token_ids)
        for sample in range(request.n or 1):
            for event in (started(request), chunk(held, *WHOLE[held:][: 4 if request.n else None])):
                event.sample = sample
                yield event
        if not request.n:
            yield complete()
        await context.abort(grpc.StatusCode.INTERNAL, "late", ((REASON_KEY, "x"),) if not request.n else ())

    async with serving(script) as (servicer, address), AsyncClient(address) as client:
        answers = await client.generate_samples("p", n=2)
    assert [list(each.token_ids) for each in answers] == [WHOLE, WHOLE] and len(servicer.requests) == 3


async def test_a_call_that_never_started_is_repeated_unchanged(ask):
    async def script(call, request, context):
        if call < 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        yield started(request)
        yield chunk(0, *WHOLE)
        yield complete()

    async with serving(script) as (servicer, address):
        assert list((await ask(address)).token_ids) == WHOLE
    assert not any(request.HasField("resume") for request in servicer.requests)


async def test_no_number_of_failures_ends_a_request_before_its_deadline(ask):
    async def script(call, request, context):
        if call < 20:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        yield started(request)
        yield chunk(0, *WHOLE)
        yield complete()

    async with serving(script) as (servicer, address):
        assert list((await ask(address)).token_ids) == WHOLE
    assert len(servicer.requests) == 21


@pytest.mark.usefixtures("_time_flies")
@pytest.mark.parametrize("where", ["closed-port", "stuck"])
async def test_at_the_deadline_the_error_has_the_reason_of_the_last_call(ask, where: str):
    async def script(call, request, context):
        yield started(request)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no verifier")

    async with serving(script) as (servicer, address):
        with pytest.raises(PeerLost, match="within 100 s; the last call: the stream broke: (no verifier|.*connect)"):
            await ask("127.0.0.1:1" if where == "closed-port" else address, timeout_s=100)
    assert bool(servicer.requests) == (where == "stuck")


@pytest.mark.usefixtures("_time_flies")
async def test_the_error_of_a_port_that_is_closed_or_speaks_http_says_where_the_address_is_found(ask):
    with pytest.raises(PeerLost, match="Connection refused: is a cluster running there. `dendro serve` prints its"):
        await ask("127.0.0.1:1", timeout_s=100)

    async def answer(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(PeerLost, match="the port is one of HTTP; `dendro serve` prints the address for gRPC first"):
            await ask(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=100)


FULL = ((REASON_KEY, "Overloaded"),)


async def test_a_call_that_a_full_router_refuses_goes_to_the_next_address(ask):
    async def full(call, request, context):
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "router: full", FULL)
        yield

    async with serving(full) as (refusing, one), serving(whole_answer) as (servicer, two):
        assert list((await ask(f"{one},{two}")).token_ids) == WHOLE
        with pytest.raises(Overloaded, match="router: full"):
            await ask(one)
    assert (len(refusing.requests), len(servicer.requests)) == (2, 1)


async def test_an_answer_that_has_begun_waits_for_a_full_router(ask):
    async def script(call, request, context):
        if 0 < call < 12:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "router: full", FULL)
        yield started(request)
        yield chunk(len(request.resume.token_ids), *WHOLE[len(request.resume.token_ids) :][:5])
        if not call:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        yield complete()

    async with serving(script) as (servicer, address):
        assert list((await ask(address)).token_ids) == WHOLE
    assert len(servicer.requests) == 13


@pytest.mark.parametrize("reason", [(), ((REASON_KEY, "OutOfTime"),)], ids=["a gateway's", "out of time"])
async def test_an_exhausted_resource_other_than_a_router_is_final(ask, reason):
    async def script(call, request, context):
        yield started(request)
        yield chunk(0, *WHOLE[:5])
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota", reason)

    async with serving(script) as (servicer, address):
        with pytest.raises(Overloaded, match="quota"):
            await ask(address)
    assert len(servicer.requests) == 1


@pytest.mark.parametrize(
    "code, kind",
    [
        (grpc.StatusCode.INVALID_ARGUMENT, BadRequest),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.ABORTED, Conflict),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.INTERNAL, EngineFailed),
    ],
    ids=str,
)
async def test_an_error_of_the_server_is_raised_at_once_as_its_dendro_error(ask, code: grpc.StatusCode, kind: type):
    async def script(call, request, context):
        await context.abort(code, "top_p: is odd", ((REASON_KEY, "x"),))
        yield started(request)

    async with serving(script) as (servicer, address):
        with pytest.raises(kind, match="top_p: is odd"):
            await ask(address)
    assert len(servicer.requests) == 1


async def test_a_message_that_is_too_large_for_the_server_is_a_bad_request(ask):
    async def script(call, request, context):
        yield started(request)

    async with serving(script, [("grpc.max_receive_message_length", 1000)]) as (servicer, address):
        with pytest.raises(BadRequest, match=r"^request: .*\(20\d\d vs. 1000\)"):
            await ask(address, stop_ids=[9] * 2000)
    assert not servicer.requests


@pytest.mark.parametrize(
    "events",
    [
        [chunk(1, 10)],
        [chunk(0, 10), chunk(0, 10)],
        [chunk(0, 10), complete(2)],
        [pb.GenerateResponse()],
        [pb.GenerateResponse(complete=pb.GenerateComplete())],
    ],
    ids=["gap", "repeat", "short", "no-event", "no-reason"],
)
async def test_an_inconsistent_stream_is_an_error_and_not_an_answer(ask, events):
    async def script(call, request, context):
        yield started(request)
        for event in events:
            yield event

    async with serving(script) as (_, address):
        with pytest.raises(EngineFailed):
            await ask(address)


@pytest.mark.parametrize("events", [[chunk(0, *WHOLE), complete()], [complete(0)]], ids=["chunk", "complete"])
async def test_a_stream_that_does_not_begin_with_started_is_an_error_that_says_so(ask, events):
    async def script(call, request, context):
        for event in events:
            yield event

    async with serving(script) as (_, address):
        with pytest.raises(EngineFailed, match=f"^stream has {events[0].WhichOneof('event')} before started$"):
            await ask(address)


async def test_an_answer_of_several_that_goes_on_after_its_end_is_an_error():
    async def script(call, request, context):
        yield started(request)
        yield chunk(0, *WHOLE)
        yield complete()
        yield chunk(10, 99)

    async with serving(script) as (_, address), AsyncClient(address) as client:
        with pytest.raises(EngineFailed, match="^stream has chunk after complete$"):
            await client.generate_samples("p", n=2)


async def test_an_answer_ends_with_complete_though_its_stream_stays_open(ask):
    async def script(call, request, context):
        async for event in whole_answer(call, request, context):
            yield event
        await asyncio.sleep(60)

    async with serving(script) as (servicer, address), asyncio.timeout(3):
        assert list((await ask(address)).token_ids) == WHOLE
    assert len(servicer.requests) == 1


async def test_a_call_whose_answer_is_complete_is_left_to_end(ask):
    """A call that is cancelled counts as a client that left."""
    left: list[bool] = []

    async def script(call, request, context):
        async for event in whole_answer(call, request, context):
            yield event
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            left.append(True)
            raise
        left.append(False)

    async with serving(script) as (_, address):
        assert list((await ask(address)).token_ids) == WHOLE
        while not left:  # noqa: ASYNC110  # the server sets no event
            await asyncio.sleep(0.01)
    assert left == [False]


@pytest.mark.parametrize("changed", ["model", "seed", "prompt_tokens", "prompt_digest", "target"])
@pytest.mark.parametrize("held", [0, 4])
async def test_a_resumed_stream_that_starts_with_other_facts_is_a_conflict(ask, changed: str, held: int):
    """The answer would mix tokens of two texts or of two targets. An answer without tokens may change its target."""

    async def script(call, request, context):
        event = started(request)
        if call:
            value = getattr(event.started, changed)
            setattr(event.started, changed, "other" if isinstance(value, str) else value + 1)
        yield event
        if call:
            yield chunk(held, *WHOLE[held:])
            yield complete()
        else:
            if held:
                yield chunk(0, *WHOLE[:held])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    async with serving(script) as (servicer, address):
        if changed == "target" and not held:
            assert list((await ask(address)).token_ids) == WHOLE
        else:
            with pytest.raises(Conflict, match=changed):
                await ask(address)
    resume = servicer.requests[1].resume
    assert (resume.prompt_tokens, resume.prompt_digest, resume.target) == (3, 2**63 + 1, "t")


async def test_a_status_arrives_whatever_characters_its_message_has(ask):
    """Repeated, since headers that are too large are dropped only sometimes."""

    async def script(call, request, context):
        yield started(request)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, one_line("prompt: " + "\N{GRINNING FACE}" * 5000))

    async with serving(script) as (_, address):
        for _ in range(8):
            with pytest.raises(BadRequest, match="prompt"):
                await ask(address)


async def test_the_deadline_holds_over_all_attempts(ask):
    async def script(call, request, context):
        yield started(request)
        await asyncio.sleep(60)

    async with serving(script) as (_, address):
        with pytest.raises(PeerLost, match="within 0.3 s"):
            await ask(address, timeout_s=0.3)


async def test_leaving_the_iteration_cancels_the_request():
    left = asyncio.Event()

    async def script(call, request, context):
        try:
            yield started(request)
            yield chunk(0, 1)
            await asyncio.sleep(60)
        finally:
            left.set()

    async with serving(script) as (_, address), AsyncClient(address) as client:
        events = client.generate("p")
        async for event in events:
            if isinstance(event, Round):
                break
        await events.aclose()
        await asyncio.wait_for(left.wait(), 5)


async def endless(call, request, context):
    """A script: an answer that begins and never ends."""
    yield started(request)
    yield chunk(0, *WHOLE)
    await asyncio.sleep(60)


async def streaming(client: AsyncClient) -> asyncio.Task[None]:
    """A task that reads an answer, of which it has a round."""
    begun = asyncio.Event()

    async def read() -> None:
        async for event in client.generate("p"):
            if isinstance(event, Round):
                begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    return reading


@pytest.mark.parametrize("closes", ["itself", "a client of another tenant"])
async def test_an_answer_of_a_client_that_is_closed_is_lost_with_an_error_and_not_asked_for_again(closes: str):
    async with serving(endless) as (servicer, address):
        client = AsyncClient(address)
        asking = await streaming(client)
        await (client if closes == "itself" else client.for_tenant("other")).close()
        with pytest.raises(PeerLost, match="^client: was closed during the call$"):
            await asking
        with pytest.raises(PeerLost, match="^client: is closed$"):
            await client.for_tenant("other").generate_text("p")
    assert len(servicer.requests) == 1


async def test_a_blocking_client_that_is_closed_while_it_streams_opens_no_further_channel():
    async with serving(endless) as (servicer, address):
        client = Client(address)
        events = client.generate("p")
        for _ in range(2):
            await asyncio.to_thread(next, events)
        await asyncio.to_thread(client.close)
        with pytest.raises(PeerLost, match="^client: (was closed during the call|is closed)$"):
            await asyncio.to_thread(next, events)
        with pytest.raises(PeerLost, match="^client: is closed$"):
            await asyncio.to_thread(client.models)
    assert len(servicer.requests) == 1 and not client._channels.drain()


async def test_a_task_that_is_cancelled_stays_cancelled_though_its_client_is_closed():
    async with serving(endless) as (_, address):
        client = AsyncClient(address)
        asking = await streaming(client)
        asking.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_events_are_typed_and_in_order():
    async with serving(whole_answer) as (_, address), AsyncClient(address) as client:
        kinds = [type(event) async for event in client.generate([1, 2])]
    assert kinds == [Started, Round, Complete]


@pytest.mark.parametrize(
    "field, options",
    [("top_k", {"top_k": -1}), ("seed", {"seed": 2**64}), ("max_new_tokens", {"max_new_tokens": -5})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_number_that_its_field_cannot_hold_is_refused_by_name(field: str, options: dict):
    with pytest.raises(BadRequest) as refused:
        build_request("p", **options)
    assert refused.value.field == field


@pytest.mark.parametrize("value", ['{"enable_thinking": false}', 5, b"{}"], ids=str)
@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools"])
def test_a_part_of_a_conversation_that_is_of_another_kind_is_refused_by_name(field: str, value: object):
    made: dict[str, Any] = {field: value}
    with pytest.raises(BadRequest, match=f"^{field}: must be a (mapping|sequence)"):
        build_request(Chat([{"role": "user", "content": "a"}], **made))


def test_a_misspelt_option_fails():
    with pytest.raises(TypeError):
        build_request("p", temprature=1.0)  # type: ignore[call-arg]


def test_an_option_that_is_left_out_is_absent_and_zero_is_not():
    assert not build_request("p").sampling.HasField("temperature")
    assert build_request("p", temperature=0.0).sampling.HasField("temperature")
    assert build_request("p", max_new_tokens=0).HasField("max_new_tokens")
