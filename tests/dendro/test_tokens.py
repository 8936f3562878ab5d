"""Digests of prefixes, and what a round's bookkeeping costs in a long text."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from dendro import text as module
from dendro.calls import PeerText, TextUpdate, new_opening
from dendro.text import CHECKPOINT_TOKENS, Limits, Sampling, Text, Tokens, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st


def from_scratch(ids) -> int:
    return int.from_bytes(hashlib.blake2b(np.array(ids, "<u4").tobytes(), digest_size=8).digest(), "little")


STEPS = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 3 * CHECKPOINT_TOKENS)),
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("digest"), st.floats(0, 1)),
)


@given(st.lists(STEPS, max_size=12))
@settings(max_examples=150, deadline=None)
def test_a_digest_is_that_of_its_prefix_whatever_was_cut_and_computed_before(steps):
    tokens, ids = Tokens(), []
    for number, (step, amount) in enumerate(steps):
        if step == "extend":
            more = [(number * 7919 + index) % (1 << 32) for index in range(amount)]
            tokens.extend(more)
            ids += more
        elif step == "cut":
            length = int(amount * len(ids))
            tokens.cut(length)
            del ids[length:]
        else:
            length = int(amount * len(ids))
            assert tokens.digest(length) == from_scratch(ids[:length])
    assert tokens.ids == ids and tokens.digest() == from_scratch(ids)


@pytest.mark.parametrize("length", [-1, 4])
def test_a_prefix_that_the_text_does_not_have_has_no_digest(length):
    with pytest.raises(IndexError):
        Tokens([1, 2, 3]).digest(length)


class CountedList(list):
    """Counts the elements that are copied out of it."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        CountedList.copied += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        CountedList.copied += len(self)
        return super().__iter__()


def most_tokens_touched_by_a_round(length: int, monkeypatch) -> int:
    """Of a router's text and one peer's copy, over rounds of two tokens of which the peer's copy loses one."""
    hashed = []
    packed = module.packed_ids
    monkeypatch.setattr(module, "packed_ids", lambda tokens: hashed.append(len(tokens)) or packed(tokens))
    text, peer, opening = Text(range(length), Sampling(), Limits(1 << 20)), PeerText(), new_opening()
    peer.follow(TextUpdate.of(opening, text, 0))
    text._tokens.ids, peer.tokens.ids = CountedList(text.ids), CountedList(peer.ids)
    most = 0
    for number in range(3 * CHECKPOINT_TOKENS // 2):
        hashed.clear()
        CountedList.copied = 0
        start = len(text)
        text.commit(Verdict((number, number + 1), (0, 1), (0,), None, 2))
        update = TextUpdate.of(opening, text, start)
        assert peer.follow(update) == start
        most = max(most, sum(hashed) + CountedList.copied)
    assert peer.ids == text.ids
    return most


def test_a_round_touches_no_more_tokens_of_a_text_of_100000_than_of_one_of_1000(monkeypatch):
    short, long = (most_tokens_touched_by_a_round(length, monkeypatch) for length in (1000, 100_000))
    assert long == short < 64
