"""Peers whose answers have any number in any field: a field of an honest engine's message is changed as it is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dendro.serving import ReplicaKind
from google.protobuf.descriptor import FieldDescriptor

NUMBERS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 63, 64, 65, 101, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 7, 10**6, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -2, -1, 0, 1, 63, 2**31 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: (math.nan, math.inf, -math.inf, -3e38, -700.0, -1e-40, 0.0, 0.5, 3e38),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_STRING: ("", "\n", "x" * 5000, "\u202e"),
}
"""By type of field: the ends of its range, and what is next to the bounds that we have."""


def numeric_fields(message: Any) -> list[tuple[Any, FieldDescriptor]]:
    """Every field that is not a message, of a message and those in it that are present."""
    found = []
    for each in message.DESCRIPTOR.fields:
        if each.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            found.append((message, each))
        elif not each.is_repeated and message.HasField(each.name):
            found += numeric_fields(getattr(message, each.name))
    return found


def lie(message: Any, chance: random.Random, spare: tuple[str, ...] = ()) -> None:
    """Change one field to any value of its type, but for those named in `spare`."""
    fields = [(part, each) for part, each in numeric_fields(message) if each.name not in spare]
    if not fields:
        return
    part, each = chance.choice(fields)
    numbers = NUMBERS[each.cpp_type]
    if not each.is_repeated:
        setattr(part, each.name, chance.choice(numbers))
        return
    said = list(getattr(part, each.name))
    match chance.randrange(4):
        case 0 if said:
            said[chance.randrange(len(said))] = chance.choice(numbers)
        case 1:
            said += [chance.choice(numbers)] * chance.choice((1, 64, 70_000))
        case 2:
            del said[chance.randrange(len(said) + 1) :]
        case _:
            said = [chance.choice(numbers) for _ in said]
    del getattr(part, each.name)[:]
    getattr(part, each.name).extend(said)


def lying(
    dialect: ReplicaKind[Any, Any, Any], chance: random.Random, often: float, about: Callable[[Any], Any]
) -> ReplicaKind[Any, Any, Any]:
    """The same dialect; `often` of its answers have a field changed of the message that `about` picks of the answer."""

    def answer(number: int, outcome: Any) -> Any:
        message = dialect.answer(number, outcome)
        if chance.random() < often:
            lie(about(message), chance, spare=("call",))
        return message

    return replace(dialect, answer=answer)


def lying_hello(dialect: ReplicaKind[Any, Any, Any], chance: random.Random) -> ReplicaKind[Any, Any, Any]:
    """The same dialect; a field of the hello is changed."""

    def frame(hello: Any, answers: list[Any]) -> Any:
        if hello is not None:
            lie(hello, chance, spare=("protocol",))
        return dialect.frame(hello, answers)

    return replace(dialect, frame=frame)
