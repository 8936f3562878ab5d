"""A structured answer whose masks take long is left out of the verifier's steps: no other text waits for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from dendro.grammars import GrammarText
from dendro.structure import Structure

from cluster.api.local import LocalClient
from tests.support.self_drafting import self_drafting

SLOW = Structure.regex("[a-f]{9,20}x")
QUICK = Structure.regex("[g-m]{9,20}y")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["masks", "foresee"])
@pytest.mark.parametrize("way", ["off", "(2,1)"])
async def test_no_other_text_waits_for_a_mask_and_the_answer_goes_on_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, way: str
):
    gate, held, inner = threading.Event(), threading.Event(), getattr(GrammarText, part)

    def gated(text: GrammarText, given: object) -> object:
        if text.place().allowed.tobytes() in slow and len(text._taken) >= 3:
            held.set()
            assert gate.wait(60)
        return inner(text, given)

    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4, "speculation": way}
    async with self_drafting(tmp_path) as router:
        client = LocalClient(router)
        expected = [await client.generate_text([5, 6], structure=each, **options) for each in (SLOW, QUICK, None)]
        grammar = await router._served["target"].grammars.compiled(SLOW)
        text = grammar.text(0, [0])
        slow = {text.place().allowed.tobytes()}
        monkeypatch.setattr(GrammarText, part, gated)
        waiting = asyncio.ensure_future(client.generate_text([5, 6], structure=SLOW, **options))
        await asyncio.to_thread(held.wait, 60)
        others = [await client.generate_text([5, 6], structure=each, **options) for each in (QUICK, None)]
        assert not waiting.done()
        gate.set()
        found = [await waiting, *others]
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
