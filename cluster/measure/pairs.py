"""Blocks of two ways in pairs at several loads: the policy against no speculation, or HTTP against bare gRPC.

A pair is a block of each way, one after the other; the next pair has them in the other order. Both ways of a pair have
the same prompts and seeds, so the same tokens. The policy is measured from a fresh router at each load: this shows
whether leaving the choice to the router costs anything where guesses do not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

from cluster.measure.load import LoadBlock, Loader, closed_load, rows_of
from cluster.measure.measurement import AUTO, OFF, Step
from cluster.measure.report import Row
from cluster.measure.statistics import estimate

PAIRS = "pairs"
"""These blocks, among what is judged."""
FIRST_S = 60.0
"""Seconds of the policy's first answers by a fresh router that count as its first minute."""
BLOCK_ANSWERS, LEAST_ANSWERS = 64, 2
"""Answers of a block, unless given, and the fewest for each client: so few texts at a time are rare at its end."""


ClientsAt = Callable[[Any], AbstractAsyncContextManager[Loader]]
"""Yields clients for a setting of the plan, of a router that is fresh where its answers are learned from."""


@dataclass(frozen=True, slots=True)
class PairsPlan:
    """What is measured."""

    ways: tuple[str, str]  # both, in the order of the first pair; the first one's seconds are counted
    settings: Mapping[str, Any]  # end of a load's name -> what clients are asked for with
    clients: tuple[int, ...]
    answers: int | None  # answers of every client of a block; None: BLOCK_ANSWERS in all
    pairs: int  # least pairs of blocks of each load
    least_s: float = 0.0  # least seconds of the first way's blocks at each load
    warm: tuple[str, ...] = (OFF,)
    """Ways of a first answer to every client. A router learns nothing of speculation from requests without it."""

    @property
    def blocks(self) -> int:
        """Least number of blocks."""
        return 2 * self.pairs * len(self.clients) * len(self.settings)

    def answers_of(self, clients: int) -> int:
        """Number of answers of every client of a block."""
        return self.answers if self.answers is not None else max(BLOCK_ANSWERS // clients, LEAST_ANSWERS)


async def measure_pairs(plan: PairsPlan, clients_at: ClientsAt, step: Step) -> list[LoadBlock]:
    """Run all blocks of a plan. Returns them in the order in which they ran."""
    blocks: list[LoadBlock] = []
    for name, setting in plan.settings.items():
        for clients in plan.clients:
            async with clients_at(setting) as loader:
                for way in plan.warm:
                    await loader.closed(LoadBlock(way, "warm-up", 0), clients, 1)
                pair, seconds = 0, 0.0
                while pair < plan.pairs or seconds < plan.least_s:
                    for way in plan.ways[:: -1 if pair % 2 else 1]:
                        block = LoadBlock(way, closed_load(clients) + name, pair)
                        blocks.append(await loader.closed(block, clients, plan.answers_of(clients)))
                        seconds += block.seconds * (way == plan.ways[0])
                        if pair < plan.pairs:
                            step()
                    pair += 1
    return blocks


def rows_against_off(blocks: Sequence[LoadBlock]) -> list[Row]:
    """Rows of blocks; those of the policy also have the ratios of its first tokens, and of all that a fresh router
    answered in the policy's first minute, the first trial included."""
    rows = rows_of(blocks, judged=PAIRS)
    for row in rows:
        if row["name"] == AUTO:
            mine = [block for block in blocks if block.load == row["load"]]
            seconds, over_off = first_minute(mine)
            times = {(block.way, block.repetition): median(block.first_s) for block in mine}
            first_tokens = [took / times[OFF, pair] for (way, pair), took in times.items() if way == AUTO]
            row |= {"first_s": round(seconds), "first_minute_over_off": round(over_off, 4)}
            row["first_token_over_off"] = estimate(first_tokens)  # ratios of medians, by pair
    return rows


def first_minute(blocks: Sequence[LoadBlock]) -> tuple[float, float]:
    """Seconds of the policy's first blocks at a load, FIRST_S or a block more where there are so many, and their tokens
    a second over those of the blocks that they are paired with."""
    seconds, tokens = {AUTO: 0.0, OFF: 0.0}, {AUTO: 0, OFF: 0}
    for pair in sorted({block.repetition for block in blocks}):
        if seconds[AUTO] >= FIRST_S:
            break
        for block in blocks:
            if block.repetition == pair:
                seconds[block.way] += block.seconds
                tokens[block.way] += block.tokens
    return seconds[AUTO], (tokens[AUTO] / seconds[AUTO]) / (tokens[OFF] / seconds[OFF])
