"""The compiled ranking against `drafter_ranking`, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tree_kernels.noise import gumbel_noise
from tree_kernels.ranking import Orders, ranking_of
from tree_kernels.warp import Warp, drafter_ranking


def ranked(logits, groups, orders, width):
    return ranking_of(logits, groups, orders, width).results(len(logits), width)


@pytest.mark.parametrize("vocabulary, width", [(1, 1), (16, 16), (255, 8), (256, 8), (257, 8), (1000, 16), (4099, 8)])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
def test_ids_and_scores_are_those_of_the_reference(vocabulary, width, temperature, tied):
    """Tied logits are whole numbers, with minus infinities; at temperature 0 most of them are equal."""
    rows, generator = 5, torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary + 3, generator=generator)
    if tied:
        logits = logits.round()
        logits[:, ::5] = -math.inf
    noise = None if temperature == 0 else gumbel_noise(7, range(rows), vocabulary)
    wanted = drafter_ranking(logits[:, :vocabulary], Warp(temperature), noise, width)
    each = [None] * rows if noise is None else list(noise)
    ids, scores = ranked(logits, [1] * rows, Orders([temperature] * rows, each, [vocabulary] * rows), width)
    assert np.array_equal(ids, wanted.ids.numpy()) and np.array_equal(scores, wanted.scores.numpy())


def test_rows_of_several_sessions_have_their_own_temperature_noise_and_vocabulary():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    noise = [None, *gumbel_noise(3, [4, 9], 500)]
    degrees, vocabularies = [0.0, 0.5, 2.0], [500, 90, 300]
    ids, scores = ranked(logits, [1] * 3, Orders(degrees, noise, vocabularies), 8)
    for row, count in enumerate(vocabularies):
        own = noise[row]
        alone = drafter_ranking(
            logits[row : row + 1, :count], Warp(degrees[row]), None if own is None else own[None, :count], 8
        )
        assert np.array_equal(ids[row], alone.ids[0].numpy()) and np.array_equal(scores[row], alone.scores[0].numpy())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_to_which_minus_infinity_is_added_are_ranked_last(temperature):
    """As those that a structure does not allow; at temperature 0, too."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    removed = torch.arange(300) % 50 != 7  # all but six tokens
    noise = gumbel_noise(7, [3], 300)
    added = noise[0] if temperature else torch.zeros(300)
    ids, scores = ranked(logits, [1], Orders([temperature], [added.masked_fill(removed, -math.inf)], [300]), 8)
    masked = logits.masked_fill(removed, -math.inf)
    wanted = drafter_ranking(masked, Warp(temperature), noise if temperature else None, 8)
    assert np.array_equal(ids, wanted.ids.numpy()) and np.array_equal(scores, wanted.scores.numpy())
    assert sorted(ids[0, :6].tolist()) == [7, 57, 107, 157, 207, 257] and np.isneginf(scores[0, 6:]).all()


def test_a_nan_is_ranked_last_and_ids_stay_distinct():
    logits = torch.full((1, 12), math.nan)
    logits[0, 5] = 1.0
    ids, scores = ranked(logits, [1], Orders([0.0], [None], [12]), 6)
    assert ids[0].tolist() == [5, 0, 1, 2, 3, 4] and scores[0, 0] == 1 and not np.isnan(scores).any()
