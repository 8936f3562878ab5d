"""A drafter and a verifier that follow the protocol with toy models, and pools that lease them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dendro.calls import (
    PROTOCOL_VERSION,
    CloseCall,
    Closed,
    Deliver,
    DraftCall,
    DrafterLinks,
    Hello,
    OpenCall,
    Opened,
    PeerText,
    RequestParameters,
    VerifyCall,
)
from dendro.errors import BadRequest, NotFound, Overloaded, PeerLost
from dendro.measured import StepTotals
from dendro.order import Order
from dendro.shapes import DEFAULT_DEPTH, LevelShape
from dendro.tasks import BackgroundTasks
from dendro.text import Limits, Sampling, Text, Verdict, cut_verdict
from dendro.tree import DraftTree, full_tree

from cluster.arms import Arm
from cluster.peers.opening import Leased
from cluster.peers.stream import DRAFTER, VERIFIER, RemoteDrafter, RemoteVerifier, Streams

RUNNING = BackgroundTasks(expected=Exception)
VOCABULARY = 101
END = 100


def toy_token(ids: Sequence[int], sampling: Sampling) -> int:
    """The toy target's token after `ids`: a function of the last three, the length and, if sampled, the seed."""
    noise = (sampling.seed, sampling.sample_index) if sampling.temperature else ()
    digest = hashlib.blake2b(repr((ids[-3:], len(ids), noise)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (VOCABULARY - 1)


def plain(prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> list[int]:
    """The answer that every run must have."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(toy_token(ids, sampling or Sampling()))
    return ids[len(prompt) :]


def new_text(prompt: Sequence[int] = (5, 6, 7), count: int = 40, sampling: Sampling | None = None) -> Text:
    return Text(prompt, sampling or Sampling(), Limits(len(prompt) + count))


def in_task(work: Callable[[Any], Coroutine[Any, Any, object]]) -> Callable[[Any, Deliver], None]:
    """An engine's method for streams, `draft_for` or `verify_for`, whose calls are tasks that run `work`."""

    def begin(call: Any, deliver: Deliver) -> None:
        def ended(task: asyncio.Task[object]) -> None:
            if not task.cancelled():
                deliver(task.exception() or task.result())

        RUNNING.start(work(call)).add_done_callback(ended)

    return begin


@dataclass
class _Held:
    """One open text."""

    text: PeerText
    parameters: RequestParameters


class _Fake:
    """What both share: texts by opening, and settings that make calls wait or fail."""

    model = "toy"
    fingerprint = "toy-weights"
    exactness = ""

    def __init__(self, tokenizer: str = "toy-tokens", pause_s: float = 0.0, facts_digest: str = "toy-facts") -> None:
        self.tokenizer = tokenizer
        self.facts_digest = facts_digest
        self.vocabularies: set[int] = set()  # with which texts were opened
        self.pause_s = pause_s  # of every draft and verification
        self.open_pause_s = 0.0
        self.max_sessions = 1000
        self.held: dict[bytes, _Held] = {}
        self.opens = self.closes = self.calls = 0
        self.closed_with: list[int] = []  # the texts' lengths
        self.largest_batch = 0
        self._at_once = 0

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def lost(self) -> str:
        return await asyncio.get_running_loop().create_future()

    def stats(self) -> dict[str, int]:
        return {}

    def steps_by_rows(self) -> dict[int, StepTotals]:
        return {}

    def memory_bytes(self, longest: int) -> dict[str, int]:
        return {}

    @property
    def sessions(self) -> int:
        return len(self.held)

    def fault(self) -> str:
        return ""

    async def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            model=self.model,
            fingerprint=self.fingerprint,
            tokenizer=self.tokenizer,
            vocabulary=VOCABULARY,
            max_length=4096,
            max_rows=64,
            max_depth=DEFAULT_DEPTH,
            dtype="float32",
            exactness=self.exactness,
            pid=os.getpid(),
            end_ids=(END,),
            facts=self.facts_digest,
        )

    async def open(self, call: OpenCall) -> Opened:
        if len(self.held) >= self.max_sessions:
            raise Overloaded("sessions: all are taken")
        if any(token >= VOCABULARY for token in call.update.tokens):
            raise BadRequest("update.tokens", "past the vocabulary")
        text = PeerText()
        text.follow(call.update)
        await asyncio.sleep(self.open_pause_s)
        await self.before_opened()
        self.held[call.update.opening] = _Held(text, call.parameters)
        self.opens += 1
        self.vocabularies.add(call.parameters.vocabulary)
        return Opened(restored=0, processed=call.update.base - 1, open_us=int(1e6 * self.open_pause_s))

    async def before_opened(self) -> None:
        """Awaited by every opening; a test may set another."""

    async def close(self, call: CloseCall) -> Closed:
        held = self.held.pop(call.update.opening, None)
        if held is None:
            raise NotFound("opening: unknown")
        held.text.follow(call.update)
        self.closes += 1
        self.closed_with.append(call.update.base)
        return Closed(saved=call.update.base - 1)

    def forget(self) -> None:
        """Lose every text, as a restarted replica does."""
        self.held.clear()

    async def _follow(self, call: DraftCall | VerifyCall) -> _Held:
        held = self.held.get(call.update.opening)
        if held is None:
            raise NotFound("opening: unknown")
        held.text.follow(call.update)
        self.calls += 1
        self._at_once += 1
        self.largest_batch = max(self.largest_batch, self._at_once)
        try:
            await asyncio.sleep(self.pause_s)
        finally:
            self._at_once -= 1
        return held


class FakeVerifier(_Fake):
    """Verifies trees with the toy target."""

    exactness = "bitwise"

    def link(self, links: DrafterLinks) -> None:
        """Ordered trees are not asked for: the hello does not say so."""

    def verify_for(self, call: VerifyCall, deliver: Deliver) -> None:
        in_task(self.verify)(call, deliver)

    async def verify(self, call: VerifyCall) -> Verdict:
        began_ns = time.perf_counter_ns()
        held = await self._follow(call)
        tree, ids = call.tree, list(held.text.ids)
        if tree.tokens[0] != ids[-1]:
            raise BadRequest("tree.tokens", f"begins with {tree.tokens[0]}, the text ends with {ids[-1]}")
        if (tree.tokens >= VOCABULARY).any():
            raise BadRequest("tree.tokens", "past the vocabulary")
        emitted, path, ranks, row = [], [0], [], 0
        while True:
            token = toy_token(ids, held.parameters.sampling)
            emitted.append(token)
            ids.append(token)
            children = tree.children(row)
            rank = next((rank for rank, child in enumerate(children) if tree.tokens[child] == token), None)
            if rank is None:
                break
            row = children[rank]
            path.append(row)
            ranks.append(rank)
        busy_us = (time.perf_counter_ns() - began_ns) // 1000
        verdict = Verdict(tuple(emitted), tuple(path), tuple(ranks), None, len(emitted), verify_us=busy_us)
        return cut_verdict(verdict, frozenset({END}), call.update.base, held.parameters.limits)


class FakeDrafter(_Fake):
    """Drafts with the toy target, but where the right token is a multiple of 4 its first guess is wrong."""

    fingerprint = "toy-drafter"
    spoil: DraftTree | None = None  # returned instead of a drafted tree

    def draft_for(self, call: DraftCall, deliver: Deliver) -> None:
        in_task(self.draft)(call, deliver)

    async def draft(self, call: DraftCall) -> DraftTree:
        began_ns = time.perf_counter_ns()
        held = await self._follow(call)
        if self.spoil is not None:
            return self.spoil
        assert isinstance(call.shape, LevelShape)
        ids, levels = list(held.text.ids), []
        for count, width in zip(call.shape.levels, call.shape.widths, strict=True):
            right = toy_token(ids, held.parameters.sampling)
            ids.append(right)
            first = right if right % 4 else (right + 1) % VOCABULARY  # one in four is wrong
            siblings = [first, *(token for token in range(VOCABULARY) if token != first)][:width]
            levels.append(siblings * (count // width))
        tree = full_tree(held.text.ids[-1], call.shape, levels)
        return replace(tree, proposer=self.model, draft_us=(time.perf_counter_ns() - began_ns) // 1000)


def slow_verifier(name: str, model: object, states: object) -> FakeVerifier:
    """A loader of verifiers whose answers take a second."""
    return FakeVerifier(pause_s=0.03)


class EmptyPool:
    """A pool without a replica."""

    async def lease(self) -> Leased:
        raise PeerLost("lease: there is none")


class FakePool:
    """A pool of one engine in this process."""

    def __init__(self, engine: FakeDrafter | FakeVerifier) -> None:
        self.engine = engine
        self.leases = 0

    async def lease(self) -> Leased:
        self.leases += 1
        return Leased(self.engine, await self.engine.hello(), "")


class RemotePool:
    """A pool of replicas at addresses, leased in turn; `lease_at`, if given, returns the lease token of an address."""

    def __init__(self, kind: str, addresses: list[str], lease_at=None) -> None:
        self.addresses = addresses
        self.streams = Streams(DRAFTER if kind == "drafter" else VERIFIER)
        self.far = RemoteDrafter if kind == "drafter" else RemoteVerifier
        self.lease_at = lease_at
        self.leases = 0

    async def lease(self) -> Leased:
        self.leases += 1
        error: PeerLost | None = None
        for turn in range(len(self.addresses)):
            address = self.addresses[(self.leases + turn) % len(self.addresses)]
            try:
                stream = await self.streams.to(address)
            except PeerLost as lost:
                error = lost
                continue
            token = await self.lease_at(address) if self.lease_at else ""
            return Leased(self.far(stream), stream.hello, token, address)
        raise error or PeerLost("no addresses")


class NoDrafter:
    """Drafters of a request that make no tree, whatever the arm."""

    openings: Mapping[str, Opened] = MappingProxyType({})
    fallbacks: Mapping[tuple[str, str], int] = MappingProxyType({})

    def strike(self, arm: Arm) -> None:
        return

    def prepare(self, text: Text, arm: Arm) -> None:
        return

    def order(self, text: Text, arm: Arm) -> Order | str:
        return "no drafter"

    def ordered(self, text: Text, arm: Arm, verdict: Verdict) -> None:
        return

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        return DraftTree.root_only(text.root)

    async def close(self, text: Text) -> None:
        return
