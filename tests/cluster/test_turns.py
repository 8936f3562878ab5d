"""Sessions of several turns on a pure state-space target, with a cluster in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dendro.answer import Completion
from dendro.client import Asking
from dendro.errors import Conflict
from dendro.v1 import generation_pb2 as pb

from cluster.config import Config
from cluster.router.admission import check_text_of_resume
from cluster.running import local_client
from tests.support import tiny_hybrids

ADDED = (1, 17, 200)
"""Tokens that a turn adds."""


def tokens(count: int, salt: int) -> list[int]:
    return [(7 * place + 3 * salt) % tiny_hybrids.VOCABULARY for place in range(count)]


async def ask(client: Asking, prompt: list[int], speculation: str = "(2,1)", **options) -> Completion:
    return await client.generate_text(
        prompt, temperature=0.8, seed=7, max_new_tokens=8, ignore_end=True, speculation=speculation, **options
    )


@pytest.mark.parametrize("family", ["mamba2", pytest.param("mamba", marks=pytest.mark.long)])
async def test_every_turn_of_a_session_has_the_tokens_of_a_new_request_with_the_whole_text(tmp_path: Path, family: str):
    """For turns of several lengths, with a drafter, and with other texts at the same verifier."""
    for name, kind, seed in (("target", family, 0), ("drafter", "mamba2", 1)):
        (tmp_path / name).mkdir()
        tiny_hybrids.make_checkpoint(tmp_path / name, kind, seed)
    config = Config.of(
        {
            "targets": {"target": {"checkpoint": "target", "dtype": "float32", "max_length": 512}},
            "drafters": {"drafter": {"checkpoint": "drafter", "dtype": "float32"}},
        },
        tmp_path,
    )
    async with local_client(config) as client:
        for added in ADDED:
            first = await ask(client, tokens(5, added), keep_session=True)
            text, session = [*tokens(5, added), *first.token_ids], first.complete.session
            for turn in (2, 3):
                more = tokens(added, turn)
                again, _ = await asyncio.gather(
                    ask(client, more, session=session), ask(client, tokens(40, turn), "off", keep_session=True)
                )
                whole = await ask(client, [*text, *more], "off")
                assert again.token_ids == whole.token_ids, (added, turn)
                assert again.complete.target.restored_tokens == len(text) - 1, (added, turn)
                text += [*more, *again.token_ids]


def test_a_resume_with_the_same_count_of_tokens_is_refused_by_its_digest():
    with pytest.raises(Conflict, match="prompt_digest differs; it has 64 bits, and JavaScript"):
        check_text_of_resume(pb.Resume(prompt_tokens=2, prompt_digest=1), [5, 6])
    with pytest.raises(Conflict, match="it had 3 tokens, and has 2"):
        check_text_of_resume(pb.Resume(prompt_tokens=3, prompt_digest=1), [5, 6])
