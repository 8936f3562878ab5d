"""Levels in one call: the tokens, forward calls and guesses of each, with the model's kernels called as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.shapes import TreeShape
from tree_kernels.noise import gumbel_noise
from tree_kernels.ranking import Orders, ranking_of

from drafter_service.grow import fixed_form
from drafter_service.models import DrafterModel, load_model
from drafter_service.models.memory import FusedMemory
from drafter_service.plan import Chains, Level, Levels, Nodes, TextFold
from tests.support.text_cases import ints
from tests.support.tiny_mamba import Family, make_checkpoint, tiny_config

WIDTH = 4


def model_of(folder: Path, family: Family, dtype: torch.dtype = torch.float32) -> DrafterModel:
    make_checkpoint(folder, family, config=tiny_config(family, 101))
    return load_model(folder, dtype, torch.device("cpu"), form="fused")[0]


def memory_of(model: DrafterModel, nodes: int) -> FusedMemory:
    memory = model.memory(2, nodes)
    assert isinstance(memory, FusedMemory)
    return memory


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.inference_mode()
def test_a_call_that_ranks_gives_the_guesses_of_the_forward_the_logits_and_the_ranking_alone(tmp_path, family):
    """Two trees, one at temperature 0. More rows than there is room for at first."""
    model = model_of(tmp_path, family)
    vocabulary = model.vocabulary
    orders = Orders([0.7, 0.0], [gumbel_noise(5, [1], vocabulary)[0], None], [vocabulary, vocabulary - 9])
    one, other = memory_of(model, 200), memory_of(model, 200)
    slots, tokens = np.arange(1, 101), np.random.default_rng(0).integers(0, vocabulary, 100)
    roots = Level(ints(3, 8), [1, 1], [0, 0], [0, 0], [0, 0], [Nodes([101], [-1]), Nodes([102], [-1])])
    below = [Nodes([101, *slots[:70]], [-1] + [0] * 70), Nodes([102, *slots[70:]], [-1] + [0] * 30)]
    for level, groups in ((roots, [1, 1]), (Level(tokens, [70, 30], [0, 0], [0, 0], [1, 1], below), [70, 30])):
        ids, scores, _ = one.guesses(level, groups, level.depths, orders, WIDTH)
        ranking = ranking_of(model.logits(other.level(level)), groups, orders, WIDTH)
        wanted_ids, wanted_scores = ranking.results(level.count, WIDTH)
        assert np.array_equal(ids, wanted_ids) and np.array_equal(scores, wanted_scores)


@pytest.mark.parametrize("shape", ["(1,1,1,1)", "(3,2,1)", "(2,3,4)"])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.inference_mode()
def test_levels_in_one_call_are_those_of_a_call_each(tmp_path, family, shape):
    """From the root on, and from the second level on."""
    model, form = model_of(tmp_path, family), fixed_form(TreeShape.parse(shape))
    slots = np.random.default_rng(1).permutation(np.arange(1, 1 + len(form.above))).tolist()
    noise = list(gumbel_noise(5, range(1, 1 + len(form.counts)), model.vocabulary))
    every = [Orders([0.7], [row], [model.vocabulary]) for row in noise]
    memory, tokens, wanted, levels, done = memory_of(model, 60), [7], [], [], 0
    for depth, count in enumerate(form.counts):
        nodes = Nodes(slots[: done + count], form.above[: done + count])
        levels.append(Level(np.array(tokens), [count], [0], [0], [depth], [nodes]))
        wanted.append(memory.guesses(levels[-1], [count], [depth], every[depth], WIDTH))
        done += count
        below = zip(form.above[done:], form.ranks[done:], strict=True)
        ids = np.concatenate([each.candidates for each in wanted])
        tokens = [ids[above, rank] for above, rank in below if done - count <= above < done]
    for first in (0, 1):
        again = memory if first else memory_of(model, 60)
        orders = Orders([0.7] * len(noise[first:]), noise[first:], [model.vocabulary] * len(noise[first:]))
        ranks = form.ranks[sum(form.counts[:first]) :]
        tokens = levels[first].tokens.tolist()
        rows = Levels(tokens, 0, 0, 0, first, Nodes(slots, form.above), form.counts[first:], ranks)
        ids, scores, _ = again.guesses(rows, rows.groups, range(first, len(form.counts)), orders, WIDTH)
        assert np.array_equal(ids, np.concatenate([each.candidates for each in wanted[first:]]))
        assert np.array_equal(scores, np.concatenate([each.scores for each in wanted[first:]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 3, 100])
@pytest.mark.parametrize("shape", ["(1)", "(1,1,1)", "(3,2,1)"])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.inference_mode()
def test_tokens_of_the_text_before_the_levels_give_what_a_chain_of_their_own_gives(
    tmp_path, family, shape, length, dtype
):
    """With a fold before both; a long text has more rows than there is room for at first, and ids past the embedding.
    Afterwards the text's memory is the same, too."""
    model, form = model_of(tmp_path, family, dtype), fixed_form(TreeShape.parse(shape))
    text = np.random.default_rng(0).integers(0, model.vocabulary + 5, length).tolist()
    slots, root = list(range(11, 11 + len(form.above))), 9
    noise = list(gumbel_noise(5, range(4, 4 + length + len(form.counts)), model.vocabulary))
    rows = len(text) + len(form.counts)
    first = Level(ints(root), [1], [1], [1 + length], [0], [Nodes(slots[:1], [-1])])
    fold = TextFold(0, 0, 1, (3,))

    def begun() -> FusedMemory:
        memory = memory_of(model, 60)
        memory.guesses(Level(ints(7), [1], [0], [0], [0], [Nodes([3], [-1])]), [1], [0], one_order(0), WIDTH)
        return memory

    def one_order(place: int, count: int = 1) -> Orders:
        span = slice(place, place + count)
        return Orders([0.7] * count, noise[span], [model.vocabulary] * count)

    apart = begun()
    apart.fold([fold])
    hidden = apart.chain(chain_of([*text, root], roots=[slots[0]])).flatten(0, 1)
    wanted = [apart.guesses_of_hidden(hidden, [1] * len(hidden), [0] * len(hidden), one_order(0, len(hidden)), WIDTH)]
    if len(form.counts) > 1:
        child = [wanted[0].candidates[-1][rank] for rank in form.ranks[1 : 1 + form.counts[1]]]
        below = Levels(child, 1, 1, 1 + length, 1, Nodes(slots, form.above), form.counts[1:], form.ranks[1:])
        later = one_order(len(hidden), len(form.counts) - 1)
        wanted.append(apart.guesses(below, below.groups, range(1, len(form.counts)), later, WIDTH))
    joined = begun()
    joined.fold_first([fold])
    every = Levels([*text, root], 1, 1, 1, 0, Nodes(slots, form.above), form.counts, form.ranks)
    depths = [0] * len(text) + list(range(len(form.counts)))
    ids, scores, _ = joined.guesses(every, every.groups, depths, one_order(0, rows), WIDTH)
    assert np.array_equal(ids, np.concatenate([each.candidates for each in wanted]))
    assert np.array_equal(scores, np.concatenate([each.scores for each in wanted]))
    saved = joined.save(1, 1 + length), apart.save(1, 1 + length)
    assert all(np.array_equal(ours, saved[1][name]) for name, ours in saved[0].items())
    again = joined.guesses(first, [1], [0], one_order(len(text)), WIDTH)  # no text goes before a later call's rows
    assert np.array_equal(again.candidates[0], ids[len(text)])


def chain_of(tokens: list[int], roots: list[int]) -> Chains:
    return Chains(np.array([tokens]), ints(len(tokens)), ints(1), ints(1), ints(1), np.array(roots, np.int64))
