"""Every error that crosses a border of ours, and what its receiver should do.

DendroError
  BadRequest      the caller can mend it: the message names the field             INVALID_ARGUMENT
  NotFound        no such session, model or opening                               NOT_FOUND
  Conflict        another writer came first: read the session again               ABORTED
  Overloaded      try again later                                                 RESOURCE_EXHAUSTED
  PeerLost        a replica is gone or does not answer: open the text elsewhere   UNAVAILABLE
  EngineFailed    our fault; this request is over                                 INTERNAL
"""

from __future__ import annotations

import grpc

MESSAGE_CHARACTERS = 640
"""A status message's limit. gRPC sends it in headers of at most 8 KiB, percent-encoded: up to 12 bytes a character."""


def one_line(text: str, limit: int = MESSAGE_CHARACTERS) -> str:
    """`text` for a log line or a status: characters that are not printable are escaped, and a longer text is cut.

    >>> one_line("a" + chr(10) + "b"), one_line("abcdef", 4)
    ('a\\\\nb', 'abc…')
    """
    head = text[: limit + 1]
    if not head.isprintable():
        head = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in head)
    return head if len(head) <= limit else head[: limit - 1] + "…"


class DendroError(Exception):
    """The base of the family; `code` is the gRPC status it travels as."""

    code = grpc.StatusCode.UNKNOWN


class BadRequest(DendroError):
    """The caller can mend it; `field` names what is wrong."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class NotFound(DendroError):
    """No such session, model or opening. A peer's opening that is not found is simply opened again."""

    code = grpc.StatusCode.NOT_FOUND


class Conflict(DendroError):
    """Another writer changed the session first."""

    code = grpc.StatusCode.ABORTED


class Overloaded(DendroError):
    """There is no room now; the same call may be made later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class PeerLost(DendroError):
    """A replica is gone, frozen or refuses us; the text can be opened at another one."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineFailed(DendroError):
    """Our fault. The message is for the operator's log, not for the client."""

    code = grpc.StatusCode.INTERNAL


ERROR_FOR: dict[grpc.StatusCode, type[DendroError]] = {
    kind.code: kind for kind in (NotFound, Conflict, Overloaded, PeerLost, EngineFailed)
}


def error_for(code: grpc.StatusCode, message: str) -> DendroError:
    """The member of the family that a gRPC status stands for; an unknown one is our own fault."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, _, reason = message.partition(": ")
        return BadRequest(field, reason) if reason else BadRequest("request", message)
    return ERROR_FOR.get(code, EngineFailed)(message)
