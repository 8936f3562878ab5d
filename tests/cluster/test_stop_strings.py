"""Stop strings of requests: over a real socket with fake peers, and on real engines in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import grpc.aio
import pytest
from dendro.answer import Completion
from dendro.client import AsyncClient
from dendro.errors import BadRequest
from dendro.options import MAX_STOP_BYTES
from dendro.text import Finish, Sampling
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

from cluster.api.grpc import serve_router
from cluster.api.local import LocalClient
from cluster.config import Config
from cluster.router.ingress import AHEAD, Ingress
from cluster.running import local_client
from cluster.sessions import MemorySessions
from tests.support import edge, tiny_hybrids, tiny_mamba
from tests.support.edge import END, ByteTokenizer, EdgePeers, ingress, plain_answer, resume_of
from tests.support.stop_oracle import ended

PROMPT = "walk the "
IDS = list(PROMPT.encode())
COUNT = 60
WAYS = ("off", "(1,1,1)", "3,2,1", "auto")


@asynccontextmanager
async def serving(router: Ingress) -> AsyncIterator[AsyncClient]:
    server = await serve_router(router)
    try:
        async with AsyncClient(server.address) as client:
            yield client
    finally:
        await server.stop()


def cut(ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str, str]:
    """Tokens, text and stop string of an answer."""
    return ended(ByteTokenizer(), ids, stops, included=False)


def text_of_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def substrings(ids: Sequence[int], count: int, seed: int) -> list[str]:
    """Substrings of one to five characters of an answer's text, none with an incomplete character."""
    draw, text, found = Random(seed), text_of_bytes(ids), []
    while len(found) < count:
        place = draw.randrange(len(text))
        each = text[place : place + draw.randint(1, 5)]
        if "\N{REPLACEMENT CHARACTER}" not in each:
            found.append(each)
    return found


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch):
    """The fake target emits letters, none of them a part of a longer character."""

    def next_letter(ids: Sequence[int], sampling: Sampling) -> int:
        return 97 + edge_token(ids, sampling) % 26

    edge_token = edge.next_token
    monkeypatch.setattr(edge, "next_token", next_letter)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_answers_end_at_the_same_token_and_character_with_every_speculation(temperature: float):
    """At substrings of the known answer, alone and two at once: where the whole answer has the first of them."""
    whole = plain_answer(IDS, Sampling(temperature=temperature, seed=7), COUNT)
    found = substrings(whole, 10, seed=1)
    router = ingress(EdgePeers())
    for stops in [*([each] for each in found), *zip(found, found[1:], strict=False), ["no such text"]]:
        count, text, stop = cut(whole, stops)
        for way in WAYS:
            done = await LocalClient(router).generate_text(
                PROMPT, speculation=way, temperature=temperature, seed=7, max_new_tokens=COUNT, stop=stops
            )
            assert list(done.token_ids) == whole[:count], (stops, way)
            assert (done.text, done.complete.stop_string) == (text, stop), (stops, way)
            assert done.complete.finish is (Finish.STOP_STRING if stop else Finish.LENGTH)
            assert done.complete.completion_tokens == count
            assert done.complete.speculation.contradictions == ()
            again = await LocalClient(router).generate_text(
                PROMPT, speculation=way, temperature=temperature, seed=7, max_new_tokens=COUNT, stop=stops,
                include_stop=True,
            )  # fmt: skip
            assert (again.token_ids, again.text) == (done.token_ids, text + stop)


@pytest.mark.usefixtures("letters")
async def test_a_stop_string_in_the_middle_of_a_round_drops_the_rest_of_the_verdict():
    whole = plain_answer(IDS, Sampling(), 8)
    stop = bytes(whole[3:6]).decode()  # begins in the first round of four tokens, ends in the middle of the second
    peers = EdgePeers()
    async with serving(ingress(peers)) as client:
        done = await client.generate_text(PROMPT, speculation="(1,1,1)", max_new_tokens=40, stop=stop)
    stats = done.complete.speculation
    assert list(done.token_ids) == whole[:6] and done.text == bytes(whole[:3]).decode()
    assert [part.token_ids for part in done.rounds] == [tuple(whole[:4]), tuple(whole[4:6])]
    assert [part.text for part in done.rounds] == [bytes(whole[:3]).decode(), ""]
    assert stats.rounds == peers.rounds == 2 and stats.rounds_by_tokens == {4: 1, 2: 1}
    assert (stats.emitted_tokens, stats.cut_tokens, stats.accepted_tokens) == (6, 2, 5)
    assert stats.contradictions == ()
    assert {kind: list(text) for kind, text in peers.closed} == dict.fromkeys(
        ("verifier", "drafter"), [*IDS, *whole[:6]]
    )


@pytest.mark.usefixtures("letters")
async def test_text_that_could_begin_a_stop_string_is_sent_when_it_no_longer_can():
    """With the last token too, where the answer ends before the stop string does."""
    whole = plain_answer(IDS, Sampling(), 6)
    text = bytes(whole).decode()
    stop = text[2:4] + "!"
    done = await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, speculation="off", max_new_tokens=6, stop=stop)
    assert [part.text for part in done.rounds][:5] == [*text[:2], "", "", text[2:5]] and done.text == text
    last = await LocalClient(ingress(EdgePeers())).generate_text(
        PROMPT, speculation="off", max_new_tokens=6, stop=text[4:] + "!"
    )
    assert last.rounds[-1].text == text[4:] and last.text == text
    assert last.complete.finish is Finish.LENGTH


@pytest.mark.usefixtures("letters")
async def test_the_text_of_the_prompt_is_not_searched():
    """Nor a string that begins in the prompt and ends in the answer."""
    whole = plain_answer(IDS, Sampling(), 8)
    stops = ["walk", PROMPT, PROMPT[-2:] + bytes(whole[:1]).decode()]
    done = await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, max_new_tokens=8, stop=stops)
    assert list(done.token_ids) == whole and done.complete.finish is Finish.LENGTH


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("speculation", ["off", "(1,1,1)"])
async def test_a_stop_string_that_ends_at_the_limit_or_before_the_end_of_text_ends_the_answer(
    monkeypatch, speculation: str
):
    whole = plain_answer(IDS, Sampling(), 5)
    stop = bytes(whole[3:5]).decode()
    client = LocalClient(ingress(EdgePeers()))
    done = await client.generate_text(PROMPT, speculation=speculation, max_new_tokens=5, stop=stop)
    assert (list(done.token_ids), done.complete.finish) == (whole, Finish.STOP_STRING)
    plain_token = edge.next_token

    def then_end(ids: Sequence[int], sampling: Sampling) -> int:
        return END if len(ids) == len(IDS) + 5 else plain_token(ids, sampling)

    monkeypatch.setattr(edge, "next_token", then_end)
    done = await client.generate_text(PROMPT, speculation=speculation, max_new_tokens=9, stop=stop)
    assert (list(done.token_ids), done.complete.finish) == (whole, Finish.STOP_STRING)
    done = await client.generate_text(PROMPT, speculation=speculation, max_new_tokens=9, stop=stop + "x")
    assert (list(done.token_ids), done.complete.finish) == ([*whole, END], Finish.END_OF_TEXT)
    assert done.text == bytes(whole).decode(), "what was held back is sent"
    assert done.complete.speculation.contradictions == ()


@pytest.mark.parametrize("included", [False, True])
async def test_a_resumed_stream_continues_after_every_token_with_the_same_tokens_and_text(included: bool):
    """Tokens whose text was held back included, and the whole answer, which is then complete without a round."""
    sampling, options = Sampling(temperature=1.0, seed=3), {"temperature": 1.0, "seed": 3, "max_new_tokens": COUNT}
    whole = plain_answer(IDS, sampling, COUNT)
    for stop in substrings(whole[20:], 3, seed=2):
        stops = [stop, stop + "never", "the end"]
        router = ingress(EdgePeers())
        full = await LocalClient(router).generate_text(
            PROMPT, speculation="off", stop=stops, include_stop=included, **options
        )
        count = len(full.token_ids)
        for held in range(count + 1):
            peers = EdgePeers()
            request = pb.GenerateRequest(
                text=PROMPT,
                sampling=pb.Sampling(temperature=1.0),
                max_new_tokens=COUNT,
                stop=stops,
                include_stop=included,
                resume=resume_of(IDS, whole[:held], seed=3),
            )
            events = [event async for event in ingress(peers).generate(request)]
            chunks = [event.chunk for event in events if event.WhichOneof("event") == "chunk"]
            assert whole[:held] + [token for chunk in chunks for token in chunk.token_ids] == list(full.token_ids)
            before = "".join(part.text for part in full.rounds[:held])
            assert before + "".join(chunk.text for chunk in chunks) == full.text
            complete = events[-1].complete
            assert (complete.finish_reason, complete.stop_string) == (pb.FINISH_REASON_STOP_STRING, stop)
            assert complete.usage.completion_tokens == count
            assert held < count or peers.rounds == 0


@pytest.mark.usefixtures("letters")
async def test_a_resume_with_tokens_after_the_stop_string_is_refused():
    whole = plain_answer(IDS, Sampling(), 10)
    request = pb.GenerateRequest(text=PROMPT, stop=[bytes(whole[2:4]).decode()], resume=resume_of(IDS, whole[:5]))
    with pytest.raises(BadRequest, match="token 4 completes") as refused:
        [event async for event in ingress(EdgePeers()).generate(request)]
    assert refused.value.field == "resume.token_ids"


@pytest.mark.usefixtures("letters")
async def test_a_written_answer_is_read_from_its_record_with_the_same_text():
    client = LocalClient(ingress(EdgePeers(), MemorySessions()))
    first = await client.generate_text(PROMPT, max_new_tokens=1, keep_session=True)
    begun = {"session": first.complete.session, "max_new_tokens": 30, "request_id": "second"}
    text = [*IDS, *first.token_ids, *b"on"]
    whole = plain_answer(text, Sampling(), 12)
    stop = bytes(whole[6:8]).decode()
    done = await client.generate_text("on", stop=[stop, "zz"], **begun)
    again = await client.generate_text("on", stop=[stop, "zz"], **begun)
    assert list(again.token_ids) == list(done.token_ids) == whole[:8]
    assert again.text == done.text == bytes(whole[:6]).decode()
    assert again.complete.finish is Finish.STOP_STRING and again.complete.stop_string == stop
    assert again.complete.speculation.rounds == 0
    assert (await client.generate_text("on", stop=stop, include_stop=True, **begun)).text == done.text + stop
    for other in ("zz", bytes(whole[2:4]).decode(), ()):
        with pytest.raises(BadRequest, match="another|elsewhere") as refused:
            await client.generate_text("on", stop=other, **begun)
        assert refused.value.field == "stop"


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("speculation", WAYS)
async def test_a_session_continues_from_the_tokens_up_to_the_stop_string(speculation: str):
    sampling, client = Sampling(temperature=1.0, seed=5), LocalClient(ingress(EdgePeers(), MemorySessions()))
    options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 20, "speculation": speculation}
    whole = plain_answer(IDS, sampling, 20)
    stop = bytes(whole[4:7]).decode()
    count = cut(whole, [stop])[0]
    first = await client.generate_text(PROMPT, stop=stop, keep_session=True, **options)
    assert list(first.token_ids) == whole[:count]
    second = await client.generate_text(" and", session=first.complete.session, **options)
    assert list(second.token_ids) == plain_answer([*IDS, *whole[:count], *b" and"], sampling, 20)
    assert second.complete.prompt_tokens == len(IDS) + count + 4


async def test_a_client_that_reads_slowly_gets_the_same_texts_and_stops_the_rounds_a_few_ahead():
    whole = plain_answer(IDS, Sampling(), COUNT)
    stop = substrings(whole[40:], 1, seed=3)[0] + "\N{REPLACEMENT CHARACTER}"
    peers, texts, tokens = EdgePeers(), "", []
    request = pb.GenerateRequest(text=PROMPT, max_new_tokens=COUNT, stop=[stop, "zz"])
    request.speculation.mode = pb.Speculation.MODE_OFF
    async for event in ingress(peers).generate(request):
        await asyncio.sleep(0.001)
        assert peers.rounds <= len(tokens) + AHEAD + 3
        texts += event.chunk.text
        tokens += event.chunk.token_ids
    assert tokens == whole and texts == bytes(whole).decode(errors="replace")


@pytest.mark.parametrize(
    "field, options",
    [
        ("stop", {"stop": ["x"] * 17}),
        ("stop[0]", {"stop": ""}),
        ("stop[1]", {"stop": ["x", "y" * (MAX_STOP_BYTES + 1)]}),
        ("stop[0]", {"stop": "y" * (10 << 20)}),
        ("include_stop", {"include_stop": True}),
    ],
)
async def test_bad_stop_strings_are_refused_by_client_and_server_and_the_next_request_works(field: str, options: dict):
    async with serving(ingress(EdgePeers())) as client:
        with pytest.raises(BadRequest) as refused:
            await client.generate_text(PROMPT, **options)
        assert refused.value.field == field and len(str(refused.value)) < 120
        stops = options.get("stop", [])
        stops = [each[: 7 << 20] for each in ([stops] if isinstance(stops, str) else stops)]  # a message holds 8 MiB
        request = pb.GenerateRequest(text=PROMPT, stop=stops, include_stop=options.get("include_stop", False))
        async with grpc.aio.insecure_channel(client.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as status:
                [event async for event in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)]
        assert status.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert status.value.details().startswith(f"{field}: ") and len(status.value.details()) < 120
        assert (await client.generate_text(PROMPT, max_new_tokens=1)).token_ids


# On real engines


def text_of(ids: Sequence[int]) -> str:
    """As the tiny checkpoints' tokenizer decodes tokens after others: the token 7 is the word w7, after a space."""
    return "".join(f" w{token}" for token in ids)


async def ask(client, prompt: Sequence[int], speculation: str, temperature: float = 0.8, **options) -> Completion:
    return await client.generate_text(
        prompt, temperature=temperature, seed=7, max_new_tokens=16, ignore_end=True, speculation=speculation, **options
    )


def tiny_config(folder: Path, target: str) -> Config:
    for name, kind, seed in (("target", target, 0), ("drafter", "mamba2", 1)):
        (folder / name).mkdir()
        tiny_hybrids.make_checkpoint(folder / name, kind, seed)
    return Config.of(
        {
            "targets": {"target": {"checkpoint": "target", "dtype": "float32", "max_length": 512}},
            "drafters": {"drafter": {"checkpoint": "drafter", "dtype": "float32"}},
        },
        folder,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family", ["mamba2", *(pytest.param(each, marks=pytest.mark.long) for each in ("mamba", "bamba"))]
)
async def test_turns_after_a_cut_have_the_tokens_of_a_new_request_and_restore_the_state_of_the_cut_text(
    tmp_path: Path, family: str
):
    """For stop strings that end at several places of a round, greedy and sampled, without and with trees."""
    restored = 0
    async with local_client(tiny_config(tmp_path, family)) as client:
        for temperature in (0.0, 1.0):
            prompt = [(7 * place) % tiny_mamba.VOCABULARY for place in range(9)]
            whole = (await ask(client, prompt, "off", temperature)).token_ids
            for count in (2, 3, 5):
                stop = text_of(whole[:count])[-6:]
                kept = next(n for n in range(1, 17) if stop in text_of(whole[:n]))
                for way in ("off", "(2,2,1)"):
                    first = await ask(client, prompt, way, temperature, stop=stop, keep_session=True)
                    assert first.token_ids == whole[:kept], (count, way)
                    assert first.text + stop == text_of(whole[:kept]), (count, way)
                    assert first.complete.speculation.contradictions == ()
                    text = [*prompt, *first.token_ids]
                    second = await ask(client, [3, 4], way, temperature, session=first.complete.session)
                    plain = await ask(client, [*text, 3, 4], "off", temperature)
                    assert second.token_ids == plain.token_ids, (count, way)
                    if family != "bamba":  # a state-space target without attention
                        assert second.complete.target.restored_tokens == len(text) - 1, (count, way)
                    # None: the answer ended before its drafter had opened the text, as on a busy machine.
                    if first.complete.drafter is not None and second.complete.drafter is not None:
                        # Of the text, or of another, longer one.
                        assert second.complete.drafter.restored_tokens >= len(text) - 1, (count, way)
                        restored += 1
    assert restored > 0
