"""A cluster's throughput and latency under load: closed loops of clients, and Poisson arrivals.

A *block* is one way of answering at one load. In each repetition the blocks of a load follow one another in random
order, so that the two blocks of a ratio are close in time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median
from typing import Protocol

from dendro.answer import Completion
from dendro.errors import EngineFailed

from cluster.measure.measurement import AUTO, BATCH, OFF, Step
from cluster.measure.ours import TenantClients, timed
from cluster.measure.processes import ContenderProcess
from cluster.measure.report import Row
from cluster.measure.speed import Identity
from cluster.measure.statistics import estimate

FIXED = "(3,2,1)"
WAYS = (OFF, FIXED, AUTO)
PERCENTILES = (50, 95, 99)

Prompt = Sequence[int]
Stats = Callable[[], Awaitable[Mapping[str, int]]]
HopTime = Callable[[int], Awaitable[float]]
"""Processor time in microseconds of a hop on one of so many grpc.aio streams (`hops.py`)."""


@dataclass(slots=True)
class LoadBlock:
    """The measurements of one block."""

    way: str
    load: str  # "16 clients", "0.5 of capacity"
    repetition: int
    tokens: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)  # seconds from each request to its first token
    between_s: list[float] = field(default_factory=list)  # seconds between tokens: a chunk's wait over its tokens
    shapes: Counter[str] = field(default_factory=Counter)  # requested shape -> rounds
    counters: Counter[str] = field(default_factory=Counter)  # growth of the door's counters
    hop_us: float = 0.0  # processor time of a hop on one of as many streams; 0 in open loops
    client_us: int = 0  # processor time of the bench's own process

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def router_ms(self) -> float:
        """Milliseconds of the router's process, a round of all requests."""
        rounds = self.counters["router_rounds"]
        return self.counters["router_cpu_us"] / 1e3 / rounds if rounds else 0.0


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds by percentile, the nearest value above."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": round(1e3 * ordered[min(len(ordered) * p // 100, len(ordered) - 1)], 2) for p in PERCENTILES}


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """An answer as a client saw it."""

    output: Sequence[int]  # tokens, or bytes of the text: answers to one prompt are compared
    tokens: int
    first_s: float  # seconds from the request to its first token
    between_s: Sequence[float]  # seconds between its tokens, or between its parts
    shapes: Mapping[str, int] = field(default_factory=dict)  # requested shape -> rounds


class LoadedDoor(Protocol):
    """A way into a cluster."""

    async def answer(self, prompt: Prompt, tokens: int, speculation: str, seed: int) -> LoadAnswer:
        """An answer of at most `tokens` tokens."""
        ...

    def stats(self) -> Awaitable[Mapping[str, int]]:
        """Counters of the verifier; and of the router, with names that begin with `router_`."""
        ...

    async def watch(self) -> None:
        """Runs while a block is measured, and is then cancelled."""
        ...


def by_token(done: Completion, times: Sequence[float]) -> LoadAnswer:
    """The answer as its tokens. times: of the call, then of each round, whose wait counts once for each token"""
    between_s = list[float]()
    for part, (before, now) in zip(done.rounds[1:], pairwise(times[1:]), strict=True):
        between_s += [(now - before) / len(part.token_ids) for _ in part.token_ids]
    shapes = done.complete.speculation.rounds_by_shape
    return LoadAnswer(done.token_ids, len(done.token_ids), times[1] - times[0], between_s, shapes)


@dataclass(frozen=True, slots=True)
class GrpcDoor:
    """The client library, or a router of this process."""

    clients: TenantClients
    stats: Stats
    temperature: float = 0.0
    to_end: bool = False  # True if an end-of-text token ends an answer
    read: Callable[[Completion, Sequence[float]], LoadAnswer] = by_token

    async def answer(self, prompt: Prompt, tokens: int, speculation: str, seed: int) -> LoadAnswer:
        done, times = await timed(
            self.clients.client_for(speculation, seed),
            prompt,
            max_new_tokens=tokens,
            ignore_end=not self.to_end,
            speculation=speculation,
            temperature=self.temperature,
            seed=seed,
        )
        return self.read(done, times)

    async def watch(self) -> None:
        """Do nothing beside a block."""


@dataclass(frozen=True, slots=True)
class Loader:
    """Clients of running clusters. A prompt has the same seed in every block, and so the same answer, which `identity`
    compares with the first one to it."""

    doors: Callable[[str], LoadedDoor]  # gives the door of a block's way
    prompts: Sequence[Prompt]
    tokens: int
    to_end: bool = False  # True if answers may have fewer than `tokens` tokens
    speculation: str | None = None  # speculation of all requests; None: the block's way
    answers: dict[int, Sequence[int]] = field(default_factory=dict)  # the first by its prompt's number
    identity: Identity = field(default_factory=Identity)

    def length(self, number: int) -> int:
        """Tokens of the answer to the prompt of this number, which was asked before."""
        return len(self.answers[number % len(self.prompts)])

    async def closed(self, block: LoadBlock, clients: int, answers: int) -> LoadBlock:
        """Each client sends `answers` requests, each as soon as the one before is answered."""

        async def one(index: int) -> None:
            for turn in range(answers):
                await self._answer(block, (index + turn * clients) % len(self.prompts))

        return await self._timed(block, [one(index) for index in range(clients)])

    async def open(self, block: LoadBlock, per_second: float, requests: int, seed: int) -> LoadBlock:
        """Requests arrive by a Poisson process, whether or not earlier ones are answered."""
        generator = random.Random(seed)
        times = list(accumulate(generator.expovariate(per_second) for _ in range(requests)))

        async def one(index: int) -> None:
            await asyncio.sleep(times[index])
            await self._answer(block, index % len(self.prompts))

        return await self._timed(block, [one(index) for index in range(requests)])

    async def _timed(self, block: LoadBlock, work: Sequence[Awaitable[None]]) -> LoadBlock:
        door = self.doors(block.way)
        before = await door.stats()
        watching = asyncio.ensure_future(door.watch())
        used_us, started = time.process_time_ns() // 1000, time.perf_counter()
        try:
            await asyncio.gather(*work)
        finally:
            block.seconds = time.perf_counter() - started
            block.client_us = time.process_time_ns() // 1000 - used_us
            watching.cancel()
        await asyncio.wait({watching})
        after = await door.stats()
        block.counters = Counter({name: value - before.get(name, 0) for name, value in after.items()})
        return block

    async def _answer(self, block: LoadBlock, number: int) -> None:
        """Ask with the prompt of this number, which is also the seed."""
        door, speculation = self.doors(block.way), self.speculation or block.way
        done = await door.answer(self.prompts[number], self.tokens, speculation, number)
        if done.tokens != self.tokens and not self.to_end:
            raise EngineFailed(f"{block.way}: {done.tokens} tokens instead of {self.tokens}")
        block.first_s.append(done.first_s)
        block.between_s += done.between_s
        block.shapes.update(done.shapes)
        block.tokens += done.tokens
        first = self.answers.setdefault(number, done.output)
        if first is not done.output:
            self.identity.compare(f"{block.load}, {block.way}, prompt {number + 1}", done.output, first)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is measured."""

    prompts: tuple[Prompt, ...]
    tokens: int
    clients: tuple[int, ...]
    answers: int  # answers of every client of a block
    arrivals: tuple[float, ...]  # rates of open loops, as shares of the largest closed loop's without speculation
    requests: int  # requests of every open-loop block
    repetitions: int
    seed: int
    ways: tuple[str, ...] = WAYS  # our ways, `off` first

    @property
    def blocks(self) -> int:
        ours = (len(self.clients) + len(self.arrivals)) * len(self.ways)
        return (ours + len(self.clients)) * self.repetitions


async def measure_load(
    plan: LoadPlan, loader: Loader, library: ContenderProcess, hop_time: HopTime, step: Step
) -> tuple[list[LoadBlock], dict[str, str]]:
    """Run all blocks of a plan. Returns them, and the errors of baselines that failed."""
    order, blocks, silent = random.Random(plan.seed), list[LoadBlock](), dict[str, str]()
    for way in plan.ways:  # warm-up: every way, and the step sizes at full load
        await loader.closed(LoadBlock(way, "warm-up", 0), max(plan.clients), 1)
    for clients in plan.clients:  # the policy learns each load once per router
        await loader.closed(LoadBlock(AUTO, "warm-up", 0), clients, 1)
    for repetition in range(plan.repetitions):
        for clients in order.sample(plan.clients, len(plan.clients)):
            ways = (*plan.ways, BATCH)
            hop_us = await hop_time(clients)
            for way in order.sample(ways, len(ways)):
                block = LoadBlock(way, closed_load(clients), repetition, hop_us=hop_us)
                if way in plan.ways:
                    blocks.append(await loader.closed(block, clients, plan.answers))
                elif way not in silent:
                    prompts = [plan.prompts[index % len(plan.prompts)] for index in range(clients)]
                    lengths = [loader.length(index) for index in range(clients)]
                    try:
                        reply = await library.call(way, prompts=[*map(list, prompts)], tokens=max(lengths))
                        block.seconds = float(reply["seconds"])
                        block.tokens = sum(lengths)  # tokens up to each answer's end
                        blocks.append(block)
                    except EngineFailed as error:
                        silent[way] = str(error).splitlines()[0][:200]
                step()
        largest = closed_load(max(plan.clients))
        full = median(
            len(block.first_s) / block.seconds for block in blocks if block.way == OFF and block.load == largest
        )
        for share in plan.arrivals:
            per_second = share * full
            for way in order.sample(plan.ways, len(plan.ways)):
                block = LoadBlock(way, f"{share:g} of capacity", repetition)
                seed = plan.seed + repetition  # gives all ways equal arrivals
                blocks.append(await loader.open(block, per_second, plan.requests, seed))
                step()
    return blocks, silent


def closed_load(clients: int) -> str:
    return f"{clients} client{'s' if clients > 1 else ''}"


def ratio(over: Sequence[LoadBlock], under: Sequence[LoadBlock]) -> dict[str, float] | None:
    """A row's field: tokens per second of blocks over those of others, paired by repetition; None without a pair."""
    rates = {block.repetition: block.rate for block in under}
    pairs = [block.rate / rates[block.repetition] for block in over if block.repetition in rates]
    return estimate(pairs) if pairs else None


def times_row(blocks: Sequence[LoadBlock], judged: str) -> Row:
    """Fields that all rows have, from blocks of one way at one load."""
    return {
        "load": blocks[0].load,
        "judged": judged,
        "name": blocks[0].way,
        "tokens_per_second": estimate([block.rate for block in blocks]),
        "first_token_ms": percentiles([each for block in blocks for each in block.first_s]),
    }


def rows_of(blocks: Sequence[LoadBlock], ways: Sequence[str] = WAYS, judged: str = "") -> list[Row]:
    """One row for each load and way: closed loops first, by size. ways: ours, in order   judged: kind of target
    whose aims the rows are judged by"""
    rows = []
    alone = {way: [each for each in blocks if (each.load, each.way) == (closed_load(1), way)] for way in ways}
    for load in dict.fromkeys(block.load for block in sorted(blocks, key=_load_order)):
        here = {way: [each for each in blocks if (each.load, each.way) == (load, way)] for way in (*ways, BATCH)}
        fixed = [way for way in ways if way != AUTO and here[way]]
        best = max(fixed, key=lambda way: median(block.rate for block in here[way]))
        arriving, number = _load_order(here[best][0])
        for way, mine in here.items():
            if not mine:
                continue
            row = times_row(mine, judged) | {
                "clients": None if arriving else int(number),
                "share": number if arriving else None,
                "between_tokens_ms": percentiles([each for block in mine for each in block.between_s]),
            }
            if way in ways:
                row |= _counts(mine) | {"over_one": ratio(mine, alone[way])}
            if way != OFF:
                row["over_off"] = ratio(mine, here[OFF])
            if way == AUTO:
                row |= {"over_best": ratio(mine, here[best]), "best": best}
            rows.append(row)
    return rows


def _counts(blocks: Sequence[LoadBlock]) -> Row:
    """What the verifier and the router counted in these blocks of one way."""
    tokens = sum(block.tokens for block in blocks)
    shapes = sum((block.shapes for block in blocks), Counter[str]())
    counters = sum((block.counters for block in blocks), Counter[str]())
    timed = [block.counters for block in blocks if block.counters["step_us"]]
    stepped = [1 - each["forward_us"] / each["step_us"] for each in timed]  # the model's forwards in the steps
    hops = [1e3 * block.router_ms / block.hop_us for block in blocks if block.hop_us]
    return {
        "guesses_per_token": round(counters["guesses"] / tokens, 2),
        "trimmed_per_token": round(counters["trimmed"] / tokens, 2),
        "step_overhead": estimate(stepped) if stepped else None,
        "router_ms": estimate([block.router_ms for block in blocks]),
        "router_over_hop": estimate(hops) if hops else None,
        "shapes": {name: round(rounds / shapes.total(), 3) for name, rounds in shapes.most_common()},
    }


def _load_order(block: LoadBlock) -> tuple[bool, float]:
    """Whether requests arrive by themselves, and the number of clients or the share of the capacity."""
    return ("client" not in block.load, float(block.load.split()[0]))
