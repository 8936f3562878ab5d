"""Checks of a caller's arguments before they become fields of a message: each returns the value or raises BadRequest.

protobuf's own errors share no class and do not name the field.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dendro.errors import BadRequest, one_line

SHOWN_CHARACTERS = 60
UNSIGNED_BITS = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def repeated_key(pairs: Sequence[tuple[str, object]]) -> str | None:
    """The first key that occurs twice among the pairs of a JSON object; None if each occurs once."""
    counts = Counter(key for key, _ in pairs)
    return None if len(counts) == len(pairs) else next(key for key, count in counts.items() if count > 1)


class _Beginning(reprlib.Repr):
    """The `repr` of a value up to SHOWN_CHARACTERS or more, of however many values, and however deep in each other."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxtuple = self.maxlist = self.maxset = self.maxdict = SHOWN_CHARACTERS
        self.maxstring = self.maxlong = self.maxother = 4 * SHOWN_CHARACTERS  # they are cut in their middles

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        items = islice(x.items(), self.maxdict)
        return f"{{{', '.join(f'{self.repr1(key, level - 1)}: {self.repr1(each, level - 1)}' for key, each in items)}}}"


_BEGINNING = _Beginning()


def shown(value: object) -> str:
    """A wrong value in an error's words."""
    return one_line(_BEGINNING.repr(value), SHOWN_CHARACTERS)


def text_of(field: str, value: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(field, f"must be a text; got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(field, "has a surrogate code point, which UTF-8 cannot encode") from None
    return value


def ascii_of(field: str, value: str) -> str:
    """A value of gRPC's metadata."""
    if not (isinstance(value, str) and value.isascii() and (value.isprintable())):
        raise BadRequest(field, f"must be printable ASCII, as it is sent in a header; got {shown(value)}")
    return value


def secret_of(field: str, value: str) -> str:
    """A secret that is sent in a header; the error does not show it."""
    if not (isinstance(value, str) and value.isascii() and value.isprintable() and " " not in value):
        raise BadRequest(field, "must be printable ASCII without spaces, as it is sent in a header")
    return value


def switch_of(field: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(field, f"must be true or false; got {shown(value)}")
    return value


def seconds_of(field: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BadRequest(field, f"must be a positive, finite number of seconds; got {shown(value)}")
    return float(value)


def texts_of(field: str, value: str | Iterable[str]) -> tuple[str, ...]:
    """A text as one, or several."""
    given = (value,) if isinstance(value, str) else items_of(field, value)
    return tuple(text_of(f"{field}[{index}]", each) for index, each in enumerate(given))


def ids_of(field: str, value: Iterable[int]) -> list[int]:
    """Token ids, of any type that is an integer; True and False are none."""
    ids = items_of(field, value)
    for index, each in enumerate(ids):
        try:
            if each is True or each is False:
                raise TypeError
            ids[index] = token = operator.index(each)
        except Exception:  # TypeError, or one of the value's own class
            raise BadRequest(f"{field}[{index}]", f"{shown(each)} is no token id") from None
        if not 0 <= token < 1 << 32:
            raise BadRequest(f"{field}[{index}]", f"{shown(token)} is no token id")
    return ids


def items_of(field: str, value: Iterable[Any]) -> list[Any]:
    """The elements of a sequence; a text, bytes and a mapping are none."""
    if isinstance(value, (str, bytes, bytearray, Mapping)):
        raise BadRequest(field, f"must be a sequence; got {shown(value)}")
    try:
        return list(value)
    except Exception:  # TypeError, or one of the value's own class
        raise BadRequest(field, f"must be a sequence; got {shown(value)}") from None


def pairs_of(field: str, value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise BadRequest(field, f"must be a mapping; got {shown(value)}")
    return list(value.items())


def fill_number(message: Message, name: str, value: float, field: str = "") -> None:
    """Set a number of a message. field: its name in errors, where that is not `name`"""
    try:
        setattr(message, name, value)
    except Exception:  # protobuf's, or of the value's own class
        bits = UNSIGNED_BITS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
        kind = f"an unsigned {bits}-bit number" if bits else "a finite number"
        raise BadRequest(field or name, f"must be {kind}; got {shown(value)}") from None
