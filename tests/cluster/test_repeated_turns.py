"""A written turn that is asked for again, verbatim or resumed anywhere, gives the same answer and writes nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from dendro.answer import Completion, build_request, collect
from dendro.errors import BadRequest
from dendro.progress import AnswerProgress
from dendro.state import MemoryStates
from dendro.v1 import generation_pb2 as pb

from cluster.certify.parameters import random_options
from cluster.certify.stop_strings import drawn_stops
from cluster.config import Config
from cluster.peers.pools import LocalPeers
from cluster.router.ingress import Ingress
from cluster.sessions import KEPT_TURNS, RedisSessions
from tests.support import tiny_models

TOKENS = 12
TURNS = KEPT_TURNS
STRUCTURED = importlib.util.find_spec("llguidance") is not None


@pytest.fixture
async def router(redis_url: str, tmp_path) -> AsyncIterator[Ingress]:
    tiny_models.make_checkpoint(tmp_path, "llama", 0)
    config = Config.of({"targets": {"demo": {"checkpoint": ".", "dtype": "float32"}}}, tmp_path)
    peers, sessions = LocalPeers.load(config, MemoryStates()), RedisSessions(redis_url, 600, budget_s=60)
    await peers.start()
    yield Ingress(config, peers, sessions)
    await peers.close()
    await sessions.close()


async def answered(router: Ingress, request: pb.GenerateRequest) -> Completion:
    progress = AnswerProgress(request)
    events = [progress.take(message) async for message in router.generate(request)]
    return collect([event for event in events if event is not None])


def seen(done: Completion) -> tuple[object, ...]:
    """What a client has of an answer."""
    complete, started = done.complete, done.started
    facts = (started.seed, started.prompt_tokens, started.prompt_digest, started.target, started.mode)
    ended = (complete.finish, complete.stop_string, complete.completion_tokens, complete.session)
    predicted = (complete.accepted_prediction_tokens, complete.rejected_prediction_tokens)
    return done.token_ids, done.text, done.logprobs, done.prompt, facts, ended, predicted


@dataclass
class WrittenTurn:
    """A request that wrote a turn, and its answer."""

    request: pb.GenerateRequest
    done: Completion


def random_turn(rng: np.random.Generator, session: str, number: int) -> pb.GenerateRequest:
    options = random_options(rng, TOKENS, 256, STRUCTURED)
    options |= {"max_new_tokens": TOKENS, "speculation": "off", "request_id": f"turn-{number}"}
    if rng.random() < 0.5:
        options["ignore_end"] = True
    if rng.random() < 0.3:
        options["seed"] = int(rng.integers(1 << 62))
    options |= {"session": session} if session else {"keep_session": True}
    if number % 2:
        options["prediction"] = "a predicted answer"
    return build_request(rng.integers(0, 256, int(rng.integers(1, 20))).tolist(), **options)


async def write_turn(router: Ingress, rng: np.random.Generator, session: str, number: int) -> WrittenTurn | None:
    """None where it is refused, as where its structure cannot go on."""
    request = random_turn(rng, session, number)
    try:
        done = await answered(router, request)
        if done.text and rng.random() < 0.6:  # a turn of its own that stop strings end, often before min_new_tokens
            request.request_id += "-stopped"
            request.session = done.complete.session
            request.keep_session = False
            request.stop.extend(drawn_stops(done.text, Random(number)))
            request.include_stop = bool(rng.random() < 0.5)
            request.sampling.seed = done.started.seed
            done = await answered(router, request)
    except BadRequest:
        return None
    request.session, request.keep_session = done.complete.session, False
    return WrittenTurn(request, done)


async def check_again(router: Ingress, written: WrittenTurn, rng: np.random.Generator) -> None:
    again = await answered(router, written.request)
    assert seen(again) == seen(written.done), written.request
    held = int(rng.integers(0, len(written.done.token_ids) + 1))
    started, request = written.done.started, pb.GenerateRequest()
    request.CopyFrom(written.request)
    request.resume.CopyFrom(
        pb.Resume(
            token_ids=written.done.token_ids[:held],
            seed=started.seed,
            prompt_tokens=started.prompt_tokens,
            prompt_digest=started.prompt_digest,
            target=started.target,
        )
    )
    tokens: list[int] = []
    logprobs = 0
    async for message in router.generate(request):
        tokens += message.chunk.token_ids
        logprobs += len(message.chunk.logprobs)
        last = message
    assert tuple(tokens) == written.done.token_ids[held:], request
    assert logprobs == (len(tokens) if request.HasField("logprobs") else 0)
    assert last.complete.usage.completion_tokens == len(written.done.token_ids)
    assert (last.complete.session, last.complete.stop_string) == (
        written.done.complete.session,
        written.done.complete.stop_string,
    )


@pytest.mark.parametrize("seed", [1, 4, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 15))])
async def test_a_written_turn_repeated_or_resumed_anywhere_gives_the_same_answer_and_writes_nothing(
    router: Ingress, seed: int
):
    """Random turns of a session, each asked for again at once and after later turns, with other sample indices."""
    rng = np.random.default_rng(seed)
    session, kept = "", []
    for number in range(2 * TURNS):
        written = await write_turn(router, rng, session, number)
        if written is None:
            continue
        session = written.done.complete.session
        kept = [*kept, written][-TURNS // 2 :]
        record = await router.turns._sessions.read(session, "")
        for each in {id(each): each for each in (kept[-1], kept[int(rng.integers(len(kept)))])}.values():
            await check_again(router, each, rng)
        assert await router.turns._sessions.read(session, "") == record
    assert len(kept) == TURNS // 2
