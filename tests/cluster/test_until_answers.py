"""A cluster in this process whose drafts stop in time: the answers are the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dendro.options import Options
from dendro.speculation import Speculation

from cluster.config import Config
from cluster.running import local_client
from tests.support import tiny_models

pytestmark = pytest.mark.usefixtures("opened_drafters")

PROMPTS = ("one two three, one two", "the end of")
TOKENS = 24


def configured(folder: Path, arms: list[str]) -> Config:
    """A target, and a drafter of similar weights: its guesses are often, but not always, accepted."""
    for name in ("target", "drafter"):
        (folder / name).mkdir()
        model = tiny_models.make_checkpoint(folder / name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder / "drafter")
    return Config.of(
        {
            "targets": {"target": {"checkpoint": "target", "dtype": "float32", "max_length": 128}},
            "drafters": {"drafter": {"checkpoint": "drafter", "dtype": "float32"}},
            "speculation": {"arms": arms, "proposers": ["lookup"]},
            "router": {"draft_timeout_ms": 20_000},
        },
        folder,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_drafts_that_stop_in_time_change_no_token(tmp_path: Path, temperature: float):
    shapes = ["until(0.6,8)", "until(0.3,2,4,9,least=0.01)", "until(auto,8)", "until(auto,2,4,9)"]
    options: Options = {"temperature": temperature, "seed": 7, "max_new_tokens": TOKENS, "ignore_end": True}
    discarded: dict[str, int] = dict.fromkeys(["(1,1,1,1,1,1,1,1)", *shapes], 0)
    accepted = dict.fromkeys(discarded, 0)
    every = Speculation(policy="paper_ucb")  # plays each arm
    async with local_client(configured(tmp_path, ["until(auto,8)", "until(auto,2,4,9)"])) as client:
        for prompt in PROMPTS:
            plain = await client.generate_text(prompt, **options, speculation="off")
            assert len(plain.token_ids) == TOKENS
            for shape in discarded:
                guessed = await client.generate_text(prompt, **options, speculation=shape)
                stats = guessed.complete.speculation
                assert guessed.token_ids == plain.token_ids, shape
                assert stats.rounds_by_shape == {shape: stats.rounds}, "the arm that was asked for, not its numbers"
                accepted[shape] += stats.accepted_tokens
                discarded[shape] += stats.discarded_tokens
            chosen = await client.generate_text(prompt, **options, speculation=every)
            assert chosen.token_ids == plain.token_ids
            assert {"until(auto,8)", "until(auto,2,4,9)"} <= chosen.complete.speculation.rounds_by_shape.keys()
    assert min(accepted.values()) > 0
    assert discarded["until(0.6,8)"] < discarded["(1,1,1,1,1,1,1,1)"], "a draft stops before its guesses are wrong"
