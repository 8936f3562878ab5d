"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dendro.errors import (
    Aborted,
    BadRequest,
    Conflict,
    DendroError,
    LimitReached,
    NotFound,
    OutOfTime,
    Overloaded,
    PeerLost,
    Unauthenticated,
    one_line,
)

from cluster.api.grpc import logged_status

STATUSES: Mapping[type[DendroError], int] = {
    BadRequest: 400,
    NotFound: 404,
    Unauthenticated: 401,
    Conflict: 409,
    Overloaded: 429,
    LimitReached: 429,
    OutOfTime: 504,
    Aborted: 499,  # nginx's "client closed request"
    PeerLost: 503,
}
"""HTTP status of an error. All others are 500."""
RETRY_AFTER_S = 1
"""Seconds in `Retry-After`, of an error after which the same request may be sent again."""
LINE = re.compile(r"line (\d+), %json: ")
"""Beginning of the fault of a schema in a grammar."""
MOST_RETRY_AFTER_S = 60
"""Old clients of OpenAI ignore a longer time, and wait for seconds of their own choice."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a text with more tokens than the target can hold, for which clients look to shorten it."""
RETRIED = (Overloaded, PeerLost)
NOT_REPEATED = {"x-should-retry": "false"}
"""Tells OpenAI's clients not to send the request again by themselves, as they do after a 409 and a 5xx."""


class HttpRefused(BadRequest):
    """A request that is refused by what it is as HTTP, before its fields are read."""

    def __init__(self, status: int, reason: str, param: str | None = None, word: str = "BadRequest") -> None:
        super().__init__(param or "request", reason)
        self.status = status
        self.param = param
        self.word = word


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it is sent."""

    status: int
    message: str
    param: str | None  # name of the wrong field
    code: str  # the reason: the name of our error, or a word of OpenAI's
    headers: Mapping[str, str]

    @property
    def fields(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == STATUSES[Overloaded]:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        return to_json(self.fields)

    def not_repeated(self) -> Failure:
        """Copy the failure with a header that tells OpenAI's clients not to send the request again by themselves."""
        return replace(self, headers={**self.headers, **NOT_REPEATED})


def failure_of(error: BaseException, request_id: str, names: Mapping[str, str] | None = None) -> Failure:
    """The status and body with which an error is sent. An internal error is logged, and sent without details.

    names: HTTP's names of our fields
    """
    if isinstance(error, HttpRefused):
        closing = {"connection": "close"} if error.status in (408, 413) else {}  # the body was not read
        return Failure(error.status, error.reason, error.param, error.word, closing)
    _, details, reason = logged_status(error, request_id)
    status = STATUSES.get(type(error), 500) if isinstance(error, DendroError) else 500
    headers: dict[str, str] = {}
    if isinstance(error, OutOfTime | Conflict):  # it would take as long again, or answer to a text that nobody has seen
        headers |= NOT_REPEATED
    elif isinstance(error, RETRIED):
        wait_s = error.retry_after_s if isinstance(error, LimitReached) else 0.0
        headers["retry-after"] = str(min(max(math.ceil(wait_s), RETRY_AFTER_S), MOST_RETRY_AFTER_S))
    elif isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, NotFound):  # a session
        field, _, fault = details.partition(": ")
        param = renamed(field, names or {})
        return Failure(status, f"{param}: {fault}", param, reason, headers)
    if isinstance(error, BadRequest):
        field, fault = error.field, error.reason
        if (found := LINE.match(fault)) and (named := line_field(field, int(found[1]))) in (names or {}):
            field, fault = named, fault[found.end() :]
        param = one_line(renamed(field, names or {}))
        word = TOO_LONG if error.too_long else reason
        return Failure(status, one_line(f"{param}: {fault}"), param, word, headers)
    return Failure(status, details, None, reason, headers)


def line_field(field: str, line: int) -> str:
    """Name of a line of a grammar's field, among HTTP's names of our fields."""
    return f"{field}.{line}"


def renamed(field: str, names: Mapping[str, str]) -> str:
    """HTTP's name of a field of ours, or of a part of one: `structure.json_schema`, `stop[1]`."""
    for part in re.findall(r"^[\w.]+|^\w+", field)[:1]:
        while part:
            if part in names:
                return names[part] + field[len(part) :]
            part = part.rpartition(".")[0]
    return field


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, a BadRequest has HTTP's name of its field. names: HTTP's names of our fields"""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(renamed(error.field, names), error.reason, error.too_long) from None


def to_json(value: Any) -> bytes:
    """JSON in ASCII: it has no line break of Unicode, at which some readers of events would split."""
    return json.dumps(value, separators=(",", ":")).encode()
