"""Drafters whose head has some of the target's tokens, against the whole drafter, whose other tokens have no chance.

The others' embedding is exact here, so the two have the same scores of the tokens that both guess.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from dendro.shapes import DynamicShape, LevelShape, NodeShape, TreeShape
from dendro.state import MemoryStates
from dendro.text import Sampling
from dendro.tree import DraftTree
from safetensors.torch import load_file, save_file
from tree_kernels.noise import NoiseTokens, gumbel_noise, reference, rows
from tree_layers.checkpoint import read_facts, weights_fingerprint
from tree_layers.draft_vocabulary import DRAFT_VOCABULARY, IDS, OTHERS_BASIS, OTHERS_ROWS

from drafter_service.confidence import CANDIDATES
from drafter_service.models import load_model
from drafter_service.models.backbone import Ends
from drafter_service.runner import DraftLaw
from tests.support.cut_heads import cut_head, write_draft_vocabulary
from tests.support.opened_texts import OpenedText, drafter_of
from tests.support.tiny_drafters import FAMILIES, VOCABULARY, Family, make_drafter
from tests.support.tiny_heads import make_head

pytestmark = pytest.mark.usefixtures("first_calibrations")
serving = partial(drafter_of, closed=False)

CPU = torch.device("cpu")
GUESSED = tuple(sorted(random.Random(1).sample(range(VOCABULARY), 40)))
OTHERS = tuple(sorted(set(range(VOCABULARY)) - set(GUESSED)))
TREE, DYNAMIC, NODES = LevelShape((3, 2, 2, 1)), DynamicShape(5, 4, 18), NodeShape((3, 2, 0, 1, 0, 2, 1))
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, seed=99, sample_index=1)
MASKED = Sampling(temperature=1.0, top_k=3, top_p=0.9, seed=5)
FORMS = [(family, form) for family in FAMILIES for form in ("eager", "fused") if (family, form) != ("llama", "fused")]


@dataclass(frozen=True)
class Both:
    """A drafter of all tokens, and the same one with a cut head."""

    whole: Path
    cut: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Both]:
    made = {}
    for family in FAMILIES:
        whole = tmp_path_factory.mktemp(family)
        make_drafter(whole, family)
        made[family] = Both(whole, cut_head(whole, tmp_path_factory.mktemp(f"cut-{family}"), GUESSED, VOCABULARY))
    return made


def prompt_of(length: int) -> list[int]:
    return random.Random(3).choices(range(VOCABULARY), k=length)


def following(tree: DraftTree, turn: int) -> list[int]:
    """What a round commits: a guess and a token that is never guessed, or one of either."""
    guess, other = int(tree.tokens[1]), OTHERS[7 * turn % len(OTHERS)]
    return [[guess, other], [other], [guess, GUESSED[5 * turn % len(GUESSED)]]][turn % 3]


@pytest.fixture
def chanceless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager drafters of all tokens give those that the cut head lacks no chance."""
    logits = Ends.logits

    def cut(self: Ends, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden)
        if self.draft_ids is None:
            found[:, list(OTHERS)] = -1e4
        return found

    monkeypatch.setattr(Ends, "logits", cut)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, MASKED], ids=["greedy", "sampled", "masked"])
@pytest.mark.parametrize("shape", [TREE, DYNAMIC, NODES], ids=str)
@pytest.mark.parametrize("family, form", FORMS)
async def test_trees_and_ranks_are_those_of_the_whole_drafter_whose_other_tokens_have_no_chance(
    chanceless, pairs, family: Family, form: str, shape: TreeShape, sampling: Sampling
):
    """Texts have tokens that the head lacks, whose rank is unknown; noise is that of the target's ids."""
    async with serving(pairs[family].whole, form="eager") as one, serving(pairs[family].cut, form=form) as other:
        whole, cut = (
            OpenedText(one, prompt_of(20), sampling, VOCABULARY),
            OpenedText(other, prompt_of(20), sampling, VOCABULARY),
        )
        for text in (whole, cut):
            await text.open()
        for turn in range(4):
            expected, tree = await whole.draft(shape), await cut.draft(shape)
            assert set(tree.tokens[1:].tolist()) <= {*GUESSED}
            assert tree.tokens.tolist() == expected.tokens.tolist()
            assert tree.parents.tolist() == expected.parents.tolist()
            assert tree.trace.tolist() == expected.trace.tolist()
            np.testing.assert_allclose(tree.values, expected.values, atol=1e-4)
            more = following(tree, turn)
            whole.ids += more
            cut.ids += more


@pytest.mark.parametrize("family, form", [("mamba2", "eager"), ("mamba2", "fused"), ("llama", "eager")])
@pytest.mark.parametrize("names", [("logit_bias",), ("banned_ids",), ("allowed_ids",)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_bias_banned_and_allowed_ids_are_those_of_the_target(
    chanceless, pairs, family: Family, form: str, names: tuple[str, ...], temperature: float
):
    bias = tuple((token, 6.0 - token % 13) for token in range(VOCABULARY))
    given = {"logit_bias": bias, "banned_ids": GUESSED[::3] + OTHERS[:5], "allowed_ids": GUESSED[::2] + OTHERS[:5]}
    sampling = Sampling(temperature=temperature, seed=4, **{name: given[name] for name in names})
    async with serving(pairs[family].whole, form="eager") as one, serving(pairs[family].cut, form=form) as other:
        whole, cut = (
            OpenedText(one, prompt_of(9), sampling, VOCABULARY),
            OpenedText(other, prompt_of(9), sampling, VOCABULARY),
        )
        for text in (whole, cut):
            await text.open()
        expected, tree = await whole.draft(TREE), await cut.draft(TREE)
        assert tree.tokens.tolist() == expected.tokens.tolist()
        plain = OpenedText(other, prompt_of(9), replace(sampling, **{name: () for name in names}), VOCABULARY)
        await plain.open()
        assert (await plain.draft(TREE)).tokens.tolist() != tree.tokens.tolist()


@pytest.mark.parametrize("form", ["eager", "fused"])
async def test_an_answer_of_tokens_that_are_never_guessed_is_drafted_all_the_same(pairs, form: str):
    async with serving(pairs["mamba2"].cut, form=form) as engine:
        text = OpenedText(engine, list(OTHERS[:3]), Sampling(allowed_ids=OTHERS), VOCABULARY)
        await text.open()
        for turn in range(6):
            tree = await text.draft(TREE)
            assert set(tree.tokens[1:].tolist()) <= {*GUESSED}
            assert (tree.trace == CANDIDATES).all() and len(tree.trace) == min(turn, 1) * 2
            text.ids += OTHERS[turn : turn + 2]


@pytest.mark.parametrize("form", ["eager", "fused"])
async def test_for_a_target_of_fewer_tokens_only_these_are_guessed_and_ids_past_the_drafters_are_read(pairs, form: str):
    fewer = GUESSED[29] + 1
    async with serving(pairs["mamba2"].cut, form=form) as engine:
        text = OpenedText(engine, [1, 2, 3], replace(SAMPLED, temperature=50.0), fewer)
        with pytest.raises(BadRequest, match=f"vocabulary: is {fewer}: this drafter guesses 30 of them, not 40"):
            await text.open()
        more = OpenedText(engine, [1, VOCABULARY + 3, 2, 400], replace(SAMPLED, temperature=50.0), 500)
        await more.open()
        assert set((await more.draft(TREE)).tokens[1:].tolist()) <= {*GUESSED}


async def test_a_tree_is_no_wider_than_the_head(pairs, tmp_path: Path):
    path = cut_head(pairs["mamba2"].whole, tmp_path, GUESSED[:6], VOCABULARY)
    async with serving(path) as engine:
        text = OpenedText(engine, prompt_of(5), SAMPLED, VOCABULARY)
        await text.open()
        assert sorted((await text.draft(LevelShape((6, 1)))).tokens[1:7].tolist()) == list(GUESSED[:6])
        with pytest.raises(BadRequest, match=r"shape: .* is wider than the 6 tokens that this drafter guesses"):
            await text.draft(LevelShape((7,)))


async def test_a_state_is_of_one_draft_vocabulary_alone(pairs, tmp_path: Path):
    """Saved by the cut drafter, found by another process of it, in either form, and by no other drafter."""
    states, ids = MemoryStates(), prompt_of(30)
    async with serving(pairs["mamba2"].cut, states, form="eager") as engine:
        text = OpenedText(engine, list(ids), GREEDY, VOCABULARY)
        await text.open()
        expected = (await text.draft(TREE)).tokens.tolist()
        assert (await text.close()).saved == len(ids) - 1
    other = cut_head(pairs["mamba2"].whole, tmp_path, GUESSED[1:], VOCABULARY)
    for path, restored in ((pairs["mamba2"].cut, len(ids) - 1), (other, 0), (pairs["mamba2"].whole, 0)):
        async with serving(path, states) as engine:
            text = OpenedText(engine, list(ids), GREEDY, VOCABULARY)
            assert (await text.open()).restored == restored
            if restored:
                assert (await text.draft(TREE)).tokens.tolist() == expected


def test_noise_of_some_tokens_is_that_of_all_at_their_ids():
    """For all places of a token in its block of four, and for blocks of several tiles."""
    whole = gumbel_noise(7, [5, 2**32 - 1], 140_001, 3)
    for ids in ([0], [140_000], [1, 2, 3, 4, 7, 9], sorted(random.Random(2).sample(range(140_001), 40_000))):
        assert torch.equal(NoiseTokens(np.array(ids)).noise(7, [5, 2**32 - 1], 3), whole[:, ids])


def test_noise_of_a_cut_head_is_computed_for_its_tokens_alone(monkeypatch: pytest.MonkeyPatch):
    numbers = list[int]()
    compute = reference.gumbel_of_uniforms
    monkeypatch.setattr(rows, "gumbel_of_uniforms", lambda given: numbers.append(given.size) or compute(given))
    DraftLaw.of(SAMPLED, len(GUESSED), np.array(GUESSED)).added_to(3)
    assert sum(numbers) == len(GUESSED)


def test_others_of_low_rank_are_read_as_their_products(pairs, tmp_path: Path):
    cut_head(pairs["llama"].whole, tmp_path, GUESSED, VOCABULARY, rank=8)
    tensors = load_file(tmp_path / DRAFT_VOCABULARY)
    model, checkpoint = load_model(tmp_path, torch.float32, CPU)
    expected = tensors[OTHERS_ROWS].float() @ tensors[OTHERS_BASIS].float()
    assert torch.equal(model.embed(torch.arange(len(GUESSED), VOCABULARY)), expected)
    assert checkpoint.facts.numbers == sum(t.numel() for t in checkpoint.tensors.values()) + expected.numel()


def test_facts_name_the_guessed_and_all_tokens_and_follow_the_file(pairs, tmp_path: Path):
    facts, whole = read_facts(pairs["mamba2"].cut), read_facts(pairs["mamba2"].whole)
    assert facts.draft is not None and (facts.draft.guessed, facts.draft.all) == (len(GUESSED), VOCABULARY)
    assert facts.vocabulary == whole.vocabulary == VOCABULARY and whole.draft is None
    other = cut_head(pairs["mamba2"].whole, tmp_path, (*GUESSED[:-1], GUESSED[-1] + 1), VOCABULARY, rank=5)
    assert read_facts(other).digest != facts.digest != whole.digest
    before = weights_fingerprint(other)
    tensors = load_file(other / DRAFT_VOCABULARY)
    write_draft_vocabulary(other, tensors[IDS], 2 * tensors[OTHERS_ROWS], tensors[OTHERS_BASIS])
    assert weights_fingerprint(other) != before


def wrong(name: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor | None]]:
    """What is done to a tensor of a good file."""
    if name == IDS:
        return {
            "missing": lambda ids: None,
            "empty": lambda ids: ids[:0],
            "fewer": lambda ids: ids[:-1],
            "two-dimensions": lambda ids: ids[:, None],
            "int64": lambda ids: ids.long(),
            "floats": lambda ids: ids.float(),
            "not-ascending": lambda ids: ids.flip(0),
            "twice": lambda ids: ids.clone().index_fill_(0, torch.tensor([1]), int(ids[0])),
            "negative": lambda ids: ids - int(ids[0]) - 1,
            "past-the-end": lambda ids: ids + VOCABULARY - int(ids[-1]),
        }
    made: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
        "missing": lambda given: None,
        "one-dimension": lambda given: given.flatten(),
        "columns": lambda given: given[:, 1:],
        "whole-numbers": lambda given: given.int(),
        "not-finite": lambda given: given.clone().fill_(float("nan")),
    }
    return made | ({"more": lambda given: torch.cat([given, given])} if name == OTHERS_ROWS else {})


@pytest.mark.parametrize(
    "name, fault", [(name, each) for name in (IDS, OTHERS_ROWS, OTHERS_BASIS) for each in wrong(name)]
)
def test_a_wrong_file_is_refused_by_the_tensors_name(pairs, tmp_path: Path, name: str, fault: str):
    cut_head(pairs["mamba2"].whole, tmp_path, GUESSED, VOCABULARY, rank=4)
    tensors = load_file(tmp_path / DRAFT_VOCABULARY)
    changed = wrong(name)[fault](tensors[name])
    kept = {each: tensor for each, tensor in tensors.items() if each != name}
    save_file(kept if changed is None else kept | {name: changed.contiguous()}, tmp_path / DRAFT_VOCABULARY)
    with pytest.raises(BadRequest, match=rf"^checkpoint: .*{DRAFT_VOCABULARY}.*\b{name}\b"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_file_that_is_cut_short_is_refused(pairs, tmp_path: Path):
    cut_head(pairs["mamba2"].whole, tmp_path, GUESSED, VOCABULARY)
    file = tmp_path / DRAFT_VOCABULARY
    for length in (0, 6, file.stat().st_size - 4):
        file.write_bytes((pairs["mamba2"].cut / DRAFT_VOCABULARY).read_bytes()[:length])
        with pytest.raises(BadRequest, match=rf"^checkpoint: .*{DRAFT_VOCABULARY}"):
            load_model(tmp_path, torch.float32, CPU)


def test_a_drafter_of_another_family_is_refused(tmp_path: Path):
    make_drafter(tmp_path, "granitemoehybrid")
    cut = cut_head(tmp_path, tmp_path / "cut", GUESSED, VOCABULARY)
    with pytest.raises(BadRequest, match=f"{DRAFT_VOCABULARY} is not supported for a drafter of type"):
        load_model(cut, torch.float32, CPU)


@pytest.mark.parametrize("form", ["eager", "fused"])
async def test_an_acceptance_head_of_a_cut_drafter_has_the_same_chances_in_either_form(pairs, tmp_path, form: str):
    head = make_head(pairs["mamba2"].cut, tmp_path)
    values = []
    for each in ("eager", form):
        async with serving(pairs["mamba2"].cut, form=each, head=head) as engine:
            text = OpenedText(engine, prompt_of(12), SAMPLED, VOCABULARY)
            await text.open()
            values.append((await text.draft(DYNAMIC)).values)
    np.testing.assert_allclose(values[0], values[1], atol=1e-3)
