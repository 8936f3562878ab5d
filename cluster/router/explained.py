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
    """The events of one request with its rounds' trees, up to KEPT_BYTES. Prompts are left out."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._events: list[pb.GenerateResponse] = []
        self._left = most_bytes
        self._cut = False

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
        size = event.ByteSize()
        if kind == "prompt":
            return
        if kind == "chunk" and (self._cut or size > self._left):
            self._cut = True  # chunks after a missing one are left out: a reader would take them for the next ones
            return
        self._left -= size
        self._events.append(event)

    def message(self) -> pb.ExplainResponse:
        return pb.ExplainResponse(events=self._events, cut=self._cut)


class ExplainedRequests:
    """Chooses requests by chance, and keeps the newest. A tenant finds only its own."""

    def __init__(self, share: float, most: int, chance: Callable[[], float] = random.random) -> None:
        """share: chance of a request to be kept, 0 to 1   most: most requests that are kept"""
        self._share = share
        self._most = most
        self._chance = chance
        self._kept: OrderedDict[tuple[str, str], ExplainedRequest] = OrderedDict()  # key: tenant and request id

    def begin(self, tenant: str, request_id: str) -> ExplainedRequest | None:
        """Begin a request. Returns where its events are kept; None if it is not chosen."""
        if not self._share or self._chance() >= self._share:
            return None
        kept = self._kept[tenant, request_id] = ExplainedRequest()
        self._kept.move_to_end((tenant, request_id))
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept

    def find(self, tenant: str, request_id: str) -> pb.ExplainResponse:
        """A request's events so far. Raises NotFound alike for one that is not kept, and for another tenant's."""
        kept = self._kept.get((tenant, request_id))
        if kept is None:
            raise NotFound("request: its rounds are not kept here; a router keeps those of a share of its requests")
        return kept.message()
