"""The policy against no speculation at several loads, each from a fresh router.

It shows whether leaving the choice to the router costs anything where guesses do not pay.

A pair is a block of each way, one after the other; the next pair has them in the other order. Both ways of a pair have
the same prompts and seeds, so the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.bench.load import LoadBlock, Prompt, closed_load, ratio
from cluster.bench.measurement import AUTO, OFF, Step
from cluster.bench.report import aim_row
from cluster.bench.statistics import median_estimate

LEAST_OVER_OFF = 0.98
"""The promise: the policy is at most 2 % slower than no speculation."""


class ClosedLoops(Protocol):
    async def closed(self, block: LoadBlock, clients: int, answers: int) -> LoadBlock: ...


FreshRouter = Callable[[float], AbstractAsyncContextManager[ClosedLoops]]
"""Starts a cluster whose router has answered nothing; yields clients that ask at a temperature."""


@dataclass(frozen=True, slots=True)
class PairsPlan:
    """What is measured."""

    prompts: tuple[Prompt, ...]
    tokens: int
    clients: tuple[int, ...]
    temperatures: tuple[float, ...]
    answers: int  # of every client of a block
    pairs: int

    @property
    def blocks(self) -> int:
        return 2 * self.pairs * len(self.clients) * len(self.temperatures)


def load_at(clients: int, temperature: float) -> str:
    return f"{closed_load(clients)} at {temperature:g}"


async def measure_against_off(plan: PairsPlan, fresh_router: FreshRouter, step: Step) -> list[LoadBlock]:
    """All blocks, those of a load in order of time."""
    blocks: list[LoadBlock] = []
    for temperature in plan.temperatures:
        for clients in plan.clients:
            async with fresh_router(temperature) as loader:
                # Warms the engines up. The router learns nothing of speculation from requests that leave it out.
                await loader.closed(LoadBlock(OFF, "warm-up", 0), clients, 1)
                for pair in range(plan.pairs):
                    for way in (OFF, AUTO) if pair % 2 else (AUTO, OFF):
                        block = LoadBlock(way, load_at(clients, temperature), pair)
                        blocks.append(await loader.closed(block, clients, plan.answers))
                        step()
    return blocks


def aims_against_off(blocks: Sequence[LoadBlock]) -> list[dict[str, Any]]:
    """For each load: all pairs, and the fresh router's first."""
    aims = []
    for load in dict.fromkeys(block.load for block in blocks):
        mine = [block for block in blocks if block.load == load]
        first = {block.way: block.rate for block in mine if block.repetition == 0}
        for aim, found in (
            (f"policy over off, {load}", ratio(mine, load, AUTO, OFF)),
            (f"policy over off, {load}, first pair", median_estimate([first[AUTO] / first[OFF]])),
        ):
            aims.append(aim_row(aim, LEAST_OVER_OFF, found.median >= LEAST_OVER_OFF, found))
    return aims
