"""Random requests to a cluster on Ray Serve, with real engines: speculation changes nothing that a client sees."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tiny_models
from dendro.answer import Mode, Options, Speculation
from dendro.client import Asking, AsyncClient
from dendro.errors import BadRequest
from dendro.text import Finish

from cluster.certify.parameters import random_options
from cluster.certify.stop_strings import drawn_stops
from cluster.config import Config
from cluster.policies import POLICIES
from cluster.running import running_cluster

COMBINATIONS = 200
AT_ONCE = 4
VOCABULARY = 256
"""Ids of parameters are below it: one for each byte, and none ends a text."""
SHAPES = ("(1,1,1)", "(2,2,1)", "nodes(2,1,1)", "beam(3,2)", "dynamic(3,3,8)", "until(0.5,6)", "until(auto,2,3,5)")
WAYS = (
    *(Speculation(policy=policy) for policy in POLICIES),
    *(Speculation.parse(shape) for shape in (*SHAPES, "other:(2,1)", "other:dynamic(2,3,5)", "proposed(7)")),
    Speculation(max_nodes=3),
    Speculation(Mode.FIXED, "(2,1)", deadline_ms=1),  # often late
)


def random_request(number: int) -> tuple[list[int], Options]:
    """A prompt, and random parameters of every kind but stop strings, which are taken from an answer."""
    rng = np.random.default_rng(number)
    tokens = int(rng.integers(8, 25))
    structured = importlib.util.find_spec("llguidance") is not None
    options = random_options(rng, tokens, VOCABULARY, structured)
    options |= {"max_new_tokens": tokens, "ignore_end": bool(rng.random() < 0.5), "seed": int(rng.integers(1 << 62))}
    if rng.random() < 0.2:
        options["n"] = int(rng.integers(2, 4))
    return rng.integers(0, VOCABULARY, int(rng.integers(2, 61))).tolist(), options


async def answered(client: Asking, prompt: Sequence[int], options: Options, way: Speculation) -> list[Any]:
    """What clients see of each answer; the error where it is refused, as where its structure cannot go on."""
    try:
        several = await client.generate_samples(prompt, speculation=way, **options)
    except BadRequest as error:
        return [str(error)]
    for done in several:
        assert not done.complete.speculation.contradictions, (way, options)
    return [
        (
            (done.token_ids, done.text, done.complete.finish, done.complete.stop_string),
            (done.logprobs, done.prompt, done.started.seed, done.complete.completion_tokens),
        )
        for done in several
    ]


async def compare(client: Asking, number: int) -> tuple[Options, list[Any]]:
    """Assert that a random request is answered alike with and without speculation. Returns its answers."""
    prompt, options = random_request(number)
    random, off = Random(number), Speculation(Mode.OFF)
    plain = await answered(client, prompt, options, off)
    if random.random() < 0.4 and not isinstance(plain[0], str) and (text := plain[0][0][1]):
        options |= {"stop": drawn_stops(text, random), "include_stop": random.random() < 0.5}
        plain = await answered(client, prompt, options, off)
    way = WAYS[number % len(WAYS)]
    assert await answered(client, prompt, options, way) == plain, (number, way, options)
    return options, plain


def settings(folder: Path) -> Config:
    """A target that one of its two drafters guesses right, as it is the same model; the other has other weights."""
    for name, seed in (("target", 0), ("other", 1)):
        (folder / name).mkdir()
        tiny_models.make_checkpoint(folder / name, seed=seed)
    model = {"dtype": "float32", "threads": 1, "max_sessions": 16, "resources": {"cpu": 0.1}}
    return Config.of(
        {
            "targets": {"target": model | {"checkpoint": "target", "max_length": 128}},
            "drafters": {"same": model | {"checkpoint": "target"}, "other": model | {"checkpoint": "other"}},
            "router": {"resources": {"cpu": 0.1}},
            "speculation": {"arms": ["off", "(1,1,1)", "(2,2,1)", "dynamic(3,3,8)", "proposed(7)"]},
            "grpc": {"port": 0},
        },
        folder,
    )


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(900)  # starting Ray and the engines alone may take more than 100 s
async def test_on_a_cluster_answers_to_200_random_requests_are_those_without_speculation(tmp_path: Path, monkeypatch):
    """Tokens, text, ending and log-probabilities, bit for bit; four requests at a time, so that texts share steps."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    used: Counter[str] = Counter()
    ends: Counter[Finish | str] = Counter()
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(client: Asking, number: int) -> None:
        async with slots:
            options, answers = await compare(client, number)
        used.update(name for name, value in options.items() if value is not None)
        ends.update("refused" if isinstance(each, str) else each[0][2] for each in answers)

    async with running_cluster(settings(tmp_path)) as address, AsyncClient(address) as client:
        await asyncio.gather(*(one(client, number) for number in range(COMBINATIONS)))
    offered = set(Options.__annotations__) - {"model", "mode", "lenience", "speculation", "request_id", "session"}
    assert offered - set(used) - {"keep_session"} <= ({"structure"} if "structure" not in used else set())
    assert ends["refused"] <= COMBINATIONS // 20 and {Finish.LENGTH, Finish.STOP_STRING, Finish.STOP_TOKEN} <= set(ends)
