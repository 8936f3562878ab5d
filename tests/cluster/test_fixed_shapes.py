"""A request that fixes a drafted shape gets its trees, even from a slow drafter, within the configured deadline."""

from __future__ import annotations

import asyncio

from tests.support.edge import EdgePeers, ingress
from tests.support.fakes import FakeDrafter, FakeVerifier, plain
from tests.support.sockets import until
from tests.support.toy_edge import COUNT, PROMPT, asking, edge

SLOW_S = 0.1
"""Time of each draft: above 60 ms, the adaptive deadline's limit where rounds are short; below the configured one."""


async def account(server, request):
    events = [event async for event in server.generate(request)]
    assert [token for event in events for token in event.chunk.token_ids] == plain(PROMPT, COUNT)
    return events[-1].complete.speculation


async def test_a_fixed_shape_waits_for_a_slow_drafter_and_uses_its_trees():
    drafter, verifier = FakeDrafter(pause_s=SLOW_S), FakeVerifier()
    async with edge(drafter, verifier, router={"draft_timeout_ms": 60_000}) as (server, _):
        requests = server.experience["toy"].concurrency
        # The drafter is ready before the first round: only the verifier is still opening the text.
        verifier.before_opened = lambda: until(lambda: drafter.opens and requests.opening == 1)
        stats = await account(server, asking("(2,1,1)"))
    assert stats.late_drafts == 0 and stats.accepted_tokens > 0
    assert stats.drafted_tokens == 6 * stats.rounds, "every round has its full tree"


async def test_the_requests_own_deadline_shortens_the_wait_of_a_fixed_shape():
    """Drafts and the server's deadline take ten minutes, so a round that waited for its draft would time out."""
    patient = {"draft_timeout_ms": 600_000}
    async with edge(FakeDrafter(pause_s=600.0), FakeVerifier(), router=patient) as (server, _), asyncio.timeout(20):
        request = asking("(2,1,1)")
        request.speculation.deadline_ms = 1
        stats = await account(server, request)
    assert stats.late_drafts == stats.rounds == COUNT


async def test_only_a_policys_choice_has_an_adaptive_deadline():
    peers = EdgePeers()
    for request in (_of_text(asking("auto")), _of_text(asking("(2,1)"))):
        assert [event async for event in ingress(peers).generate(request)]
    assert peers.adaptive == [True, False]


def _of_text(request):
    """The request with a text prompt, for a model whose tokens are bytes."""
    request.text = "walk"
    return request
