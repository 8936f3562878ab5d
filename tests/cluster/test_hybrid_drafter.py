"""A cluster in this process with a hybrid drafter: the answers are the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
from dendro.options import Options
from tree_layers.checkpoint import read_facts

from cluster.config import Config
from cluster.running import local_client
from drafter_service.models import HYBRIDS
from tests.support import tiny_hybrids

pytestmark = pytest.mark.usefixtures("opened_drafters")

TEXT = [5, 9, 31, 40, 77, 31, 9, 2]
TOKENS = 25
SPREAD = {"tie_word_embeddings": False, "embedding_multiplier": 1.5, "logits_scaling": 0.7}
"""Settings of a Granite without which its likeliest token is nearly always the last one again."""


def config_of(folder: Path, target: Path, drafter: Path) -> Config:
    return Config.of(
        {
            "targets": {"target": {"checkpoint": str(target), "dtype": "float32", "max_length": 192}},
            "drafters": {"drafter": {"checkpoint": str(drafter), "dtype": "float32"}},
            "router": {"draft_timeout_ms": 20_000},
            "speculation": {"proposers": []},
        },
        folder,
    )


async def compare(config: Config, temperature: float, own: bool) -> None:
    """Assert that trees and chains change no token; with the target's own weights, that all their guesses hold."""
    async with local_client(config) as client:
        for prompt in (TEXT, TEXT * 9):  # shorter and longer than a block of positions
            options: Options = {
                "temperature": temperature,
                "seed": 7,
                "max_new_tokens": TOKENS,
                "ignore_end": True,
            }
            plain = await client.generate_text(prompt, **options, speculation="off")
            assert len(plain.token_ids) == TOKENS
            # The drafter keeps what it read, so that the openings below are short however busy the machine is.
            await client.generate_text(prompt, **options, speculation="(1,1,1)")
            for shape in ("(1,1,1)", "(3,2,1)"):
                guessed = await client.generate_text(prompt, **options, speculation=shape)
                assert guessed.token_ids == plain.token_ids
                done = guessed.complete.speculation
                assert done.drafted_tokens > 0
                if own:
                    # Rounds have no tree while the drafter reads the prompt; the last round may be cut.
                    assert done.rounds_by_tokens[4] >= done.rounds - done.late_drafts - 1 > 3, shape


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.long)])
async def test_every_guess_of_a_granite_with_the_targets_own_weights_holds(tmp_path: Path, temperature: float):
    """Chains and trees, with experts and mixers: docs/design/numbers.md#oracles."""
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-tiny", **SPREAD)
    await compare(config_of(tmp_path, tmp_path, tmp_path), temperature, own=True)


@pytest.mark.long
async def test_a_small_granite_changes_no_token_of_a_large_one(tmp_path: Path):
    for name, seed in (("granite-4.0-h-350m", 1), ("granite-4.0-h-tiny", 2)):
        (tmp_path / name).mkdir()
        tiny_hybrids.make_published(tmp_path / name, name, seed, **SPREAD)
    folders = tmp_path / "granite-4.0-h-tiny", tmp_path / "granite-4.0-h-350m"
    assert read_facts(folders[0]).tokenizer == read_facts(folders[1]).tokenizer
    await compare(config_of(tmp_path, *folders), 1.0, own=False)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", HYBRIDS)
async def test_every_guess_of_a_hybrid_with_the_targets_own_weights_holds(
    tmp_path: Path, family: str, temperature: float
):
    tiny_hybrids.make_checkpoint(tmp_path, family)
    await compare(config_of(tmp_path, tmp_path, tmp_path), temperature, own=True)
