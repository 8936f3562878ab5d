"""A cluster in this process with a Llama drafter: the answers are the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
from dendro.options import Options

from cluster.api.local import LocalClient
from cluster.config import Config
from cluster.running import local_client, local_ingress
from tests.support import tiny_models

pytestmark = pytest.mark.usefixtures("opened_drafters")

PROMPTS = ("one two three, one two", "the end of")


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
            options: Options = {"temperature": temperature, "seed": 7, "max_new_tokens": 24, "ignore_end": True}
            plain = await client.generate_text(prompt, **options, speculation="off")
            guessed = await client.generate_text(prompt, **options, speculation="(3,2,1)")
            assert guessed.token_ids == plain.token_ids
            assert len(plain.token_ids) == 24
            lengths = guessed.complete.speculation.rounds_by_tokens
            assert 4 in lengths, "a whole path of a tree, and the token after it"


async def test_an_answer_that_grows_past_its_drafters_positions_goes_on_without_trees(tmp_path: Path):
    """Its trees are ordered by the verifier, too; the drafter is asked for none of a text that it would refuse."""
    for name, positions in (("target", 128), ("drafter", 48)):
        (tmp_path / name).mkdir()
        tiny_models.make_checkpoint(tmp_path / name, max_position_embeddings=positions)
    config = Config.of(
        {
            "targets": {"target": {"checkpoint": "target", "dtype": "float32", "max_length": 128}},
            "drafters": {"drafter": {"checkpoint": "drafter", "dtype": "float32"}},
            "router": {"draft_timeout_ms": 20_000},
        },
        tmp_path,
    )
    options: Options = {"temperature": 0.8, "seed": 7, "max_new_tokens": 80, "ignore_end": True}
    async with local_ingress(config) as router:
        client = LocalClient(router)
        plain = await client.generate_text(PROMPTS[0], **options, speculation="off")
        guessed = await client.generate_text(PROMPTS[0], **options, speculation="(1,1)")
        totals = router.totals.targets["target"]
    assert guessed.token_ids == plain.token_ids
    assert totals.ways["ordered"] > 0 and guessed.complete.speculation.accepted_tokens > 0
    assert totals.without_tree["drafter", "limits"] > 20
    assert not {("drafter", "malformed"), ("drafter", "struck")} & totals.without_tree.keys()
