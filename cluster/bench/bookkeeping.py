"""What a round costs besides models: the loop, the handles, the proposers and the peers' copies of the text.

Peers in this process follow the text and walk the tree, but run no model: the target's token is a function of its
position, and the drafter guesses it. So only the bookkeeping is timed, at texts of different lengths in turns. In texts
without repetition the proposers find nothing; in periodic texts they find as many earlier occurrences as they use.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

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
from cluster.measure.measurement import Step
from cluster.measure.report import Row
from cluster.measure.turns import estimate, over
from cluster.peers.drafter import DrafterHandle, DrafterHandles
from cluster.peers.opening import Leased, Pace
from cluster.peers.verifier import VerifierHandle
from cluster.policies import Experience, RunningRequest, Static
from cluster.proposers.proposals import ProposalLibrary
from cluster.router.request_speculation import RequestSpeculation
from cluster.router.rounds import rounds
from cluster.router.speculation import SpeculationPlan

SHORT, LONG = 1_000, 100_000
"""Tokens of the texts that are compared."""
BAR = 1.2
"""The most that a round of the long text may cost, over one of the short text."""
PERIODS = {"no token twice": 1 << 18, "period of 512 tokens": 512}
"""Kinds of text, and the tokens after which each repeats. Long and short texts of a kind offer the proposers alike."""
VOCABULARY = 1 << 18
SHAPE = TreeShape.parse("(2,1)")
ROUNDS = 32
"""Rounds of a block. Blocks of the two texts alternate."""
BLOCKS, QUICK_BLOCKS = 41, 11
ROOM = 1 << 16


def token_at(position: int, period: int) -> int:
    """The target's token at a position. The factor is odd, so positions of a period have different tokens."""
    return position % period * 2_654_435_761 % VOCABULARY


class ModelFreePeer:
    """A drafter and a verifier that follow texts of a period and run no model."""

    def __init__(self, period: int) -> None:
        self._period = period
        self._texts: dict[bytes, PeerText] = {}

    async def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, "none", "none", "", VOCABULARY, 1 << 30, 64, 16, "float32", "bitwise", 0)

    async def open(self, call: OpenCall) -> Opened:
        self._texts[call.update.opening] = text = PeerText()
        text.follow(call.update)
        return Opened(0, call.update.base, 0)

    async def draft(self, call: DraftCall) -> DraftTree:
        ids = self._followed(call).ids
        right = token_at(len(ids), self._period)
        tokens = (ids[-1], right, (right + 1) % VOCABULARY, token_at(len(ids) + 1, self._period), 0)
        return DraftTree.of(tokens, (-1, 0, 0, 1, 2), (0.0, -0.1, -2.0, -0.2, -2.5))

    async def verify(self, call: VerifyCall) -> Verdict:
        position, row = len(self._followed(call).ids), 0
        emitted, path, ranks = list[int](), [0], list[int]()
        while True:
            emitted.append(token_at(position, self._period))
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


async def endless_rounds(tokens: int, period: int) -> AsyncGenerator[Verdict, None]:
    """The verdicts of one text of a period, which begins with so many tokens."""
    text = Text(
        [token_at(position, period) for position in range(tokens)], Sampling(), Limits(tokens + ROOM, ignore_end=True)
    )
    pace = Pace()
    verifier = VerifierHandle(text, ModelFreePool(ModelFreePeer(period)), pace)
    experience, arm = Experience(), Arm("drafter", SHAPE)
    running = RunningRequest(experience.concurrency, fixed=True)
    handle = DrafterHandle(arm.maker, ModelFreePool(ModelFreePeer(period)), pace, verifier, running, adaptive=False)
    speculation = RequestSpeculation(
        SpeculationPlan("fixed", Static(arm), learns=False),
        experience,
        running,
        text,
        DrafterHandles(lambda name: handle),
        ProposalLibrary(("lookup", "suffix"), 64, 16).of("", 8, 0.0),
    )
    try:
        async for verdict in rounds(text, speculation, verifier, speculation):
            yield verdict
    finally:
        await speculation.close(text)
        await verifier.close(text)


Seconds = dict[str, dict[int, list[float]]]
"""Seconds of a round by kind of text and its tokens, one value for each block."""


async def measure_bookkeeping(blocks: int, step: Step) -> Seconds:
    """Time rounds of all texts, their blocks in turns. The first block is a warm-up."""
    seconds: Seconds = {kind: {SHORT: [], LONG: []} for kind in PERIODS}
    async with AsyncExitStack() as stack:
        texts = {
            (kind, tokens): await stack.enter_async_context(aclosing(endless_rounds(tokens, PERIODS[kind])))
            for kind, found in seconds.items()
            for tokens in found
        }
        for block in range(blocks + 1):
            for (kind, tokens), text in texts.items():
                started = time.perf_counter()
                for _ in range(ROUNDS):
                    await anext(text)
                if block:
                    seconds[kind][tokens].append((time.perf_counter() - started) / ROUNDS)
            step()
    return seconds


def bookkeeping_rows(seconds: Seconds) -> list[Row]:
    """A row for each kind of text. Ratios are of pairs of neighbouring blocks."""
    return [
        {
            "text": kind,
            "short_us": estimate([1e6 * each for each in found[SHORT]]),
            "long_us": estimate([1e6 * each for each in found[LONG]]),
            "long_over_short": over(found[LONG], found[SHORT]),
        }
        for kind, found in seconds.items()
    ]
