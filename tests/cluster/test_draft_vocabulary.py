"""Answers with drafters whose head has some of the target's tokens.

The drafter is the target itself with a cut head, so a token is guessed exactly where the head has it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from dendro.speculation import Speculation
from dendro.text import Sampling
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tree_layers.checkpoint import SAFE

from cluster.checking import examine
from cluster.config import Config, DrafterConfig
from cluster.running import local_client
from cluster.tune.measuring import Ranker
from tests.support import other_tokenizers, tiny_models
from tests.support.cut_heads import cut_head

pytestmark = pytest.mark.usefixtures("opened_drafters")

SIZE = tiny_models.VOCABULARY
GUESSED = tuple(sorted(random.Random(4).sample(range(SIZE), 3 * SIZE // 4)))
PROMPT = [10, 20, 30, 40, 7, 8, 9, 200, 150, 151]
DEPTH = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target; the same model with a cut head; that under other ids with the same head."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.make_checkpoint(folder / "target", "llama")
    other_tokenizers.write_permuted(folder / "target", folder / "permuted")
    cut_head(folder / "target", folder / "cut", GUESSED, SIZE)
    ours, theirs = (Tokenizer.from_file(str(folder / name / "tokenizer.json")) for name in ("target", "permuted"))
    others = [theirs.token_to_id(ours.id_to_token(token)) for token in GUESSED]
    cut_head(folder / "permuted", folder / "cut-permuted", sorted(others), SIZE)
    return folder


def config_of(models: Path, drafter: str, **more: Any) -> Config:
    shared = {"dtype": "float32", "max_sessions": 4}
    return Config.of(
        {
            "targets": {"t": {"checkpoint": models / "target", "max_length": 256, **shared}},
            "drafters": {"d": {"checkpoint": models / drafter, **shared, **more}},
            "speculation": {"proposers": []},
            "router": {"draft_timeout_ms": 20_000},
        },
        models,
    )


def tokens_of_a_chain(answer: list[int], begin: int) -> int:
    """How many tokens a round with a chain of guesses emits from answer token `begin` on."""
    guessed = 0
    while guessed < DEPTH and begin + guessed < len(answer) and answer[begin + guessed] in GUESSED:
        guessed += 1
    return min(guessed + 1, len(answer) - begin)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter, bridge", [("cut", "none"), ("cut-permuted", "intersection")])
async def test_a_token_is_accepted_where_the_head_has_it_and_no_token_changes(models, drafter, bridge, temperature):
    async with local_client(config_of(models, drafter, bridge=bridge)) as client:
        found = {}
        for shape in ("off", "(1,1,1,1)", "dynamic(3,4,9)"):
            done = await client.generate_text(
                PROMPT,
                max_new_tokens=48,
                speculation=Speculation.parse(shape),
                temperature=temperature,
                seed=5,
                ignore_end=True,
            )
            found[shape] = list(done.token_ids)
            if shape == "(1,1,1,1)":
                # A round before the drafter has opened the text has no tree, and emits one token.
                rounds = [part for part in done.rounds if part.token_ids]
                whole = sum(len(part.token_ids) == tokens_of_a_chain(found["off"], part.offset) for part in rounds)
                assert done.complete.drafters[0].rounds > 0
                assert whole >= done.complete.drafters[0].rounds
                assert all(len(part.token_ids) in (1, tokens_of_a_chain(found["off"], part.offset)) for part in rounds)
    assert all(answer == found["off"] for answer in found.values())
    assert set(found["off"]) - {*GUESSED}


def test_check_says_how_many_tokens_are_guessed_and_counts_the_embedding_of_all(models: Path):
    report = examine(config_of(models, "cut", bridge="none"), False, lambda line: None)
    assert not report.problems
    assert [pair.why for pair in report.pairs] == [f"guesses {len(GUESSED)} of {SIZE} tokens"]
    tensors, (cut,) = load_file(models / "cut" / SAFE), report.drafters
    others = (SIZE - len(GUESSED)) * tensors["model.norm.weight"].numel()
    assert cut.weights == 4 * (sum(tensor.numel() for tensor in tensors.values()) + others)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_token_has_its_rank_among_those_that_the_drafter_guesses(models: Path, temperature: float):
    answer, sampling = random.Random(7).choices(range(SIZE), k=30), Sampling(temperature=temperature, seed=3)
    ranked = []
    for name, width in (("target", SIZE), ("cut", len(GUESSED))):
        config = DrafterConfig(checkpoint=models / name, dtype="float32")
        ranked.append(Ranker(config, "cpu", width).ranks(answer[:10], answer[10:], sampling))
    for token, whole, cut in zip(answer[10:], *ranked, strict=True):
        assert (cut == len(GUESSED)) == (token not in GUESSED)
        assert token not in GUESSED or cut <= whole
