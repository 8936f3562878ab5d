"""The report of `dendro bench load` from its blocks: pairs by repetition, percentiles, rows in order, aims."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path

import pytest
from dendro.client import AsyncClient
from dendro.errors import BadRequest

from cluster.api.grpc import serve_router
from cluster.api.local import LocalClient
from cluster.measure.bench import draw
from cluster.measure.hops import hop_process
from cluster.measure.load import (
    GrpcDoor,
    LoadBlock,
    Loader,
    LoadPlan,
    measure_load,
    percentiles,
    ratio,
    rows_of,
)
from cluster.measure.load_command import BUNDLED, LOAD, LoadOptions
from cluster.measure.measurement import BATCH
from cluster.measure.ours import TenantClients, TenantRule
from cluster.measure.pairs import PairsPlan, first_minute, measure_pairs, rows_against_off
from cluster.measure.speed import OWN
from cluster.measure.targets import COSTLY, MAMBA2
from tests.support import edge


def aims_of(rows):
    return [row for aim in LOAD.aims for row in aim.judged({"rows": rows})]


def block(way, load, repetition, rate, counters=(), **more):
    counted = Counter({"step_us": 100, "forward_us": 95}) + Counter(dict(counters))
    return LoadBlock(way, load, repetition, tokens=int(rate), seconds=1.0, counters=counted, **more)


def some_blocks():
    made = []
    for repetition, factor in enumerate((1.0, 2.0, 4.0)):  # a noisy machine: pairs agree, rates do not
        for load, off, fixed, auto in (("16 clients", 600, 500, 590), ("1 client", 100, 150, 160)):
            made += [
                block("off", load, repetition, off * factor, first_s=[0.1], between_s=[0.02, 0.03]),
                block(
                    "(3,2,1)",
                    load,
                    repetition,
                    fixed * factor,
                    first_s=[0.1],
                    between_s=[0.02],
                    counters={"guesses": 300},
                ),
                block("auto", load, repetition, auto * factor, first_s=[0.1], between_s=[0.02]),
            ]
        made.append(block(BATCH, "1 client", repetition, 90 * factor))
    return made


def test_ratios_are_of_blocks_of_one_repetition():
    auto, off = (
        [each for each in some_blocks() if (each.load, each.way) == ("1 client", way)] for way in ("auto", "off")
    )
    found = ratio(auto, off[1:])
    assert (found["low"], found["median"], found["high"]) == pytest.approx((1.6, 1.6, 1.6))
    assert found["coverage"] == 0.5 and ratio(auto[:1], off[1:]) is None


def test_percentiles_are_measured_values():
    assert percentiles([0.001 * k for k in range(1, 101)]) == {"p50": 51.0, "p95": 96.0, "p99": 100.0}
    assert percentiles([]) == {}


def test_rows_are_ordered_by_load_and_every_way_has_one():
    rows = rows_of(some_blocks())
    assert [(row["load"], row["name"]) for row in rows] == [
        *(("1 client", way) for way in ("off", "(3,2,1)", "auto", BATCH)),
        *(("16 clients", way) for way in ("off", "(3,2,1)", "auto")),
    ]
    assert rows[0]["step_overhead"]["median"] == pytest.approx(0.05)
    assert [title for title, *_ in LOAD.all_tables({"rows": rows, "aims": []})] == ["1 client", "16 clients"]


def test_the_policy_is_compared_with_the_better_way_at_each_load():
    aims = {aim["aim"]: aim for aim in aims_of(rows_of(some_blocks(), judged=BUNDLED))}
    assert aims["policy over the better of off and (3,2,1), 1 client: (3,2,1)"]["value"] == pytest.approx(
        160 / 150, abs=1e-4
    )
    sixteen = aims["policy over the better of off and (3,2,1), 16 clients: off"]
    assert sixteen["value"] == pytest.approx(590 / 600, abs=1e-4)
    assert sixteen["met"]
    assert aims["off, 16 clients over one"]["value"] == pytest.approx(6.0)
    assert aims["a step's own overhead, off, 16 clients"]["met"]


def test_a_routers_time_is_of_the_processes_clock_by_round_and_compared_with_a_bare_hop():
    mine = [
        block(way, "32 clients", repetition, 100, {"router_cpu_us": us, "router_rounds": 100}, hop_us=200.0)
        for repetition in range(3)
        for way, us in (("off", 26_000), ("(3,2,1)", 50_000), ("auto", 80_000))
    ]
    assert [row["router_ms"]["median"] for row in rows_of(mine)] == pytest.approx([0.26, 0.5, 0.8])
    aims = {aim["aim"]: aim for aim in aims_of(rows_of(mine, judged=BUNDLED))}
    named = "router's processor time a round over a bare gRPC hop's, {}, 32 clients"
    off, auto = (aims[named.format(way)] for way in ("off", "auto"))
    assert (off["value"], off["bar"], off["met"]) == (pytest.approx(1.3), 1.5, True)
    assert (auto["value"], auto["bar"], auto["met"]) == (pytest.approx(4.0), 3.0, False)


async def test_a_bare_hop_is_measured_in_a_process_of_its_own():
    async with hop_process() as hop_us:
        assert await hop_us(4) > 0


class Instant:
    """A loader and a library that answer at once."""

    async def closed(self, block, clients, answers):
        block.tokens, block.seconds = 100 * clients, 1.0
        block.between_s, block.first_s = [0.02], [0.1]
        block.shapes.update({"off": 3, "(1,1)": 1})
        return block

    async def open(self, block, per_second, requests, seed):
        return await self.closed(block, 1, 1)

    def length(self, number):
        return 8 - number % 2

    async def call(self, way, prompts, tokens):
        assert tokens == 8
        return {"tokens": tokens * len(prompts), "seconds": 1.0}


async def test_every_way_is_measured_at_every_load_and_every_block_is_counted(tmp_path):
    plan = LoadPlan(((1, 2),), 8, (1, 16), 1, (0.5, 1.0), 4, repetitions=5, seed=0)
    steps = []

    async def hop_us(streams):
        return 10.0 * streams

    blocks, silent = await measure_load(plan, Instant(), Instant(), hop_us, lambda: steps.append(1))
    assert not silent
    assert len(blocks) == len(steps) == plan.blocks
    counts = {(each.way, each.load): 0 for each in blocks}
    for each in blocks:
        counts[each.way, each.load] += 1
    ours = ("off", "(3,2,1)", "auto")
    loads = ("1 client", "16 clients", "0.5 of capacity", "1 of capacity")
    assert counts == {(way, load): 5 for way in ours for load in loads} | {(BATCH, load): 5 for load in loads[:2]}
    assert {each.tokens for each in blocks if each.way == BATCH} == {8, 8 * 8 + 7 * 8}, "up to each answer's own end"
    rows = rows_of(blocks)
    assert rows[0]["shapes"] == {"off": 0.75, "(1,1)": 0.25}
    draw(LOAD.plots, {"rows": rows}, tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 10_000


async def test_the_policy_is_compared_with_off_in_alternating_blocks_each_load_from_a_fresh_router():
    routers: list[list[str]] = []

    class Recorded(Instant):
        async def closed(self, block, clients, answers):
            routers[-1].append(block.way if block.load != "warm-up" else "warm-up")
            block = await super().closed(block, clients, answers)
            block.seconds = 1.25 if (block.way, block.repetition) == ("auto", 0) else 1.0
            block.first_s = [0.9, 0.106 if block.way == "auto" else 0.1, 0.05]
            return block

    @asynccontextmanager
    async def fresh_router(temperature):
        routers.append([])
        yield Recorded()

    plan = PairsPlan(("auto", "off"), {" at 0": 0.0, " at 0.8": 0.8}, (1, 32), 1, pairs=3)
    steps = []
    blocks = await measure_pairs(plan, fresh_router, lambda: steps.append(1))
    assert routers == [["warm-up", "auto", "off", "off", "auto", "auto", "off"]] * 4
    assert len(blocks) == len(steps) == plan.blocks
    aims = {aim["aim"]: (aim["value"], aim["met"]) for aim in aims_of(rows_against_off(blocks))}
    for load in ("1 client at 0", "32 clients at 0", "1 client at 0.8", "32 clients at 0.8"):
        assert aims[f"policy over off, {load}"] == (1.0, True)
        assert aims[f"policy over off, {load}, first 3 s"] == (pytest.approx(3 / 3.25, abs=1e-4), False)
        assert aims[f"first token of the policy over that of off, {load}"] == (pytest.approx(1.06), False)


async def test_the_policys_first_minute_is_measured_whole_and_judged_alone():
    class SlowMinute(Instant):
        async def closed(self, block, clients, answers):
            block = await super().closed(block, clients, answers)
            block.tokens, block.seconds = answers, 20.0
            if (block.way, block.repetition) == ("auto", 3):
                block.seconds = 100.0  # after the minute
            return block

    @asynccontextmanager
    async def fresh_router(temperature):
        yield SlowMinute()

    plan = PairsPlan(("auto", "off"), {" at 0": 0.0}, (1, 4, 64), None, pairs=2, least_s=61.0)
    steps = []
    blocks = await measure_pairs(plan, fresh_router, lambda: steps.append(1))
    assert len(blocks) == 3 * 8 and len(steps) == plan.blocks, "four pairs at each load"
    answers = {block.load: block.tokens for block in blocks}
    assert answers == {"1 client at 0": 64, "4 clients at 0": 16, "64 clients at 0": 2}
    assert first_minute(blocks[:8]) == (60.0, 1.0)


async def test_an_answers_tokens_are_timed_by_round():
    """Rounds of (1,1,1) emit 4 tokens at the toy target: the first round's are no times between tokens."""

    async def stats():
        return {}

    door = GrpcDoor(TenantClients(LocalClient(edge.ingress(edge.EdgePeers())), None), stats)
    loader = Loader(lambda way: door, [list(b"the snake")], 16)
    found = await loader.closed(LoadBlock("(1,1,1)", "2 clients", 0), clients=2, answers=1)
    assert (found.tokens, len(found.first_s), len(found.between_s)) == (32, 2, 24)
    assert min(found.first_s) > 0 and dict(found.shapes) == {"(1,1,1)": 8}


async def test_answers_stop_at_their_ends_and_a_changed_one_is_a_difference(monkeypatch):
    plain = edge.next_token
    monkeypatch.setattr(edge, "next_token", lambda ids, sampling: edge.END if len(ids) >= 30 else plain(ids, sampling))

    async def stats():
        return {}

    server = await serve_router(edge.ingress(edge.EdgePeers()))
    try:
        async with AsyncClient(server.address) as client:
            door = GrpcDoor(TenantClients(client, TenantRule.ANSWERS), stats, 1.0, to_end=True)
            whole, some = (Loader(lambda way: door, [list(b"the snake")], tokens, to_end=True) for tokens in (100, 16))
            blocks = [await whole.closed(LoadBlock(way, "1 client", 0), 1, 2) for way in ("off", "(1,1,1)")]
            await some.closed(LoadBlock("off", "1 client", 0), 1, 1)
            some.answers[0] = (*some.answers[0][:-1], 0)
            await some.closed(LoadBlock("auto", "1 client", 0), 1, 1)
    finally:
        await server.stop()
    assert blocks[0].tokens == blocks[1].tokens == 2 * whole.length(0) == 2 * (30 - len(b"the snake") + 1)
    assert (whole.identity.answers_compared, whole.identity.differences) == (3, [])
    assert [each[:25] for each in some.identity.differences] == ["1 client, auto, prompt 1:"]


def test_the_ways_of_a_users_target_have_rows_in_their_order_and_the_policy_is_judged_by_the_best():
    ways = ("off", "(1,1)", "proposed(7)", "auto")
    rates = {"off": 100, "(1,1)": 90, "proposed(7)": 110, "auto": 99}
    blocks = [block(way, "8 clients", each, rate) for each in range(5) for way, rate in reversed(rates.items())]
    assert [row["name"] for row in rows_of(blocks, ways)] == list(ways)
    over_off, over_best = aims_of(rows_of(blocks, ways, OWN))
    assert (over_off["value"], over_off["met"]) == (0.99, True)
    assert over_best["aim"] == "policy over the best fixed arm, 8 clients: proposed(7)"
    assert (over_best["value"], over_best["met"]) == (0.9, False)


@pytest.mark.parametrize("text", ["0", "1,1", "one", "4,-1"])
def test_clients_must_be_different_numbers_from_one_up(text):
    with pytest.raises(BadRequest, match="clients"):
        chosen(clients=text)
    assert chosen(clients="16,1,4").clients == (1, 4, 16)


@pytest.mark.parametrize(("target", "against_off"), [(COSTLY, False), ("both", True), (MAMBA2, True)])
def test_a_target_without_effect_is_refused(target, against_off):
    with pytest.raises(BadRequest, match="target"):
        LoadOptions(target=target, against_off=against_off)


@pytest.mark.parametrize("given", [{"tenants": TenantRule.ROWS}, {"temperatures": (0.5,)}], ids=str)
def test_an_option_of_another_run_is_refused(given):
    (name,) = given
    with pytest.raises(BadRequest, match=f"{name}: has an effect with"):
        LoadOptions(**given)
    needed = {"config": Path("own.yaml")} if name == "tenants" else {"against_off": True}
    assert getattr(LoadOptions(**given, **needed), name) == given[name]


def chosen(**given) -> LoadOptions:
    return LOAD.chosen({each.name: given.get(each.name) for each in fields(LoadOptions)}, quick=False)
