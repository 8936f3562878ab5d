"""Keeps the rounds of some requests, chosen by chance, in bounded memory for `dendro explain`; the newest stay."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

from dendro.errors import NotFound
from dendro.v1 import generation_pb2 as pb

KEPT_BYTES = 2 << 20
"""Most bytes that are kept of one request's events."""


class ExplainedRequest:
    """The events of one request with its rounds' trees, up to KEPT_BYTES. Prompts are left out. The sample of each
    event is the answer's sample index, which a call that resumes the answer has too."""

    def __init__(self, first: int = 0, before: ExplainedRequest | None = None, most_bytes: int = KEPT_BYTES) -> None:
        """first: sample index of the call's first answer   before: what was kept of the request's earlier calls"""
        self._first = first
        self._events: list[pb.GenerateResponse] = list(before._events) if before is not None else []
        self._left: int = before._left if before is not None else most_bytes
        self._cut: set[int] = set(before._cut) if before is not None else set()  # samples without later chunks

    def take(self, event: pb.GenerateResponse, shows_trees: bool) -> pb.GenerateResponse:
        """Keep an event. Returns it as its client gets it. shows_trees: whether the client asked for trees"""
        self._keep(event)
        if shows_trees or not event.chunk.HasField("tree"):
            return event
        shown = pb.GenerateResponse()
        shown.CopyFrom(event)
        shown.chunk.ClearField("tree")
        return shown

    def _keep(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "prompt":
            return
        kept = event
        if self._first:
            kept = pb.GenerateResponse()
            kept.CopyFrom(event)
            kept.sample += self._first
        if kind == "started":
            self._resume(kept.sample, event.started.offset)
        size = kept.ByteSize()
        if kind == "chunk" and (kept.sample in self._cut or size > self._left):
            self._cut.add(kept.sample)  # later chunks are dropped too: a reader would join them to the last one kept
            return
        self._left -= size
        self._events.append(kept)

    def _resume(self, sample: int, offset: int) -> None:
        """Remove an answer's chunks from `offset` on, where another call continues the answer."""
        others: list[pb.GenerateResponse] = []
        end = 0
        for event in self._events:
            if event.sample != sample or (event.HasField("chunk") and event.chunk.offset < offset):
                others.append(event)
                if event.sample == sample:
                    end = event.chunk.offset + len(event.chunk.token_ids)
            else:
                self._left += event.ByteSize()
        self._events = others
        if end >= offset:
            self._cut.discard(sample)

    def message(self) -> pb.ExplainResponse:
        return pb.ExplainResponse(events=self._events, cut=bool(self._cut))


class ExplainedRequests:
    """Chooses requests by chance, and keeps the newest. A tenant finds only its own."""

    def __init__(self, share: float, most: int, chance: Callable[[], float] = random.random) -> None:
        """share: chance of a request to be kept, 0 to 1   most: most requests that are kept"""
        self._share = share
        self._most = most
        self._chance = chance
        self._kept: OrderedDict[tuple[str, str], ExplainedRequest] = OrderedDict()  # key: tenant and request id

    def begin(self, tenant: str, request_id: str, first: int = 0) -> ExplainedRequest | None:
        """Begin a call of a request, whose first answer has the sample index `first`. Returns where its events are
        kept, after those of the request's earlier calls; None if it is not chosen."""
        before = self._kept.get((tenant, request_id))
        if before is None and (not self._share or self._chance() >= self._share):
            return None
        kept = self._kept[tenant, request_id] = ExplainedRequest(first, before)
        self._kept.move_to_end((tenant, request_id))
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept

    def find(self, tenant: str, request_id: str) -> pb.ExplainResponse:
        """A request's events so far. Raises the same NotFound for a request that is not kept and for another
        tenant's."""
        kept = self._kept.get((tenant, request_id))
        if kept is None:
            raise NotFound("request: its rounds are not kept here; a router keeps those of a share of its requests")
        return kept.message()
