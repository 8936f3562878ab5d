"""Numbers of a JSON text that float64 lacks, with the digits that they were written with."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

MOST_CHARACTERS = 1 << 16
"""Characters of the longest text in which numbers keep their digits."""
FRACTION = re.compile(r"\d[.e]|Infinity")
"""Occurs in a text that has a number of float64."""


class WrittenNumber(float):
    """The nearest number of float64, and the text of the number that float64 lacks."""

    __slots__ = ("text",)
    text: str


def number_of(text: str) -> float:
    """Read a number of JSON that is no whole number: a WrittenNumber if float64 lacks it.

    >>> number_of("0.10"), type(number_of("0.10")).__name__, number_of("0.12345678901234567890").text
    (0.1, 'float', '0.12345678901234567890')
    """
    found = float(text)
    if repr(found) == text:  # most numbers; the digits of others take ten times as long
        return found
    with suppress(InvalidOperation):  # an exponent of more than 18 digits, which Decimal lacks
        if Decimal(repr(found)) == Decimal(text):
            return found
    lacking = WrittenNumber(found)
    lacking.text = text
    return lacking


def json_text(value: Any) -> str:
    """Write a value as JSON, a WrittenNumber with its own digits. Raises ValueError and TypeError for what is no JSON,
    or nested too deeply."""
    try:
        text = json.dumps(value)
        # The library's encoder takes a twentieth of the time. A longer schema is refused later.
        return _with_digits(value) if len(text) <= MOST_CHARACTERS and FRACTION.search(text) else text
    except RecursionError:
        raise ValueError("it nests objects and arrays too deeply") from None


def _with_digits(value: Any) -> str:
    if isinstance(value, WrittenNumber):
        return value.text
    if isinstance(value, dict):  # a key may be a number, which JSON writes as a string
        pairs = [f"{json.dumps({key: None})[1:-7]}: {_with_digits(each)}" for key, each in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join([_with_digits(each) for each in value])}]"
    return json.dumps(value)
