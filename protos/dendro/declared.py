"""What the declaration of a request's option says. The declarations are in `dendro.options`."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dendro.errors import BadRequest


class OptionGroup(StrEnum):
    """The part of a request that an option belongs to: a panel of `dendro generate --help`, but for REQUEST, whose
    options stand beside those of the call."""

    REQUEST = "request"
    SAMPLING = "sampling"
    STRUCTURE = "structure"
    OUTPUT = "output"
    SPECULATION = "speculation"


class JsonType(StrEnum):
    """The type of a value in JSON. The clients read an argument by it."""

    NUMBER = "number"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    STRING = "string"
    ARRAY = "array"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class NumberBounds:
    """Numbers that a field accepts: an interval, and the words of a refusal.

    >>> NumberBounds(0, 1, "[)").holds(1)
    False
    >>> NumberBounds(0, 1, "[)").must
    'must lie in [0, 1)'
    """

    least: float
    most: float
    ends: str = "[]"  # a round bracket: the interval has not that end
    besides: float | None = None  # accepted beside the interval
    words: str = ""  # "must ..."; empty: made of the interval

    def holds(self, value: float) -> bool:
        """True if the field accepts a number; False for NaN."""
        above = self.least <= value if self.ends[0] == "[" else self.least < value
        below = value <= self.most if self.ends[1] == "]" else value < self.most
        return (above and below) or value == self.besides

    @property
    def must(self) -> str:
        return self.words or f"must lie in {self.ends[0]}{self.least:g}, {self.most:g}{self.ends[1]}"

    def check(self, field: str, value: float) -> None:
        """Raise BadRequest, naming the field, for a number that it does not accept."""
        if not self.holds(value):
            raise BadRequest(field, f"{self.must}; got {value}")


def whole(least: int, most: int) -> NumberBounds:
    """The whole numbers from `least` to `most`."""
    return NumberBounds(least, most, words=f"must lie in {least} to {most}")


def unsigned(bits: int) -> NumberBounds:
    """The whole numbers of `bits` bits."""
    return NumberBounds(0, 1 << bits, "[)", words=f"must be an unsigned {bits}-bit number")


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option of a request."""

    group: OptionGroup
    json_type: JsonType
    help: str  # a line of `dendro generate --help`
    default: Any = None  # None: the server's, or nothing
    bounds: NumberBounds | None = None  # bounds of the number, or of each number of an array or a mapping
    entries: int | None = None  # most entries of an array or a mapping
    items: JsonType = JsonType.INTEGER  # type of an array's items
    limits: str = ""  # limits that `bounds` does not express, in words
    flags: tuple[str, ...] | None = None  # flags of the command line; None: made of the name; empty: no flag
    name: str = ""  # name in the protocol, the clients and errors; read from the list of declarations

    @property
    def accepts(self) -> str:
        """The bounds in words; empty: there are none."""
        if self.limits or self.bounds is None:
            return self.limits
        return self.bounds.must.removeprefix("must lie in ").removeprefix("must be ")

    def check(self, value: float, part: str = "") -> None:
        """Raise BadRequest for a number out of bounds. part: its place in the field, as `[7]`"""
        assert self.bounds is not None
        self.bounds.check(f"{self.name}{part}", value)

    def check_entries(self, values: Sized) -> None:
        """Raise BadRequest for too many entries. Call it before they are copied."""
        assert self.entries is not None
        check_count(self.name, values, self.entries)


def check_count(field: str, values: Sized, most: int) -> None:
    """Raise BadRequest for a field with more than `most` values. Call it before they are copied."""
    if len(values) > most:
        raise BadRequest(field, f"has {len(values)} entries; at most {most}")
