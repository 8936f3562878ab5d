"""All errors that cross a service boundary, and what the receiver should do.

DendroError
  BadRequest      the caller can fix it: the message names the field              INVALID_ARGUMENT
  NotFound        no such session, model or opening                               NOT_FOUND
  Conflict        another writer came first: read the session again               ABORTED
  Overloaded      try again later                                                 RESOURCE_EXHAUSTED
    OutOfTime     the request took longer than the server allows: ask for less
    LimitReached  a limit of the caller's key is used up for now
  Unauthenticated no valid key or certificate                                     UNAUTHENTICATED
  Aborted         the request was ended by a call of its own client               CANCELLED
  PeerLost        a replica is gone or does not answer: open the text elsewhere   UNAVAILABLE
  EngineFailed    a fault of the server; this request has ended                   INTERNAL
    BadAnswer     a peer's answer is not one that the call can have
"""

from __future__ import annotations

import asyncio
import math
from typing import Self

import grpc

MESSAGE_CHARACTERS = 640
"""The longest status message. gRPC sends it in headers of at most 8 KiB, percent-encoded: up to 12 bytes per character.
"""


def one_line(text: str, limit: int = MESSAGE_CHARACTERS) -> str:
    """`text` for a log line or a status: unprintable characters are escaped; a text longer than `limit` is cut.

    >>> one_line("a" + chr(10) + "b"), one_line("abcdef", 4)
    ('a\\\\nb', 'abc…')
    """
    head = text[: limit + 1]
    if not head.isprintable():
        head = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in head)
    return head if len(head) <= limit else head[: limit - 1] + "…"


NO_FAULTS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task or the program. All others are faults, among them a native library's panic, which is a
BaseException too."""


class DendroError(Exception):
    """The base class; `code` is the gRPC status that it is sent as."""

    code = grpc.StatusCode.UNKNOWN


class BadRequest(DendroError):
    """The caller can fix it; `field` is the name of the wrong field."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, reason: str, too_long: bool = False) -> None:
        """too_long: whether the text has more tokens than the target can hold"""
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.too_long = too_long

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, bool]]:
        """Lets the error be unpickled with its arguments: Ray sends a replica's errors as pickles."""
        return type(self), (self.field, self.reason, self.too_long)


class NotFound(DendroError):
    """No such session, model or opening. A router opens the text again if a peer does not have its opening."""

    code = grpc.StatusCode.NOT_FOUND


class Conflict(DendroError):
    """Another writer changed the session first."""

    code = grpc.StatusCode.ABORTED


class Overloaded(DendroError):
    """No capacity now; the same call may be repeated later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class OutOfTime(Overloaded):
    """The request took longer than the server allows. A client does not resume it."""


class LimitReached(Overloaded):
    """A limit of the caller's key is used up; after `retry_after_s` seconds it may not be."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, limit: str, most: int, retry_after_s: float = 1.0) -> Self:
        """The error of a limit by its name. Default time: of limits that end when another answer does."""
        wait = max(1, math.ceil(retry_after_s))
        return cls(f"{limit}: this key's limit here is {most}; try again in {wait} s", wait)


class Unauthenticated(DendroError):
    """The call has no valid key or certificate. Says nothing else: unknown and malformed keys look alike."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Aborted(DendroError):
    """The request was ended on its own client's demand."""

    code = grpc.StatusCode.CANCELLED


class PeerLost(DendroError):
    """A replica is gone, hangs or refuses calls; the text can be opened at another one."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineFailed(DendroError):
    """A fault of the server. The message is for the operator's log, not for the client."""

    code = grpc.StatusCode.INTERNAL


class BadAnswer(EngineFailed):
    """A peer's answer is malformed or does not fit its call. The peer is at fault, not the call."""


ERROR_FOR: dict[grpc.StatusCode, type[DendroError]] = {
    kind.code: kind for kind in (NotFound, Conflict, Overloaded, Unauthenticated, Aborted, PeerLost, EngineFailed)
}


def error_for(code: grpc.StatusCode, message: str) -> DendroError:
    """The DendroError that a gRPC status stands for; EngineFailed for an unknown one."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, _, reason = message.partition(": ")
        return BadRequest(field, reason) if reason else BadRequest("request", message)
    return ERROR_FOR.get(code, EngineFailed)(message)
