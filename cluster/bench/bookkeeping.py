"""What a round costs besides models: the loop, the handles, the proposers and the peers' copies of the text.

Peers in this process follow the text and walk the tree, but run no model: the target's token is a function of its
position, and the drafter guesses it. So only the bookkeeping is timed, at texts of different lengths in turns.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from dendro.calls import (
    PROTOCOL_VERSION,
    CloseCall,
    Closed,
    DraftCall,
    Hello,
    OpenCall,
    Opened,
    PeerText,
    VerifyCall,
)
from dendro.shapes import TreeShape
from dendro.text import Limits, Sampling, Text, Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.bench.measurement import Step
from cluster.bench.report import aim_row
from cluster.bench.statistics import Estimate, median_estimate
from cluster.peers.drafter import DrafterHandle
from cluster.peers.opening import Leased, Pace
from cluster.peers.verifier import VerifierHandle
from cluster.policies import Static
from cluster.proposers.proposals import ProposalLibrary
from cluster.router.rounds import rounds

SHORT, LONG = 1_000, 100_000
"""Tokens of the texts that are compared."""
BAR = 1.2
"""The most that a round of the long text may cost, over one of the short text."""
VOCABULARY = 50_257
SHAPE = TreeShape.parse("(2,1)")
ROUNDS = 32
"""Rounds of a block. Blocks of the two texts alternate."""
BLOCKS, QUICK_BLOCKS = 41, 11
ROOM = 1 << 16


def token_at(position: int) -> int:
    """The target's token at a position: no pattern that a proposer could find."""
    return (position * 2_654_435_761 >> 7) % VOCABULARY


class ModelFreePeer:
    """A drafter and a verifier that follow texts and run no model."""

    def __init__(self) -> None:
        self._texts: dict[bytes, PeerText] = {}

    async def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, "none", "none", "", VOCABULARY, 1 << 30, 64, 16, "float32", "bitwise", 0)

    async def open(self, call: OpenCall) -> Opened:
        self._texts[call.update.opening] = text = PeerText()
        text.follow(call.update)
        return Opened(0, call.update.base, 0)

    async def draft(self, call: DraftCall) -> DraftTree:
        ids = self._followed(call).ids
        right = token_at(len(ids))
        tokens = (ids[-1], right, (right + 1) % VOCABULARY, token_at(len(ids) + 1), 0)
        return DraftTree.of(tokens, (-1, 0, 0, 1, 2), (0.0, -0.1, -2.0, -0.2, -2.5))

    async def verify(self, call: VerifyCall) -> Verdict:
        position, row = len(self._followed(call).ids), 0
        emitted, path, ranks = list[int](), [0], list[int]()
        while True:
            emitted.append(token_at(position))
            children = call.tree.children(row)
            rank = next((rank for rank, child in enumerate(children) if call.tree.tokens[child] == emitted[-1]), None)
            if rank is None:
                return Verdict(tuple(emitted), tuple(path), tuple(ranks), None, len(emitted))
            row, position = children[rank], position + 1
            path.append(row)
            ranks.append(rank)

    async def close(self, call: CloseCall) -> Closed:
        del self._texts[call.update.opening]
        return Closed(0)

    def _followed(self, call: DraftCall | VerifyCall) -> PeerText:
        text = self._texts[call.update.opening]
        text.follow(call.update)
        return text


class ModelFreePool:
    """Leases one peer."""

    def __init__(self, peer: ModelFreePeer) -> None:
        self._peer = peer

    async def lease(self) -> Leased[ModelFreePeer]:
        return Leased(self._peer, await self._peer.hello(), "")


async def endless_rounds(tokens: int) -> AsyncGenerator[Verdict, None]:
    """The verdicts of one text, which begins with so many tokens."""
    text = Text(list(map(token_at, range(tokens))), Sampling(), Limits(tokens + ROOM, ignore_end=True))
    pace = Pace()
    verifier = VerifierHandle(text, ModelFreePool(ModelFreePeer()), pace)
    handle = DrafterHandle(ModelFreePool(ModelFreePeer()), pace, verifier, adaptive=False)
    drafter = ProposalLibrary(("lookup", "suffix"), 64, 16).around(handle, "", 8, 0.0)
    assert drafter is not None
    try:
        async for verdict in rounds(text, drafter, verifier, Static(Arm("drafter", SHAPE))):
            yield verdict
    finally:
        await drafter.close(text)
        await verifier.close(text)


async def measure_bookkeeping(blocks: int, step: Step, tokens: Sequence[int] = (SHORT, LONG)) -> dict[int, list[float]]:
    """Seconds of a round by tokens of the text, one value for each block; the first block is a warm-up."""
    seconds: dict[int, list[float]] = {length: [] for length in tokens}
    async with AsyncExitStack() as stack:
        texts = {length: await stack.enter_async_context(aclosing(endless_rounds(length))) for length in tokens}
        for block in range(blocks + 1):
            for length, text in texts.items():
                started = time.perf_counter()
                for _ in range(ROUNDS):
                    await anext(text)
                if block:
                    seconds[length].append((time.perf_counter() - started) / ROUNDS)
            step()
    return seconds


def bookkeeping_ratio(seconds: dict[int, list[float]]) -> Estimate:
    """A round of the long text over one of the short text, by pairs of neighbouring blocks."""
    return median_estimate([long / short for short, long in zip(seconds[SHORT], seconds[LONG], strict=True)])


def bookkeeping_row(seconds: dict[int, list[float]]) -> dict[str, Any]:
    """The part of the report."""
    rounds_us = {str(tokens): median_estimate([1e6 * each for each in found]) for tokens, found in seconds.items()}
    return {
        "round_us": {tokens: estimate.as_json() for tokens, estimate in rounds_us.items()},
        "long_over_short": bookkeeping_ratio(seconds).as_json(),
    }


def bookkeeping_aim(seconds: dict[int, list[float]]) -> dict[str, Any]:
    """At most BAR, in the form of a report's aims."""
    ratio = bookkeeping_ratio(seconds)
    aim = f"bookkeeping of a round at {LONG:,} tokens over {SHORT:,}, at most"
    return aim_row(aim, BAR, ratio.median <= BAR, ratio)
