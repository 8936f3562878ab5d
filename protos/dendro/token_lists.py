"""Reads a request's verification mode and lists of tokens, of a client's message or a router's to its peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dendro.errors import BadRequest
from dendro.internal.v1 import calls_pb2
from dendro.modes import VerificationMode
from dendro.text import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_IDS,
    MAX_LISTED_IDS,
    MAX_STOP_IDS,
    check_count,
)
from dendro.v1 import generation_pb2


def edits_from(message: calls_pb2.Sampling | generation_pb2.Sampling) -> dict[str, Any]:
    """The fields of a Sampling that are lists of tokens, of a peer's message or a client's. Their lengths are checked
    before they are copied."""
    check_count("logit_bias", message.logit_bias, MAX_BIASED_IDS)
    check_count("banned_ids", message.banned_ids, MAX_LISTED_IDS)
    check_count("allowed_ids", message.allowed_ids, MAX_LISTED_IDS)
    words: Sequence[calls_pb2.TokenIds | generation_pb2.TokenIds] = message.bad_words
    check_count("bad_words", words, MAX_BAD_WORDS)
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
    check_count("stop_ids", message.stop_ids, MAX_STOP_IDS)
    return tuple(message.stop_ids)
