"""Reads a client's message in bounded time and memory.

Parsed, a message can take ten times its bytes: an empty bad word has two bytes on the wire and an object of its own. So
the entries of a long message are counted before it is parsed. Fields that this version does not know are dropped.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import numpy as np
from dendro.errors import BadRequest
from dendro.v1 import generation_pb2 as pb
from google.protobuf.message import DecodeError

SHORT_BYTES = 1 << 16
"""Bytes of a message up to which it is parsed in a millisecond, whatever it contains."""
MOST_FIELDS = 1 << 14
"""The most fields of a message, each entry of a list being one, also of fields that this version does not know. The
limits of all lists together allow fewer. Token ids are packed, many in a field."""
MOST_LISTED = 1 << 17
"""The most numbers of a message's lists, the tokens of its prompt and of its resume aside."""

Request = TypeVar(
    "Request",
    pb.GenerateRequest,
    pb.TokenizeRequest,
    pb.DetokenizeRequest,
    pb.GetServerInfoRequest,
    pb.AbortRequest,
    pb.ExplainRequest,
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MALFORMED = "request", "is no message of this API"


def read_request(kind: type[Request], data: bytes, most_tokens: int, most_bytes: int) -> Request:
    """The message, of class `kind`. Raises BadRequest for one that is malformed, or has more than any request may have.
    most_tokens: of the longest text of all targets   most_bytes: of a prompt that is text"""
    if len(data) > SHORT_BYTES:
        _Scan(data, most_tokens, most_bytes).message(0, len(data), kind.DESCRIPTOR, ())
    request = _parsed(kind, data)
    request.DiscardUnknownFields()
    if 2 * request.ByteSize() < len(data):  # a message keeps the memory of what was discarded
        request = _parsed(kind, request.SerializeToString())
    return request


def _parsed(kind: type[Request], data: bytes) -> Request:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise BadRequest(*_MALFORMED) from None


class _Scan:
    """Counts a message's entries in its bytes."""

    def __init__(self, data: bytes, most_tokens: int, most_bytes: int) -> None:
        self._data = data
        self._most_tokens = most_tokens
        self._most_bytes = most_bytes
        self._fields = self._listed = 0
        self._tokens: Counter[tuple[str, ...]] = Counter()  # tokens of a text, by field

    def message(self, start: int, end: int, kind: Any, path: tuple[str, ...]) -> None:
        """Count what is in data[start:end], a message of the descriptor `kind`. Raises BadRequest past a limit."""
        at = start
        while at < end:
            tag, at = self._varint(at, end)
            field, wire = kind.fields_by_number.get(tag >> 3), tag & 7
            name = (*path, field.name) if field is not None else path
            self._fields += 1
            if self._fields > MOST_FIELDS:
                raise BadRequest(
                    _label(name), f"has too many entries; all of a request together are at most {MOST_FIELDS}"
                )
            if wire == _VARINT:
                _, at = self._varint(at, end)
            elif wire in _FIXED_BYTES:
                at += _FIXED_BYTES[wire]
            elif wire == _BYTES:
                size, at = self._varint(at, end)
                inside, at = at, at + size
                if at <= end and field is not None:
                    self._content(inside, at, field, name)
            else:  # groups, which this API does not have
                raise BadRequest(*_MALFORMED)
            if at > end:
                raise BadRequest(*_MALFORMED)

    def _content(self, start: int, end: int, field: Any, name: tuple[str, ...]) -> None:
        kind = field.message_type
        if name == ("text",) and end - start > self._most_bytes:
            raise BadRequest("prompt", f"has {end - start} bytes; at most {self._most_bytes}")
        if kind is not None and not kind.GetOptions().map_entry:
            self.message(start, end, kind, name)
        elif field.cpp_type == field.CPPTYPE_UINT32:  # packed: each number ends with a byte below 128
            count = int(np.count_nonzero(np.frombuffer(self._data, np.uint8, end - start, start) < 128))
            if name in (("token_ids", "ids"), ("token_ids",), ("resume", "token_ids")):
                self._tokens[name] += count  # a field may come in several parts
                if (tokens := self._tokens[name]) > self._most_tokens:
                    raise BadRequest(_label(name), f"has {tokens} ids; a text has at most {self._most_tokens}")
                return
            self._listed += count
            if self._listed > MOST_LISTED:
                raise BadRequest(_label(name), f"has too many ids; all lists together have at most {MOST_LISTED}")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at
        raise BadRequest(*_MALFORMED)


def _label(name: tuple[str, ...]) -> str:
    """A field's name in errors."""
    match name:
        case ():
            return "request"
        case ("token_ids", _):
            return "prompt.token_ids"
        case ("sampling", listed, *_):
            return listed
    return ".".join(name)
