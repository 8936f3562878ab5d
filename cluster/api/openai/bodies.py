"""Reads a request's JSON in bounded time and memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dendro.client import MAX_MESSAGE_BYTES
from dendro.tasks import TenantLock
from starlette.requests import ClientDisconnect, Request

from cluster.api.callers import CallerIdentity
from cluster.api.openai.errors import HttpRefused
from cluster.api.places import Places, network_of
from cluster.api.reading import MOST_FIELDS, MOST_LISTED, SHORT_BYTES
from cluster.distinct_keys import distinct, json_of

BODY_S = 30.0
"""Seconds in which a client must send a body."""
MOST_HELD_BYTES = 32 * MAX_MESSAGE_BYTES
"""Bytes of all bodies that a router holds because they are not complete, or not parsed yet."""
SLICE_BYTES = 1 << 16
"""Bytes that are searched for strings at once, in at most 5 ms: a search holds the interpreter's lock until it ends."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)', re.DOTALL)
"""A string, or the rest of a text in which one begins and does not end: else the search would begin again at each quote
in that rest, and read it to the end each time. No text that is searched ends with a backslash."""


@dataclass(frozen=True, slots=True)
class JsonBody:
    """The object that is a request's body."""

    fields: Mapping[str, Any]
    size: int  # in bytes


class BodyReader:
    """Reads bodies. Many take no more time and memory at once than a few: bytes that are not parsed are bounded, and
    long bodies are parsed one after another, those of tenants in turns. Bound to one event loop."""

    def __init__(self, most_tokens: int) -> None:
        """most_tokens: of the longest text of all targets"""
        self._most_values = most_tokens + MOST_LISTED + MOST_FIELDS
        self._parsing = TenantLock()
        self._held = Places(MOST_HELD_BYTES, "bytes of requests are being read here")

    async def read(self, request: Request, caller: CallerIdentity) -> JsonBody:
        """A request's body. Raises HttpRefused for any other body, Overloaded where too much is held of others, and
        ClientDisconnect."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpRefused(415, "the content type must be application/json", "content-type")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HttpRefused(415, "the body must not be compressed", "content-encoding")
        holder = caller.tenant or (network_of(request.client.host) if request.client is not None else "")
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._held.take(holder, size)
            held += size

        try:
            body = await _bytes_of(request, hold)
            if len(body) <= SHORT_BYTES:
                return JsonBody(_object(body), len(body))
            async with self._parsing.of(holder):
                return JsonBody(await asyncio.to_thread(self._long_object, body), len(body))
        finally:
            self._held.leave(holder, held)

    def _long_object(self, body: bytes) -> dict[str, Any]:
        """The object of a long body. Parsed, a value takes up to thirty times its bytes, so they are counted first."""
        values = values_of(body)
        if values > self._most_values:
            raise HttpRefused(400, f"the body has {values} values; at most {self._most_values}")
        return _object(body)


def values_of(text: bytes) -> int:
    """Estimate the number of values in a JSON text without parsing it."""
    values, opened = 0, b""
    for start in range(0, len(text), SLICE_BYTES):
        part = opened + text[start : start + SLICE_BYTES]
        # Each string becomes one quote, which is the last byte only where the string goes on in the next part.
        rest = _STRING.sub(b'"', part + b" ")
        values += sum(map(rest.count, (b",", b"[", b"{")))
        escapes = (len(part) - len(part.rstrip(b"\\"))) % 2  # 1 where a backslash escapes the next part's first byte
        opened = b'"' + b"\\" * escapes if rest.endswith(b'"') else b""
    return values


async def _bytes_of(request: Request, hold: Callable[[int], None]) -> bytes:
    """A request's body. hold: called with the number of further bytes, before they are kept; may raise"""
    declared = request.headers.get("content-length", "")
    if declared and "transfer-encoding" in request.headers:  # a proxy before this server may go by the other
        raise HttpRefused(400, "is given beside transfer-encoding", "content-length")
    if declared.isdecimal() and int(declared) > MAX_MESSAGE_BYTES:
        raise _too_long()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                part = await request.receive()
                if part["type"] == "http.disconnect":
                    raise ClientDisconnect
                more = part.get("body", b"")
                if len(body) + len(more) > MAX_MESSAGE_BYTES:
                    raise _too_long()
                if more:
                    hold(len(more))
                body += more
                if not part.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise HttpRefused(408, f"the body was not sent within {BODY_S:g} s") from None


def _too_long() -> HttpRefused:
    return HttpRefused(413, f"the body has more than {MAX_MESSAGE_BYTES} bytes")


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json_of(body.decode("utf-8-sig"), distinct)
    except ValueError as error:  # an encoding's error is a ValueError
        raise HttpRefused(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpRefused(400, "the body must be a JSON object")
    return value
