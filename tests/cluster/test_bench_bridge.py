"""`dendro bench bridge`: tokens a round through each bridge, and the drafter of another tokenizer that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tree_layers.checkpoint import read_facts

from cluster.bench.bridge import BRIDGE, OFF, SHAPES, BridgeOptions, answers_of, cases_of, rows_of
from cluster.bench.bridge_drafters import make_drafter
from cluster.bench.compared import differing
from cluster.config import DEMO_MODELS
from tests.support import other_tokenizers, tiny_models

PROMPTS = ((10, 20, 30, 40, 7, 8), (9, 200, 150, 151, 40, 41))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A target, a drafter of its tokenizer and one of another."""
    folder = tmp_path_factory.mktemp("bench_bridge")
    tiny_models.make_checkpoint(folder / "target", "llama")
    tiny_models.make_checkpoint(folder / "same", "llama", seed=3, num_hidden_layers=1)
    tokenizer = other_tokenizers.byte_level([Path(json.__file__).read_text()], 300)
    tiny_models.make_checkpoint(
        folder / "other", "llama", seed=3, num_hidden_layers=1, vocab_size=tokenizer.get_vocab_size()
    )
    tokenizer.save(str(folder / "other" / "tokenizer.json"))
    return folder


@pytest.mark.slow
async def test_each_drafter_is_measured_through_its_bridges_and_changes_no_answer(models):
    cases, steps = cases_of(models / "same", models / "other"), []
    options = BridgeOptions(tokens=12, seed=5)
    answers = await answers_of(
        models / "target", cases, PROMPTS, options, lambda title, count: lambda: steps.append(title)
    )
    assert differing(answers, lambda way: (cases[0], way[1], OFF)) == []
    rows = rows_of(answers)
    assert [(row["drafter"], row["bridge"], row["temperature"], tuple(row["per_round"])) for row in rows] == [
        (case.drafter, case.bridge, temperature, SHAPES) for case in cases for temperature in (0.0, 1.0)
    ]
    assert len(steps) == len(PROMPTS) * 2 * (1 + len(cases) * len(SHAPES)), "plain decoding is asked once"
    assert all(emitted >= 1 and held > 1 for row in rows for emitted, held in row["per_round"].values())
    assert len(list(BRIDGE.all_tables({"rows": rows, "aims": []}))) == 2


@pytest.mark.long
def test_the_made_drafter_has_its_own_tokenizer_and_begins_with_the_layers_of_the_demo_s(tmp_path):
    """One step of training, so nearly its first weights: those of equal tokens are the demo drafter's."""
    start, out = DEMO_MODELS / "mamba2", tmp_path / "made"
    make_drafter(start, out, vocabulary=512, minutes=1e-4, seed=0)
    made, given = read_facts(out), read_facts(start)
    assert made.vocabulary == 512 < given.vocabulary
    assert {**made.config, "vocab_size": given.vocabulary}["num_hidden_layers"] == given.config["num_hidden_layers"]
    assert not (out.with_name(".made")).exists(), "what training kept beside it is removed"
