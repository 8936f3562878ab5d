"""A cluster in this process with a Llama drafter: the answers are the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from dendro.answer import Complete, Round
from dendro.client import Asking

from cluster.config import Config
from cluster.running import local_client

PROMPTS = ("one two three, one two", "the end of")


async def ask(client: Asking, prompt: str, temperature: float, speculation: str) -> tuple[list[int], Complete]:
    tokens: list[int] = []
    async for event in client.generate(
        prompt, temperature=temperature, seed=7, max_new_tokens=24, ignore_end=True, speculation=speculation
    ):
        if isinstance(event, Round):
            tokens += event.token_ids
        elif isinstance(event, Complete):
            return tokens, event
    raise AssertionError("no answer is complete")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_llama_drafter_changes_no_token_of_a_llama_target(tmp_path: Path, temperature: float):
    """The drafter has the target's weights, so a tree in time is accepted to its full depth."""
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        tiny_models.make_checkpoint(tmp_path / name)
    config = Config.of(
        {
            "targets": {"target": {"checkpoint": "target", "dtype": "float32", "max_length": 128}},
            "drafters": {"drafter": {"checkpoint": "drafter", "dtype": "float32"}},
            "router": {"draft_timeout_ms": 20_000},
        },
        tmp_path,
    )
    async with local_client(config) as client:
        for prompt in PROMPTS:
            plain, _ = await ask(client, prompt, temperature, "off")
            guessed, complete = await ask(client, prompt, temperature, "(3,2,1)")
            assert guessed == plain
            assert len(plain) == 24
            assert 4 in complete.speculation.emitted, "a whole path of a tree, and the token after it"
