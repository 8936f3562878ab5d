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
    rotation = Rotation("a:1,b:1,c:1", watch)
    rotation.broke("b:1")
    assert [rotation.take() for _ in range(4)] == ["a:1", "c:1", "a:1", "c:1"]
    watch.now_s += SHUNNED_S
    assert [rotation.take() for _ in range(3)] == ["a:1", "b:1", "c:1"]


def test_a_full_address_is_passed_over_for_less_time_than_a_broken_one():
    watch = SetClock()
    rotation = Rotation("a:1,b:1,c:1", watch)
    rotation.broke("a:1")
    rotation.refused("b:1")
    assert [rotation.take() for _ in range(2)] == ["c:1", "c:1"]
    watch.now_s += FULL_S
    assert [rotation.take() for _ in range(3)] == ["b:1", "c:1", "b:1"]


def test_where_all_broke_the_first_that_did_is_tried():
    watch = SetClock()
    rotation = Rotation("a:1,b:1,c:1", watch)
    for name in ("c", "a", "b"):
        watch.now_s += 1.0
        rotation.broke(f"{name}:1")
    assert rotation.take() == "c:1"
    rotation.broke("c:1")
    assert rotation.take() == "a:1"


@pytest.mark.parametrize("text", ["", " , "])
def test_no_address_is_refused(text):
    with pytest.raises(BadRequest, match="address"):
        Rotation(text)


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "router", "router:", "::1", "::1:9", "http://router:9", "a:1,b", "a:1/v1"]
)
def test_an_address_without_a_port_or_with_a_scheme_is_refused(text):
    with pytest.raises(BadRequest, match=r"^address: '.*' is no host:port, such as 127.0.0.1:9000"):
        Rotation(text)


@pytest.mark.parametrize(
    "text", ["router:9", "a_b.c-d:9", "[::1]:9", "[fe80::1%eth0]:9", "dns:///h", "dns:h:9", "unix:/a"]
)
def test_an_address_with_a_port_or_in_a_form_of_grpc_is_taken(text):
    assert Rotation(text).take() == text
