"""What a cluster gives under load: closed loops of so many clients, and requests that arrive by chance.

A *block* is one way of answering at one load. Blocks of all ways follow one another in an order drawn anew for each
repetition, so that a ratio is of two blocks of the same minute.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dendro.answer import Complete, Round
from dendro.client import AsyncClient
from dendro.errors import EngineFailed

from cluster.bench.baselines import BaselineProcess
from cluster.bench.measurement import AUTO, BATCH, CONTINUOUS, OFF
from cluster.bench.statistics import Estimate, median_estimate

FIXED = "(3,2,1)"
WAYS = (OFF, FIXED, AUTO)
PERCENTILES = (50, 95, 99)
CONTINUOUS_REPETITIONS = 1
"""Of the library's `generate_batch`: a tenth as fast as the others, it would take most of the time."""
FIRST_SAMPLE_S, SAMPLE_S = 0.5, 1.0
"""When the pages in use are looked at: seldom, as each look is a call that takes its part of the machine."""

Prompt = Sequence[int]
Stats = Callable[[], Awaitable[Mapping[str, int]]]


@dataclass(slots=True)
class Block:
    """What one block came to."""

    way: str
    load: str  # "16 clients", "0.5 of capacity"
    repetition: int
    tokens: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)  # from each request to its first token
    between_s: list[float] = field(default_factory=list)  # between tokens: a chunk's wait, shared by its tokens
    guesses: int = 0  # rows below a root that were verified
    trimmed: int = 0  # and those that were left out
    pages: int = 0  # in use, the most that any look found
    shapes: Counter[str] = field(default_factory=Counter)  # rounds that asked for each
    steps_us: int = 0  # of the verifier
    forwards_us: int = 0  # of them, the model's

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds by percentile, the nearest value above."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": round(1e3 * ordered[min(len(ordered) * p // 100, len(ordered) - 1)], 2) for p in PERCENTILES}


class Loader:
    """Clients of a running cluster. Answers are greedy: the load is what is measured."""

    def __init__(self, client: AsyncClient, prompts: Sequence[Prompt], tokens: int, stats: Stats) -> None:
        self._client = client
        self._prompts = prompts
        self._tokens = tokens
        self._stats = stats

    async def closed(self, block: Block, clients: int, answers: int) -> Block:
        """Each client asks again as soon as it was answered, `answers` times."""

        async def one(place: int) -> None:
            for turn in range(answers):
                await self._answer(block, self._prompts[(place + turn * clients) % len(self._prompts)])

        return await self._timed(block, [one(place) for place in range(clients)])

    async def open(self, block: Block, per_second: float, requests: int, seed: int) -> Block:
        """Requests arrive by a Poisson process, whatever became of the earlier ones."""
        generator, at, times = random.Random(seed), 0.0, []
        for _ in range(requests):
            at += generator.expovariate(per_second)
            times.append(at)

        async def one(place: int) -> None:
            await asyncio.sleep(times[place])
            await self._answer(block, self._prompts[place % len(self._prompts)])

        return await self._timed(block, [one(place) for place in range(requests)])

    async def _timed(self, block: Block, work: Sequence[Awaitable[None]]) -> Block:
        before = await self._stats()
        looking = asyncio.ensure_future(self._look(block))
        started = time.perf_counter()
        try:
            await asyncio.gather(*work)
        finally:
            block.seconds = time.perf_counter() - started
            looking.cancel()
        await asyncio.wait({looking})
        after = await self._stats()
        block.guesses = after.get("guesses", 0) - before.get("guesses", 0)
        block.trimmed = after.get("trimmed", 0) - before.get("trimmed", 0)
        block.steps_us = after.get("step_us", 0) - before.get("step_us", 0)
        block.forwards_us = after.get("forward_us", 0) - before.get("forward_us", 0)
        return block

    async def _look(self, block: Block) -> None:
        await asyncio.sleep(FIRST_SAMPLE_S)
        while True:
            block.pages = max(block.pages, (await self._stats()).get("pages_held", 0))
            await asyncio.sleep(SAMPLE_S)

    async def _answer(self, block: Block, prompt: Prompt) -> None:
        started = last = time.perf_counter()
        count = 0
        async for event in self._client.generate(
            prompt, max_new_tokens=self._tokens, ignore_end=True, speculation=block.way
        ):
            if isinstance(event, Round):
                now = time.perf_counter()
                if count:
                    block.between_s += [(now - last) / len(event.token_ids)] * len(event.token_ids)
                else:
                    block.first_s.append(now - started)
                count, last = count + len(event.token_ids), now
            elif isinstance(event, Complete):
                block.shapes.update(event.speculation.pulls)
        if count != self._tokens:
            raise EngineFailed(f"{block.way}: {count} tokens instead of {self._tokens}")
        block.tokens += count


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is measured."""

    prompts: tuple[Prompt, ...]
    tokens: int
    clients: tuple[int, ...]
    answers: int  # of every client of a block
    arrivals: tuple[float, ...]  # of the open loops, as shares of what the largest closed one gave without speculation
    requests: int  # of every open-loop block
    repetitions: int
    seed: int

    @property
    def blocks(self) -> int:
        ours = (len(self.clients) + len(self.arrivals)) * len(WAYS)
        continuous = min(CONTINUOUS_REPETITIONS, self.repetitions)
        return (ours + len(self.clients)) * self.repetitions + len(self.clients) * continuous


async def measure_load(
    plan: LoadPlan, loader: Loader, library: BaselineProcess, step: Callable[[], None]
) -> tuple[list[Block], dict[str, str]]:
    """All blocks; and what a baseline said that could not do its part."""
    order = random.Random(plan.seed)
    blocks: list[Block] = []
    silent: dict[str, str] = {}
    for way in WAYS:  # warm-up: every way once, and the sizes of steps that a full house makes
        await loader.closed(Block(way, "warm-up", 0), max(plan.clients), 1)
    for clients in plan.clients:  # what the policy learns of a load, it learns once in a router's life
        await loader.closed(Block(AUTO, "warm-up", 0), clients, 1)
    for repetition in range(plan.repetitions):
        for clients in order.sample(plan.clients, len(plan.clients)):
            ways = (*WAYS, BATCH, CONTINUOUS) if repetition < CONTINUOUS_REPETITIONS else (*WAYS, BATCH)
            for way in order.sample(ways, len(ways)):
                block = Block(way, closed_load(clients), repetition)
                if way in WAYS:
                    blocks.append(await loader.closed(block, clients, plan.answers))
                elif way not in silent:
                    prompts = [plan.prompts[place % len(plan.prompts)] for place in range(clients)]
                    try:
                        block.tokens, block.seconds = await library.batch(way, prompts, plan.tokens)
                        blocks.append(block)
                    except EngineFailed as error:
                        silent[way] = str(error).splitlines()[0][:200]
                step()
        largest = closed_load(max(plan.clients))
        full = median(block.rate for block in blocks if block.way == OFF and block.load == largest)
        for share in plan.arrivals:
            per_second = share * full / plan.tokens
            for way in order.sample(WAYS, len(WAYS)):
                block = Block(way, open_load(share), repetition)
                seed = plan.seed + repetition  # the same arrivals for all ways
                blocks.append(await loader.open(block, per_second, plan.requests, seed))
                step()
    return blocks, silent


def closed_load(clients: int) -> str:
    return f"{clients} client{'s' if clients > 1 else ''}"


def open_load(share: float) -> str:
    return f"{share:g} of capacity"


def ratio(blocks: Sequence[Block], load: str, over: str, under: str) -> Estimate:
    """Tokens per second of one way over another's at one load, paired by repetition."""
    rates = {(block.way, block.repetition): block.rate for block in blocks if block.load == load}
    pairs = [(rates[over, each], rates[under, each]) for way, each in rates if way == over and (under, each) in rates]
    return median_estimate([high / low for high, low in pairs])


def rows_of(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """One row for each load and way, in the order of the plan."""
    rows = []
    for load in dict.fromkeys(block.load for block in sorted(blocks, key=_place)):
        for way in (*WAYS, BATCH, CONTINUOUS):
            mine = [block for block in blocks if (block.load, block.way) == (load, way)]
            if not mine:
                continue
            row: dict[str, Any] = {
                "load": load,
                "name": way,
                "tokens_per_second": median_estimate([block.rate for block in mine]).as_json(),
                "first_token_ms": percentiles([each for block in mine for each in block.first_s]),
                "between_tokens_ms": percentiles([each for block in mine for each in block.between_s]),
            }
            if way in WAYS:
                tokens = sum(block.tokens for block in mine)
                row["guesses_per_token"] = round(sum(block.guesses for block in mine) / tokens, 2)
                row["trimmed_per_token"] = round(sum(block.trimmed for block in mine) / tokens, 2)
                steps_us = sum(block.steps_us for block in mine)
                forwards_us = sum(block.forwards_us for block in mine)
                row["step_overhead"] = round(1 - forwards_us / steps_us, 4) if steps_us else None
                row["pages_in_use"] = max(block.pages for block in mine)
                shapes = sum((block.shapes for block in mine), Counter[str]())
                row["shapes"] = {name: round(pulls / shapes.total(), 3) for name, pulls in shapes.most_common()}
            if way != OFF:
                row["over_off"] = ratio(blocks, load, way, OFF).as_json()
            rows.append(row)
    return rows


def _place(block: Block) -> tuple[int, float]:
    number = float(block.load.split()[0])
    return ("client" not in block.load, number)


def aims_of(blocks: Sequence[Block], clients: Sequence[int]) -> list[dict[str, Any]]:
    """What the figures are held against."""
    aims = []

    def add(aim: str, found: Estimate, bar: float, met: bool) -> None:
        interval = [found.low, found.high]
        aims.append({"aim": aim, "value": found.median, "interval": interval, "bar": bar, "met": met})

    one = closed_load(1)
    if 1 in clients:
        found = ratio(blocks, one, AUTO, OFF)
        add("policy over off, one client", found, 1.0, found.low > 1.0)
    for load in dict.fromkeys(block.load for block in sorted(blocks, key=_place)):
        rates = {way: median(b.rate for b in blocks if (b.load, b.way) == (load, way)) for way in (OFF, FIXED)}
        better = max(rates, key=rates.__getitem__)
        found = ratio(blocks, load, AUTO, better)
        add(f"policy over the better of off and {FIXED}, {load}: {better}", found, 0.97, found.high >= 0.97)
    if 1 in clients and 16 in clients:
        off = {(b.load, b.repetition): b.rate for b in blocks if b.way == OFF}
        gains = [off[closed_load(16), each] / rate for (load, each), rate in off.items() if load == one]
        found = median_estimate(gains)
        add("off, 16 clients over one", found, 5.0, found.median >= 5.0)
    sixteen = [b for b in blocks if b.load == closed_load(16) and b.way == OFF and b.steps_us]
    if sixteen:
        found = median_estimate([1 - block.forwards_us / block.steps_us for block in sixteen])
        add("a step's own overhead, off, 16 clients", found, 0.1, found.median < 0.1)
    return aims
