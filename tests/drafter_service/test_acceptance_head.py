"""An acceptance head in the drafter's engine: both forms agree, no token depends on it, foreign heads are refused."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.errors import BadRequest
from dendro.shapes import BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape
from dendro.state import NoStates
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from safetensors.torch import load_file, save_file

from drafter_service.acceptance_head import FACTS, HEAD_FILE, HeadFacts, read_head, write_head
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support.tiny_drafters import FAMILIES, VOCABULARY, make_drafter
from tests.support.tiny_heads import make_head, random_tensors

CPU = torch.device("cpu")
SHAPES = (
    LevelShape((1, 1, 1, 1)),
    LevelShape((3, 2, 1)),
    NodeShape((2, 1, 0, 2)),
    BeamShape(4, 3),
    DynamicShape(5, 4, 18),
)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=99),
    "masked": Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=5),
}


async def trees_of(path: Path, samplings: list[Sampling], **options: Any) -> list[DraftTree]:
    """The trees of every shape, for growing texts that all draft at once."""
    engine = DrafterEngine.load(path, DrafterOptions(name="tiny", prefill_chunk=8, **options), states=NoStates())
    await engine.start()
    try:
        rng, found = np.random.default_rng(3), list[DraftTree]()
        texts = [Tokens(rng.integers(0, VOCABULARY, 11 + place).tolist()) for place in range(len(samplings))]
        openings, sent = [new_opening() for _ in samplings], [0] * len(samplings)

        def update(place: int) -> TextUpdate:
            start, sent[place] = sent[place], len(texts[place])
            return TextUpdate.of(openings[place], texts[place], start)

        for place, sampling in enumerate(samplings):
            await engine.open(OpenCall(update(place), RequestParameters(sampling, Limits(1000), "", (), VOCABULARY)))
        for shape in SHAPES:
            for _ in range(3):
                calls = [DraftCall(update(place), shape) for place in range(len(samplings))]
                found += await asyncio.gather(*map(engine.draft, calls))
                for text, tree in zip(texts, found[-len(samplings) :], strict=True):
                    text.extend([int(tree.tokens[1]), int(rng.integers(0, VOCABULARY))])
        for place in range(len(samplings)):
            await engine.close(CloseCall(update(place)))
        return found
    finally:
        await engine.stop()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
async def test_both_forms_grow_the_same_trees_with_values_within_1e_4(tmp_path, family, sampling):
    """One text alone, whose fixed trees are one call, and three texts whose levels are."""
    make_drafter(tmp_path, family)
    head = make_head(tmp_path, tmp_path)
    for texts in (1, 3):
        eager, fused = [
            await trees_of(tmp_path, [sampling] * texts, form=form, head=head) for form in ("eager", "fused")
        ]
        for one, other in zip(eager, fused, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()
            np.testing.assert_allclose(one.values, other.values, atol=1e-4)
            assert (one.values[1:] <= one.values[one.parents[1:]]).all() and (one.values <= 0).all()


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
async def test_both_forms_grow_the_same_trees_where_the_likeliest_tokens_are_removed(tmp_path, family):
    make_drafter(tmp_path, family)
    head = make_head(tmp_path, tmp_path)
    sampling = Sampling(temperature=0.05, allowed_ids=(3, 14, 15, 92, 65, 35, 89, 79), seed=7)
    eager, fused = [await trees_of(tmp_path, [sampling], form=form, head=head) for form in ("eager", "fused")]
    for one, other in zip(eager, fused, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()
        np.testing.assert_allclose(one.values, other.values, atol=1e-4 / sampling.temperature)  # as scores are larger


@pytest.mark.parametrize("family", FAMILIES)
async def test_values_are_the_heads_and_fixed_trees_have_the_same_tokens_as_without_it(tmp_path, family):
    make_drafter(tmp_path, family)
    samplings = list(SAMPLINGS.values())
    without = await trees_of(tmp_path, samplings)
    with_head = await trees_of(tmp_path, samplings, head=make_head(tmp_path, tmp_path))
    fixed = slice(0, 3 * 3 * len(samplings))  # three shapes, three trees of each text
    assert all(shape_is_fixed(shape) for shape in SHAPES[:3])
    pairs = list(zip(without[fixed], with_head[fixed], strict=True))
    assert all(one.tokens.tolist() == other.tokens.tolist() for one, other in pairs)
    assert max(np.abs(one.values - other.values).max() for one, other in pairs) > 0.1


def shape_is_fixed(shape: TreeShape) -> bool:
    return isinstance(shape, LevelShape | NodeShape)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_untied_blocks_have_as_many_parameter_sets_and_tied_ones_have_one(tmp_path, tied):
    make_drafter(tmp_path, "mamba2")
    head = read_head(make_head(tmp_path, tmp_path, blocks=3, tied=tied), CPU)
    assert len(head.weights.blocks) == 3
    assert len({id(weight) for weight, _ in head.weights.blocks}) == (1 if tied else 3)
    assert sum(name.endswith(".weight") for name in load_file(tmp_path / HEAD_FILE)) == (1 if tied else 3)


@pytest.mark.parametrize(
    "field, changes",
    [("width", {"width": 48}), ("vocabulary", {"vocabulary": 90}), ("drafter", {"drafter": "0" * 64})],
    ids=["width", "vocabulary", "drafter"],
)
def test_a_head_of_another_drafter_is_refused_with_the_field(tmp_path, field, changes):
    make_drafter(tmp_path, "mamba2")
    options = DrafterOptions(name="tiny", head=make_head(tmp_path, tmp_path, **changes))
    with pytest.raises(BadRequest, match="trained for another drafter") as refused:
        DrafterEngine.load(tmp_path, options, states=NoStates())
    assert refused.value.field == f"head.{field}"


def facts_of(**changes: Any) -> HeadFacts:
    return HeadFacts(
        **{"version": 1, "drafter": "a", "width": 8, "vocabulary": 9, "blocks": 1, "tied": False, "depths": 2} | changes
    )


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda file: file.unlink(), "there is no file"),
        (lambda file: file.write_bytes(b"no"), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "cannot be read"),
        (lambda file: save_file(load_file(file), file), "its header has no"),
        (lambda file: save_file(load_file(file), file, {FACTS: "{"}), "are not JSON"),
        (lambda file: save_file(load_file(file), file, {FACTS: '{"version": 1}'}), "must have exactly"),
        (lambda file: changed(file, blocks=2), "shape of blocks.1.weight is missing"),
        (lambda file: changed(file, width=16), "is \\[8\\], the header says \\[16\\]"),
        (lambda file: changed(file, blocks=10**9), "must be a whole number from 0 to 16"),
        (lambda file: changed(file, version=2), "this release reads 1"),
        (lambda file: unfinite(file), "numbers that are not finite"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, damage, reason):
    file = tmp_path / HEAD_FILE
    write_head(file, facts_of(), random_tensors(facts_of()))
    damage(file)
    with pytest.raises(BadRequest, match=reason) as refused:
        read_head(file, CPU)
    assert refused.value.field.startswith("head") and "\n" not in refused.value.reason


def changed(file: Path, **changes: Any) -> None:
    entries = {name: getattr(facts_of(), name) for name in HeadFacts.__slots__}
    save_file(load_file(file), file, {FACTS: json.dumps(entries | changes)})


def unfinite(file: Path) -> None:
    write_head(file, facts_of(), random_tensors(facts_of()) | {"bias": torch.full((8,), math.nan)})
