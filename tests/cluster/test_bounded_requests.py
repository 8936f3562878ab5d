"""A request costs a router what it has, however many answers it asks for, and its entries are counted first."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import grpc
import grpc.aio
import pytest
from dendro.answer import build_request
from dendro.client import AsyncClient
from dendro.errors import BadRequest, Overloaded
from dendro.text import Sampling
from dendro.v1 import generation_pb2 as pb

from cluster.api import reading
from cluster.api.grpc import serve_router
from cluster.api.openai.answers import ChatForm, CompletionForm, ObjectWriter
from cluster.api.openai.errors import to_json
from cluster.api.places import Places
from cluster.api.reading import MOST_FIELDS, read_request
from cluster.router.stop_strings import StopAutomaton
from cluster.router.token_texts import VocabularyTexts
from tests.support.edge import MAX_LENGTH, ByteTokenizer, EdgePeers, config, ingress
from tests.support.sockets import until

PROMPT = "walk the "
LISTS: dict[str, Any] = {
    "allowed_ids": list(range(250)),
    "bad_words": [[7, token] for token in range(200)],
    "stop": ["zq" * 400 + str(at) for at in range(16)],
}


def counted(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> list[object]:
    """The objects that a method is called with, from now on."""
    called, method = [], getattr(kind, name)

    def counting(self: object, *args: object) -> None:
        called.append(self)
        method(self, *args)

    monkeypatch.setattr(kind, name, counting)
    return called


async def test_a_request_for_16_answers_is_checked_once_and_its_lists_are_shared(monkeypatch: pytest.MonkeyPatch):
    checked = counted(monkeypatch, Sampling, "__post_init__")
    automata = counted(monkeypatch, StopAutomaton, "__init__")
    peers = EdgePeers()
    request = build_request(PROMPT, n=16, temperature=0.8, sample_index=3, max_new_tokens=3, **LISTS)
    events = [event async for event in ingress(peers).generate(request)]
    assert sum(event.HasField("complete") for event in events) == 16
    assert len(checked) == len(automata) == 1
    samplings = [text.sampling for text in peers.texts]
    assert sorted(each.sample_index for each in samplings) == list(range(3, 19))
    for name in ("allowed_ids", "bad_words"):
        assert len({id(getattr(each, name)) for each in samplings}) == 1
    assert len({each.seed for each in samplings}) == 1


async def test_a_clients_message_is_not_kept_for_the_whole_answer():
    peers = EdgePeers()
    peers.pause_s = 0.001
    request = build_request(PROMPT, n=2, max_new_tokens=20)
    references, events = sys.getrefcount(request), ingress(peers).generate(request)
    async for event in events:
        if event.HasField("chunk"):
            assert sys.getrefcount(request) == references
            break
    await events.aclose()


async def test_the_servers_limit_bounds_a_request_that_names_none():
    peers = EdgePeers()
    router = ingress(peers, router={"max_new_tokens": 10})
    events = [event async for event in router.generate(build_request(PROMPT, speculation="off", ignore_end=True))]
    assert events[-1].complete.usage.completion_tokens == 10


def packed(field: int, count: int) -> bytes:
    """`sampling` with so many empty entries of a field."""
    inside = bytes([field << 3 & 127 | 2 | 128, field >> 4, 0]) * count
    return pb.GenerateRequest(sampling=pb.Sampling()).SerializeToString()[:1] + varint(len(inside)) + inside


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


MOST_BYTES = 1 << 20
PARTS = (b"\x0a" + varint(300) + b"\x07" * 300) * 300  # a list in several parts, each within a limit
NOTE = b"\xca\x3e"  # field 1001, of bytes


@pytest.mark.parametrize(
    "data, refused",
    [
        (packed(16, 100_000), f"bad_words: has too many entries; all of a request together are at most {MOST_FIELDS}"),
        (b"\xf2\x01\x00" * 100_000, "stop: has too many entries"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 100_000)).SerializeToString(),
            f"prompt.token_ids: has 100000 ids; a text has at most {MAX_LENGTH}",
        ),
        (
            pb.GenerateRequest(resume=pb.Resume(token_ids=[300] * 100_000)).SerializeToString(),
            f"resume.token_ids: has 100000 ids; a text has at most {MAX_LENGTH}",
        ),
        (
            pb.GenerateRequest(sampling=pb.Sampling(banned_ids=[7] * 200_000)).SerializeToString(),
            "banned_ids: has too many ids",
        ),
        (b"\x22" + varint(len(PARTS)) + PARTS, f"prompt.token_ids: has 600 ids; a text has at most {MAX_LENGTH}"),
        (build_request("x" * 1_500_000).SerializeToString(), "prompt: has 1500000 bytes; at most 1048576"),
        (b"\xc8\x3e\x00" * 200_000, "request: has too many entries"),
        (b"\x1a" + varint(100_000) + b"x" * 90_000, "request: is no message"),
        (b"\xff" * 100_000, "request: is no message"),
        (b"\x0b" * 100_000, "request: is no message"),
    ],
    ids=["bad words", "stop", "prompt", "resume", "banned", "parts", "text", "unknown", "cut", "no varint", "groups"],
)
def test_a_long_messages_entries_are_counted_before_it_is_parsed(
    data: bytes, refused: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reading, "_parsed", None)  # parsing would fail
    with pytest.raises(BadRequest, match=f"^{refused}"):
        read_request(pb.GenerateRequest, data, MAX_LENGTH, MOST_BYTES)


def test_all_lists_of_the_longest_request_are_read():
    request = build_request(
        [7] * 5000,
        logit_bias={token: 1.0 for token in range(1024)},
        banned_ids=range(4096),
        allowed_ids=range(4096),
        bad_words=[range(64)] * 1024,
        stop_ids=range(1024),
        stop=["x" * 1024] * 16,
    )
    request.resume.token_ids.extend([300] * 5000)
    assert read_request(pb.GenerateRequest, request.SerializeToString(), 5000, MOST_BYTES) == request
    unpacked = b"".join(b"\x78" + varint(token) for token in range(4096))  # allowed_ids, each a field of its own
    request.sampling.ClearField("allowed_ids")
    data = request.SerializeToString() + b"\x2a" + varint(len(unpacked)) + unpacked
    assert list(read_request(pb.GenerateRequest, data, 5000, MOST_BYTES).sampling.allowed_ids) == list(range(4096))


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_fields_that_this_version_does_not_know_are_dropped(size: int):
    request = build_request(PROMPT, stop_ids=[1, 2])
    inside = pb.GenerateRequest(sampling=pb.Sampling.FromString(NOTE + varint(size) + b"x" * size))
    data = request.SerializeToString() + NOTE + varint(size) + b"x" * size + inside.SerializeToString()
    request.sampling.SetInParent()
    assert (
        read_request(pb.GenerateRequest, data, MAX_LENGTH, MOST_BYTES).SerializeToString()
        == request.SerializeToString()
    )


async def test_a_malformed_message_is_refused_by_a_status():
    server = await serve_router(ingress(EdgePeers()))
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = channel
            call = stub.unary_stream("/dendro.v1.GenerationService/Generate")(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError, match="request: is no message") as refused:
                await call.read()
    finally:
        await server.stop()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_routers_limit_counts_answers():
    peers = EdgePeers()
    peers.pause_s = 0.01
    server = await serve_router(ingress(peers, router={"max_requests": 6}))
    try:
        async with AsyncClient(server.address) as client:
            with pytest.raises(BadRequest, match="^n: is 7; this router runs at most 6 answers"):
                await client.generate_samples(PROMPT, n=7)
            running = client.generate(PROMPT, n=4, max_new_tokens=400)
            await anext(running)
            assert server.stats()["running"] == 4
            refused = AsyncClient(server.address, timeout_s=5.0)
            with pytest.raises(Overloaded, match="4 answers run here, of 6"):
                await refused.generate_samples(PROMPT, n=3, max_new_tokens=4)
            assert len(await refused.generate_samples(PROMPT, n=2, max_new_tokens=4)) == 2
            await refused.close()
            await running.aclose()
            await until(lambda: server.stats()["running"] == 0)
    finally:
        await server.stop()


def test_one_tenant_cannot_take_all_places_of_a_router_and_no_tenant_can():
    places = Places(16)
    for _ in range(14):
        places.take("greedy", 1)
    with pytest.raises(Overloaded, match="the last 2 places of 16 are kept for other tenants"):
        places.take("greedy", 1)
    places.take("modest", 1)
    with pytest.raises(Overloaded, match="kept for other"):
        places.take("greedy", 1)
    places.take("another", 1)
    with pytest.raises(Overloaded, match="16 answers run here, of 16 at most"):
        places.take("late", 1)
    places.leave("greedy", 1)
    places.take("late", 1)
    places.leave("late", 1)
    assert places.taken == 15


def test_a_cluster_without_tenants_uses_all_places_of_a_router():
    places = Places(config().router.max_requests)
    for _ in range(64):
        places.take("", 16)
    with pytest.raises(Overloaded):
        places.take("", 1)


def test_a_sequence_may_be_an_iterator():
    given: dict[str, Any] = {
        "banned_ids": [1, 2], "allowed_ids": [3, 4], "stop_ids": [5], "bad_words": [[6, 7], [8]], "stop": ["a", "b"]
    }  # fmt: skip
    once: dict[str, Any] = {name: iter(value) for name, value in given.items()}
    once["bad_words"] = map(iter, given["bad_words"])
    asked = build_request(iter([9, 10]), request_id="A", **once)
    assert asked == build_request([9, 10], request_id="A", **given)


@pytest.mark.parametrize("form", [ChatForm(), CompletionForm()], ids=["chat", "completion"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_log_probabilities_take_little_more_memory_than_their_json_and_none_once_they_were_sent(form, streams):
    tokens, texts = [*b"walk"], VocabularyTexts(ByteTokenizer())
    given = [pb.TokenLogprobs(logprob=-1.5, top_ids=range(20), top_logprobs=[-each / 7 for each in range(20)])] * 4
    event = pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=tokens, text="walk", logprobs=given))
    writer, sent = ObjectWriter(form, texts, False, streams), 0
    tracemalloc.start()
    try:
        for _ in range(200):
            sent += sum(len(to_json(part)) for part in writer.take(event))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < (sent / 10 if streams else 1.5 * sent)
