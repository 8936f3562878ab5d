"""What a router may expect of a peer, whether it is in this process or at the other end of a stream.

The same suite runs on the fakes and on the fakes behind a socket; engines are added by naming them in `PEERS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from dendro.calls import CloseCall, DraftCall, OpenCall, Terms, TextUpdate, VerifyCall, new_opening
from dendro.errors import BadRequest, NotFound, Overloaded
from dendro.text import Finish, Limits, Sampling, Text
from dendro.tree import DraftTree, TreeShape
from fakes import VOCABULARY, FakeDrafter, FakeVerifier, new_text, plain
from sockets import drafter_at, verifier_at

from cluster.handles import FarDrafter, FarVerifier

SHAPE = TreeShape.parse("(2,1,1)")


@pytest.fixture(params=["near", "far"])
async def drafter(request) -> AsyncIterator[tuple[FakeDrafter | FarDrafter, FakeDrafter]]:
    engine = FakeDrafter()
    if request.param == "near":
        yield engine, engine
        return
    async with drafter_at(engine) as (_, pool):
        yield (await pool.lease()).peer, engine


@pytest.fixture(params=["near", "far"])
async def verifier(request) -> AsyncIterator[tuple[FakeVerifier | FarVerifier, FakeVerifier]]:
    engine = FakeVerifier()
    if request.param == "near":
        yield engine, engine
        return
    async with verifier_at(engine) as (_, pool):
        yield (await pool.lease()).peer, engine


def whole(text: Text, opening: bytes) -> TextUpdate:
    return TextUpdate(opening, len(text), text.digest(len(text)), 0, tuple(text.ids))


def rest(text: Text, opening: bytes, start: int) -> TextUpdate:
    return replace(whole(text, opening), start=start, tokens=tuple(text.ids[start:]))


def opening_of(text: Text) -> OpenCall:
    return OpenCall(whole(text, new_opening()), Terms(text.sampling, text.limits, "", ()))


async def test_the_hello_is_the_engines_own(drafter, verifier):
    for peer, engine in (drafter, verifier):
        assert await peer.hello() == await engine.hello()


async def test_an_opening_says_what_it_took(verifier):
    peer, _ = verifier
    opened = await peer.open(opening_of(new_text([1, 2, 3, 4])))
    assert (opened.restored, opened.processed) == (0, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_rounds_give_the_plain_answer_and_the_closing_saves_it(drafter, verifier, temperature):
    sampling = Sampling(temperature=temperature, seed=2**64 - 1)
    text = new_text(count=30, sampling=sampling)
    openings = []
    for peer, _ in (drafter, verifier):
        call = opening_of(text)
        openings.append(call.update.opening)
        await peer.open(call)
    told = len(text)
    while text.finish is None:
        base = len(text)
        tree = await drafter[0].draft(DraftCall(rest(text, openings[0], told), SHAPE))
        verdict = await verifier[0].verify(VerifyCall(rest(text, openings[1], told), tree))
        text.commit(verdict)
        told = base
    assert text.answer == plain([5, 6, 7], 30, sampling) and text.finish is Finish.LENGTH
    for (peer, engine), opening in zip((drafter, verifier), openings, strict=True):
        closed = await peer.close(CloseCall(rest(text, opening, told)))
        assert closed.saved == len(text) - 1 and engine.held == {}


async def test_a_verdict_may_be_dropped_and_asked_for_again(verifier):
    peer, _ = verifier
    text = new_text()
    call = opening_of(text)
    await peer.open(call)
    update = rest(text, call.update.opening, len(text))
    first = await peer.verify(VerifyCall(update, DraftTree.root_only(text.root)))
    again = await peer.verify(VerifyCall(update, DraftTree.root_only(text.root)))
    assert first.tokens == again.tokens


@pytest.mark.parametrize("harm", ["unknown opening", "other digest", "a gap in the text"])
async def test_a_text_that_differs_is_not_found(verifier, drafter, harm):
    text = new_text()
    for peer, _ in (verifier, drafter):
        call = opening_of(text)
        await peer.open(call)
        update = rest(text, call.update.opening, len(text))
        bad = {
            "unknown opening": replace(update, opening=new_opening()),
            "other digest": replace(update, digest=update.digest ^ 1),
            "a gap in the text": replace(update, start=len(text) + 1, base=len(text) + 1),
        }[harm]
        with pytest.raises(NotFound):
            if peer is verifier[0]:
                await peer.verify(VerifyCall(bad, DraftTree.root_only(text.root)))
            else:
                await peer.draft(DraftCall(bad, SHAPE))


@pytest.mark.parametrize(
    "tree",
    [DraftTree.root_only(99), DraftTree.of([7, VOCABULARY], [-1, 0])],
    ids=["another root", "past the vocabulary"],
)
async def test_a_tree_that_does_not_fit_is_refused_and_the_opening_stands(verifier, tree):
    peer, _ = verifier
    text = new_text()
    call = opening_of(text)
    await peer.open(call)
    update = rest(text, call.update.opening, len(text))
    with pytest.raises(BadRequest) as refused:
        await peer.verify(VerifyCall(update, tree))
    assert refused.value.field == "tree.tokens"
    verdict = await peer.verify(VerifyCall(update, DraftTree.root_only(text.root)))
    assert list(verdict.tokens) == plain(text.ids, 1)


async def test_no_room_is_overload_and_leaves_nothing_behind(drafter):
    peer, engine = drafter
    engine.max_sessions = 1
    first = opening_of(new_text())
    await peer.open(first)
    with pytest.raises(Overloaded):
        await peer.open(opening_of(new_text()))
    await peer.close(CloseCall(first.update))
    await peer.open(opening_of(new_text()))


async def test_many_requests_do_not_mix(verifier):
    peer, engine = verifier
    engine.pause_s = 0.01
    texts = [Text([token, 2, 3], Sampling(), Limits(20)) for token in range(24)]
    calls = [opening_of(text) for text in texts]
    await asyncio.gather(*(peer.open(call) for call in calls))
    verdicts = await asyncio.gather(
        *(
            peer.verify(VerifyCall(rest(text, call.update.opening, len(text)), DraftTree.root_only(text.root)))
            for text, call in zip(texts, calls, strict=True)
        )
    )
    assert [list(verdict.tokens) for verdict in verdicts] == [plain(text.ids, 1) for text in texts]
    assert engine.largest_batch == len(texts)


async def test_closing_while_opening_frees_the_opening(drafter):
    peer, engine = drafter
    engine.open_pause_s = 30.0
    call = opening_of(new_text())
    opening = asyncio.ensure_future(peer.open(call))
    await asyncio.sleep(0.05)
    opening.cancel()  # what a handle does, before it closes
    await asyncio.wait({opening})
    with pytest.raises(NotFound):
        await peer.close(CloseCall(call.update))
    assert engine.held == {}
