"""Several addresses: calls take them in turn, and pass over those that broke."""

from __future__ import annotations

import pytest
from dendro.errors import BadRequest
from dendro.rotation import FULL_S, SHUNNED_S, Rotation

from tests.support.virtual_time import SetClock


def test_calls_take_the_addresses_in_turn():
    rotation = Rotation("a:1, b:1,c:1,a:1")
    assert [rotation.take() for _ in range(7)] == ["a:1", "b:1", "c:1", "a:1", "b:1", "c:1", "a:1"]


def test_a_broken_address_is_passed_over_for_a_while():
    watch = SetClock()
    rotation = Rotation("a,b,c", watch)
    rotation.broke("b")
    assert [rotation.take() for _ in range(4)] == ["a", "c", "a", "c"]
    watch.now_s += SHUNNED_S
    assert [rotation.take() for _ in range(3)] == ["a", "b", "c"]


def test_a_full_address_is_passed_over_for_less_time_than_a_broken_one():
    watch = SetClock()
    rotation = Rotation("a,b,c", watch)
    rotation.broke("a")
    rotation.refused("b")
    assert [rotation.take() for _ in range(2)] == ["c", "c"]
    watch.now_s += FULL_S
    assert [rotation.take() for _ in range(3)] == ["b", "c", "b"]


def test_where_all_broke_the_first_that_did_is_tried():
    watch = SetClock()
    rotation = Rotation("a,b,c", watch)
    for name in ("c", "a", "b"):
        watch.now_s += 1.0
        rotation.broke(name)
    assert rotation.take() == "c"
    rotation.broke("c")
    assert rotation.take() == "a"


@pytest.mark.parametrize("text", ["", " , "])
def test_no_address_is_refused(text):
    with pytest.raises(BadRequest, match="address"):
        Rotation(text)
