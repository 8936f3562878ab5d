"""Places at a verifier are shared by tenant: one that opens many texts keeps no other out."""

from __future__ import annotations

from collections import deque

import pytest
from dendro.calls import CloseCall, OpenCall, Opened
from dendro.engine import Ticket
from dendro.errors import Overloaded
from tree_kernels.tree_attention import PAGE

from tests.support.routers import RoundByRound
from verifier_service.requests import Capacity, PendingCall
from verifier_service.scheduler import StepScheduler


class Tenants:
    """Texts of one token, which need no step: they are open as soon as they are admitted."""

    def __init__(self, max_sessions: int, max_waiting: int) -> None:
        self.scheduler = StepScheduler(
            Capacity(
                vocabulary=100,
                max_length=64,
                max_rows=16,
                max_depth=8,
                max_sessions=max_sessions,
                max_waiting=max_waiting,
                step_rows=64,
                sizes=(8, 16, 64),
                prefill_rows=16,
                pages=200,
                share_prefixes=True,
                first_scratch=201 * PAGE,
                end_ids=frozenset(),
            )
        )
        self.open: dict[str, RoundByRound] = {}
        self.admitted: deque[str] = deque()
        self.refused: deque[str] = deque()

    def opens(self, *names: str) -> None:
        """Texts, each named by its tenant and a number."""
        for name in names:
            router = self.open[name] = RoundByRound(None, [1], count=9, tenant=name[0])

            def settled(value: object, name: str = name) -> None:
                assert isinstance(value, Opened | Overloaded)
                (self.admitted if isinstance(value, Opened) else self.refused).append(name)

            call = OpenCall(router.update(), router.parameters)
            self.scheduler.submit(PendingCall(call, Ticket(0.0, settled)))
        assert self.scheduler.next() is None

    def closes(self, name: str) -> None:
        self.scheduler.submit(PendingCall(CloseCall(self.open.pop(name).update()), Ticket(0.0)))
        assert self.scheduler.next() is None


def test_a_free_place_goes_to_the_oldest_text_of_the_tenant_with_the_fewest():
    tenants = Tenants(max_sessions=3, max_waiting=20)
    tenants.opens(*(f"A{number}" for number in range(8)))
    tenants.opens("B0", "B1", "C0")
    assert list(tenants.admitted) == ["A0", "A1", "A2"]
    for name in ("A0", "A1", "A2", "B0", "C0"):
        tenants.closes(name)
    assert list(tenants.admitted)[3:] == ["B0", "C0", "A3", "B1", "A4"]


def test_texts_that_come_together_are_admitted_in_turns():
    tenants = Tenants(max_sessions=4, max_waiting=20)
    tenants.opens("A0", "A1", "A2", "A3", "B0", "B1", "C0")
    assert list(tenants.admitted) == ["A0", "B0", "C0", "A1"]


def test_five_requests_for_16_answers_keep_no_other_tenant_out():
    """They take all places, those to wait, too, and the next one that ends makes room for the other tenant."""
    tenants = Tenants(max_sessions=16, max_waiting=64)
    tenants.opens(*(f"A{number}" for number in range(80)))
    assert not tenants.refused
    tenants.opens("B0")
    assert list(tenants.refused) == ["A79"], "the youngest that waits"
    tenants.closes("A7")
    assert tenants.admitted[-1] == "B0"
    tenants.opens("A80")
    tenants.opens("A81")
    assert list(tenants.refused) == ["A79", "A81"], "there was one place to wait"


def test_a_full_queue_refuses_at_once_whom_it_would_give_more_than_others_have():
    tenants = Tenants(max_sessions=1, max_waiting=3)
    tenants.opens("A0", "A1", "A2", "A3")
    for name in ("B0", "A4", "C0", "D0", "E0"):
        tenants.opens(name)
    assert list(tenants.refused) == ["A3", "A4", "A2", "A1", "E0"]
    assert tenants.scheduler.counters.refused == 5
    tenants.closes("A0")
    for name in ("B0", "C0"):
        tenants.closes(name)
    assert list(tenants.admitted) == ["A0", "B0", "C0", "D0"]


@pytest.mark.parametrize("tenant", ["", "A"])
def test_the_texts_of_one_tenant_alone_are_admitted_in_order(tenant: str):
    tenants = Tenants(max_sessions=2, max_waiting=6)
    names = [f"{tenant or ' '}{number}" for number in range(8)]
    tenants.opens(*names)
    for name in names[:6]:
        tenants.closes(name)
    assert list(tenants.admitted) == names
