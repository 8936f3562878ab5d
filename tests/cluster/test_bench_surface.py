"""`dendro bench load --surface`: both ways in are asked alike and in turns, and each is a real server's."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import nullcontext
from dataclasses import fields

import aiohttp
import pytest
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed

from cluster.api.callers import Callers
from cluster.api.grpc import serve_router
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.api.openai.server import serve_http
from cluster.measure.load import Loader
from cluster.measure.load_command import LOAD, LoadOptions
from cluster.measure.pairs import PairsPlan, measure_pairs
from cluster.measure.surface import BARE, WHOLE, HttpDoor, bare_door, by_part, self_signed, surface_rows
from cluster.router.allowance import KeyLimits
from tests.support.edge import EdgePeers, config, ingress

PROMPTS, TOKENS = ((1, 2), (3, 4)), 4


class CountedDoor:
    """A way in that answers at once, and writes its name into a list for each block."""

    def __init__(self, name, order, text="text", tokens=4):
        self.name, self.order, self.text, self.tokens = name, order, text, tokens
        self.rounds = 0

    async def answer(self, prompt, tokens, speculation, seed):
        self.rounds += 4
        await asyncio.sleep(0)
        return by_part(f"{self.text} {seed}", self.tokens, (0.0, 0.1, 0.2))

    async def stats(self):
        return {"router_cpu_us": 100 * self.rounds, "router_rounds": self.rounds}

    async def watch(self):
        self.order.append(self.name)


async def measured(order, steps, **changed):
    """Blocks of both ways and whether their answers were the same."""
    doors = {BARE: CountedDoor(BARE, order), WHOLE: CountedDoor(WHOLE, order, **changed)}
    loader = Loader(doors.__getitem__, PROMPTS, TOKENS, speculation="off")
    plan = PairsPlan((WHOLE, BARE), {", off": loader}, (2,), answers=2, pairs=5, warm=(BARE, WHOLE))
    blocks = await measure_pairs(plan, nullcontext, lambda: steps.append(1))
    assert len(steps) == len(blocks) == plan.blocks == 10
    return blocks, loader.identity


async def test_blocks_of_both_ways_take_turns_in_changing_order_and_are_compared_in_pairs():
    order = []
    blocks, identity = await measured(order, [])
    assert order == [BARE, WHOLE] + [WHOLE, BARE, BARE, WHOLE] * 2 + [WHOLE, BARE]
    assert not identity.differences and identity.answers_compared == 2 * 2 + 10 * 4 - len(PROMPTS)
    for block in blocks:
        block.seconds = {BARE: 1.0, WHOLE: 1.25}[block.way] * (1 + block.repetition)
    bare, whole = surface_rows(blocks)
    assert whole["over_bare"]["median"] == pytest.approx(0.8) and bare["router_ms"]["median"] == pytest.approx(0.1)
    (aim,) = [row for each in LOAD.aims for row in each.judged({"rows": [bare, whole]})]
    assert (aim["value"], aim["bar"], aim["met"]) == (pytest.approx(0.8), 0.95, False)


async def test_a_text_that_differs_between_the_ways_is_a_difference_and_a_short_answer_an_error():
    _, identity = await measured([], [], text="other")
    assert len(identity.differences) == 2 + 5 * 4
    with pytest.raises(EngineFailed, match="3 tokens instead of 4"):
        await measured([], [], tokens=3)


async def test_a_real_server_answers_over_http_with_tls_and_a_key_as_a_bare_one_over_grpc(tmp_path):
    text, key = new_key("bench", "bench", KeyLimits())
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(key,)))
    tls = self_signed(tmp_path)
    sections = {"auth": {"keys": tmp_path / "keys.json"}, "tls": {"clients": tls.model_dump()}}
    full, callers = ingress(EdgePeers(), **sections), Callers(config(**sections))
    bare = await serve_router(ingress(EdgePeers()))
    whole = await serve_router(full, callers=callers)
    http = await serve_http(full, whole.requests, callers)
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=tls.certificate))
    headers = {"authorization": f"Bearer {text}"}
    try:
        async with (
            AsyncClient(bare.address) as client,
            aiohttp.ClientSession(connector=connector, headers=headers) as session,
        ):
            doors = bare_door(client, None), HttpDoor(session, None, f"https://{http.address}", "")
            answers = await asyncio.gather(*(door.answer(list(b"walk"), 12, "off", 1) for door in doors))
            with pytest.raises(EngineFailed, match="400"):
                await doors[1].answer(list(b"walk"), 12, "none", 1)
    finally:
        await asyncio.gather(http.stop(), whole.stop(), bare.stop())
    assert answers[0].output == answers[1].output
    assert answers[0].tokens == answers[1].tokens == 12
    assert len(answers[0].between_s) == 11


def test_the_surface_is_measured_on_the_costly_target_alone():
    given = {each.name: None for each in fields(LoadOptions)} | {"surface": True, "against_off": True}
    with pytest.raises(BadRequest, match="surface"):
        LOAD.chosen(given, quick=False)
