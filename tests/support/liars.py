"""Peers with wrong values in their answers: one field of a correct message is changed before it is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
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
"""Values by type of field: the ends of its range, and those next to our bounds."""


def numeric_fields(message: Any) -> list[tuple[Any, FieldDescriptor]]:
    """All fields that are no messages, of a message and of the messages set in it."""
    found = []
    for each in message.DESCRIPTOR.fields:
        if each.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            found.append((message, each))
        elif not each.is_repeated and message.HasField(each.name):
            found += numeric_fields(getattr(message, each.name))
    return found


def lie(message: Any, chance: random.Random, spare: tuple[str, ...] = ()) -> None:
    """Change one field, not one named in `spare`, to a value of its type."""
    fields = [(part, each) for part, each in numeric_fields(message) if each.name not in spare]
    if not fields:
        return
    part, each = chance.choice(fields)
    numbers = NUMBERS[each.cpp_type]
    if not each.is_repeated:
        setattr(part, each.name, chance.choice(numbers))
        return
    values = list(getattr(part, each.name))
    match chance.randrange(4):
        case 0 if values:
            values[chance.randrange(len(values))] = chance.choice(numbers)
        case 1:
            values += [chance.choice(numbers)] * chance.choice((1, 64, 70_000))
        case 2:
            del values[chance.randrange(len(values) + 1) :]
        case _:
            values = [chance.choice(numbers) for _ in values]
    del getattr(part, each.name)[:]
    getattr(part, each.name).extend(values)


def lying(kind: ReplicaKind, chance: random.Random, often: float, about: Callable[[Any], Any]) -> ReplicaKind:
    """The same kind, but a share `often` of its answers has one field changed, in the message `about(answer)`."""

    def answer(number: int, outcome: Any) -> Any:
        message = kind.answer(number, outcome)
        if chance.random() < often:
            lie(about(message), chance, spare=("call",))
        return message

    return replace(kind, answer=answer)


def lying_hello(kind: ReplicaKind, chance: random.Random) -> ReplicaKind:
    """The same kind, but one field of the hello is changed."""

    def answers(hello: Any = None, answers: Sequence[Any] = ()) -> Any:
        if hello is not None:
            lie(hello, chance, spare=("protocol",))
        return kind.answers(hello=hello, answers=answers)

    return replace(kind, answers=answers)
