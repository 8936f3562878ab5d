"""A request's verification mode and lists of tokens, in a client's message or a router's to its peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from dendro.declared import check_count
from dendro.errors import BadRequest
from dendro.internal.v1 import calls_pb2
from dendro.modes import VerificationMode
from dendro.options import MAX_BAD_WORD_TOKENS, OPTIONS, SAMPLING_NUMBERS
from dendro.text import Sampling
from dendro.v1 import generation_pb2

_FIELDS = ("logit_bias", "banned_ids", "allowed_ids", "bad_words")


def numbers_from(message: Message) -> dict[str, Any]:
    """The numbers that a peer's Sampling or a client's has. Absent ones are left out."""
    declared = message.DESCRIPTOR.fields_by_name
    given = (name for name in SAMPLING_NUMBERS if not declared[name].has_presence or message.HasField(name))
    return {name: getattr(message, name) for name in given}


def edits_from(message: calls_pb2.Sampling | generation_pb2.Sampling) -> dict[str, Any]:
    """The fields of a Sampling that are lists of tokens, of a peer's message or a client's. Their lengths are checked
    before they are copied."""
    for name in _FIELDS:
        OPTIONS[name].check_entries(getattr(message, name))
    words: Sequence[calls_pb2.TokenIds | generation_pb2.TokenIds] = message.bad_words
    for index, word in enumerate(words):
        check_count(f"bad_words[{index}]", word.ids, MAX_BAD_WORD_TOKENS)
    return {
        "logit_bias": tuple(sorted(message.logit_bias.items())),
        "banned_ids": tuple(message.banned_ids),
        "allowed_ids": tuple(message.allowed_ids),
        "bad_words": tuple(tuple(word.ids) for word in words),
    }


def mode_from(message: calls_pb2.Sampling | generation_pb2.Sampling) -> dict[str, Any]:
    """The fields of a Sampling that are about its verification mode."""
    mode = message.mode or VerificationMode.COUPLED
    if mode not in tuple(VerificationMode):
        raise BadRequest("mode", f"{mode[:32]!r} is not one of {', '.join(VerificationMode)}")
    return {"mode": VerificationMode(mode), "lenience": message.lenience if message.HasField("lenience") else 1.0}


def stop_ids_from(message: calls_pb2.OpenCall | generation_pb2.GenerateRequest) -> tuple[int, ...]:
    """The stop tokens of a peer's message or a client's. Their number is checked before they are copied."""
    OPTIONS["stop_ids"].check_entries(message.stop_ids)
    return tuple(message.stop_ids)


class ListMessages:
    """The message of the token lists that were converted last. The answers of a request share their lists and open
    their texts one after another; converting 70,000 ids takes milliseconds, and copying them a tenth."""

    def __init__(self) -> None:
        self._last = (Sampling(), calls_pb2.Sampling())

    def message_of(self, sampling: Sampling) -> calls_pb2.Sampling:
        """A message with these lists alone; do not modify. From any thread."""
        last, message = self._last
        if all(getattr(last, name) is getattr(sampling, name) for name in _FIELDS):
            return message
        message = calls_pb2.Sampling(
            logit_bias=dict(sampling.logit_bias),
            banned_ids=sampling.banned_ids,
            allowed_ids=sampling.allowed_ids,
            bad_words=[calls_pb2.TokenIds(ids=word) for word in sampling.bad_words],
        )
        self._last = sampling, message
        return message


LISTS = ListMessages()
"""The messages of this process."""
