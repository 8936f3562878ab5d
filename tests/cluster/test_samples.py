"""Several answers to one prompt: each that of a request of its own, whatever breaks; the prompt is computed once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dendro import attempts as attempts_module
from dendro.answer import build_request
from dendro.client import AsyncClient, Client
from dendro.errors import BadRequest, EngineFailed, PeerLost
from dendro.options import MAX_SAMPLES
from dendro.progress import RequestProgress
from dendro.text import Sampling
from dendro.v1 import generation_pb2 as pb

from cluster.api.grpc import serve_router
from cluster.api.local import LocalClient
from cluster.config import Config
from cluster.peers.pools import Peers
from cluster.running import local_ingress
from tests.support import tiny_models
from tests.support.edge import EdgePeers, config, ingress, plain_answer, plain_logprobs, resume_of
from tests.support.fakes import FakePool, FakeVerifier, new_text

PROMPT = "walk the "
IDS = list(PROMPT.encode())


def answer_of(index: int, count: int, seed: int = 7) -> list[int]:
    return plain_answer(IDS, Sampling(temperature=0.8, seed=seed, sample_index=index), count)


@pytest.mark.parametrize("first", [None, 5, 2**32 - 4])
@pytest.mark.parametrize("speculation", ["off", "auto", "(2,1)"])
async def test_each_is_that_of_a_request_with_its_sample_index(speculation: str, first: int | None):
    peers = EdgePeers()
    server = await serve_router(ingress(peers))
    options: Any = {"temperature": 0.8, "seed": 7, "max_new_tokens": 20, "speculation": speculation, "logprobs": 1}
    try:
        async with AsyncClient(server.address) as client:
            done = await client.generate_samples(PROMPT, n=4, sample_index=first, **options)
        with Client(server.address) as blocking:
            again = await asyncio.to_thread(blocking.generate_samples, PROMPT, n=4, sample_index=first, **options)
    finally:
        await server.stop()
    assert [list(each.token_ids) for each in done] == [answer_of((first or 0) + index, 20) for index in range(4)]
    assert [list(each.logprobs) for each in done] == [plain_logprobs(IDS, each.token_ids, 1) for each in done]
    assert [each.started.sample for each in done] == [each.complete.sample for each in done] == [0, 1, 2, 3]
    assert [each.token_ids for each in again] == [each.token_ids for each in done]
    assert peers.beside[:4] == [None, *[peers.texts[0]] * 3], "the others are opened beside the first"


async def test_a_drawn_seed_is_that_of_all_and_one_answer_is_a_request_without_n():
    client = LocalClient(ingress(EdgePeers()))
    done = await client.generate_samples(PROMPT, n=3, temperature=0.8, max_new_tokens=9)
    (seed,) = {each.started.seed for each in done}
    assert [list(each.token_ids) for each in done] == [answer_of(index, 9, seed) for index in range(3)]
    (one,) = await client.generate_samples(PROMPT, n=1, temperature=0.8, seed=7, max_new_tokens=9)
    assert list(one.token_ids) == answer_of(0, 9)


async def test_their_events_are_interleaved_and_leaving_ends_the_work_of_all():
    peers = EdgePeers()
    peers.pause_s = 0.002
    seen, events = set(), LocalClient(ingress(peers)).generate(PROMPT, n=4, max_new_tokens=200, speculation="off")
    async for event in events:
        seen.add(event.sample)
        if len(seen) == 4:
            break
    await events.aclose()
    assert {text.prompt_length for text in peers.texts} == {len(IDS)}
    assert len(peers.closed) == 8 and max(len(ids) for _, ids in peers.closed) < 200, "each text, by both handles"


async def test_an_error_of_one_ends_all():
    peers = EdgePeers()
    peers.pause_s = 0.001
    with pytest.raises(PeerLost):
        async for event in LocalClient(ingress(peers)).generate(PROMPT, n=3, max_new_tokens=200, speculation="off"):
            peers.dead = peers.dead or (event.sample == 2)
    assert len(peers.closed) == 6


@pytest.mark.parametrize("broken_at", range(0, 40, 3))
async def test_a_broken_stream_is_resumed_answer_by_answer(broken_at: int, monkeypatch: pytest.MonkeyPatch):
    """The server breaks the first stream after so many events; each answer goes on by a request of its own."""
    monkeypatch.setattr(attempts_module, "FIRST_PAUSE_S", 0.001)
    router, requests = ingress(EdgePeers()), []

    class Breaking:
        config, longest_text, turns = router.config, router.longest_text, router.turns

        async def generate(self, request, tenant, allowance, traceparent):
            requests.append(request)
            first, count = len(requests) == 1, 0
            async for response in router.generate(request, tenant, allowance, traceparent):
                if first and count == broken_at:
                    raise PeerLost("router: is stopped")
                count += 1
                yield response

    server = await serve_router(Breaking())
    try:
        async with AsyncClient(server.address) as client:
            done = await client.generate_samples(
                PROMPT, n=3, temperature=0.8, max_new_tokens=8, speculation="off", logprobs=0
            )
    finally:
        await server.stop()
    (seed,) = {each.started.seed for each in done}
    assert [list(each.token_ids) for each in done] == [answer_of(index, 8, seed) for index in range(3)]
    assert all(len(each.logprobs) == 8 for each in done)
    assert requests[0].n == 3 and all(not each.HasField("n") for each in requests[2 if not broken_at else 1 :])


@pytest.mark.parametrize(
    "field, options",
    [
        ("n", {"n": 0}),
        ("n", {"n": MAX_SAMPLES + 1}),
        ("n", {"n": 2**32 - 1}),
        ("n: is 2, but a session", {"n": 2, "keep_session": True}),
        ("n: is 2, but a session", {"n": 2, "session": "anything"}),
        ("sample_index", {"n": 2, "sample_index": 2**32 - 1}),
        ("temperature", {"n": 2, "temperature": -1.0}),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_its_field(field: str, options: dict[str, Any]):
    peers = EdgePeers()
    with pytest.raises(BadRequest, match=f"^{field}"):
        [each async for each in ingress(peers).generate(build_request(PROMPT, **options))]
    assert not peers.texts


async def test_a_resume_of_several_and_a_call_for_one_answer_are_refused():
    request = build_request(PROMPT, n=2)
    request.resume.CopyFrom(resume_of(IDS))
    with pytest.raises(BadRequest, match="^n: is 2 in a resume"):
        [each async for each in ingress(EdgePeers()).generate(request)]
    with pytest.raises(BadRequest, match="^n: is 2, but this call returns one answer"):
        await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, n=2)


def test_an_event_of_an_answer_that_was_not_asked_for_is_refused_by_the_client():
    progress = RequestProgress(build_request(PROMPT, n=2), 60)
    with pytest.raises(EngineFailed, match="sample 2, which was not asked for"):
        progress.take(pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[7]), sample=2))


async def test_a_text_beside_another_is_opened_under_its_lease_and_elsewhere_where_that_has_ended():
    """Of several replicas only the one with the first text has the pages of the prompt."""
    verifier = FakeVerifier()
    pool, first, others = FakePool(verifier), new_text(), [new_text(), new_text()]
    peers = Peers(config(), {"demo": pool}, {})
    one = peers.verifier("demo", first)
    beside = [peers.verifier("demo", text, first) for text in others]
    for handle in (one, *beside):
        await handle.first_hello()
        await handle.ready()
    assert pool.leases == 1 and all(handle.opened is not None for handle in (one, *beside))
    for handle, text in zip((one, *beside), (first, *others), strict=True):
        await handle.close(text)
    late = peers.verifier("demo", text := new_text(), first)
    await late.ready()
    assert pool.leases == 2 and late.opened is not None
    await late.close(text)


@pytest.mark.slow
async def test_the_prompt_is_computed_once_and_each_answer_is_that_of_a_request_of_its_own(tmp_path: Path):
    """With a real verifier and drafter: the pages that the first answer's prompt fills are held by all."""
    tiny_models.make_checkpoint(tmp_path)
    model = {"checkpoint": str(tmp_path), "dtype": "float32"}
    served = Config.of({"targets": {"target": model | {"max_length": 512}}, "drafters": {"drafter": model}}, tmp_path)
    prompt = [(7 * at * at + 3 * at) % 250 for at in range(300)]
    options: Any = {"temperature": 0.9, "seed": 3, "max_new_tokens": 20, "ignore_end": True, "logprobs": 2}
    async with local_ingress(served) as router:
        client = LocalClient(router)
        done = await client.generate_samples(prompt, n=4, speculation="(2,1)", **options)
        targets = [each.complete.target for each in done]
        assert [each and each.restored_tokens for each in targets] == [0, 256, 256, 256]
        assert [each and each.processed_tokens for each in targets] == [299, 43, 43, 43]
        for index, one in enumerate(done):
            alone = await client.generate_text(prompt, speculation="off", sample_index=index, **options)
            assert (one.token_ids, one.logprobs) == (alone.token_ids, alone.logprobs)
        assert len({each.token_ids for each in done}) == 4
