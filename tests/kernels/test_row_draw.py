"""The draw in one pass against the scores of all tokens: the same token, whatever the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.noise import gumbel_noise, gumbel_of_words
from tree_kernels.processor import why_not_vectors
from tree_kernels.row_draw import RowDraw, shapes
from tree_kernels.warp import LARGEST_TEMPERATURE, Warp, tokens_of

pytestmark = pytest.mark.skipif(bool(why_not_vectors()), reason=why_not_vectors())
TEMPERATURES = (1e-6, 0.1, 0.7, 1.0, 1.3, 100.0, 1e29, LARGEST_TEMPERATURE)


def expected(logits: torch.Tensor, temperature: float, seed: int, position: int, sample: int) -> int:
    noise = gumbel_noise(seed, [position], logits.shape[1], sample) if temperature else None
    return int(tokens_of(logits, Warp(temperature), noise)[0])


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 5, 255, 256, 257, 4099, 49_152, 50_277])
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 1e4, 1e30])
def test_tokens_are_those_of_the_scores_of_all(vocabulary, scale):
    draw, generator = RowDraw(vocabulary), torch.Generator().manual_seed(vocabulary)
    for trial, temperature in enumerate(TEMPERATURES):
        logits = scale * torch.randn(1, vocabulary, generator=generator)
        given = (2**64 - 1 - 977 * trial, 2**32 - 1 - trial, trial)
        token = draw.sampled(logits, temperature, *given)
        undecided = token is None and not bool((logits / temperature).isfinite().all())
        assert undecided or token == expected(logits, temperature, *given)
        assert draw.greedy(logits) == int(logits.argmax())


@pytest.mark.parametrize("step", [1.0, 0.001, 64.0])
def test_ties_and_near_ties_go_to_the_token_of_the_scores_of_all(step):
    """Large equal logits, to which most noise is too small to be added: many scores are equal."""
    draw, generator = RowDraw(1000), torch.Generator().manual_seed(7)
    for trial in range(200):
        logits = 2.0**24 * step + step * torch.randint(0, 3, (1, 1000), generator=generator).float()
        assert draw.sampled(logits, 1.0, trial, 5, 0) in (None, expected(logits, 1.0, trial, 5, 0))
        assert draw.greedy(logits) == int(logits.argmax())


def test_many_rows_have_the_tokens_of_the_scores_of_all():
    draw, generator = RowDraw(3001), torch.Generator().manual_seed(1)
    for trial in range(2000):
        logits = (trial % 9) * torch.randn(1, 3001, generator=generator)
        logits[0, trial] = 3.0 * (trial % 5)
        assert draw.sampled(logits, 0.8, trial, trial, 0) == expected(logits, 0.8, trial, trial, 0)


def test_removed_tokens_are_never_drawn_and_a_row_of_one_token_is():
    draw, logits = RowDraw(700), torch.full((1, 700), -math.inf)
    logits[0, 699] = -3e38
    assert draw.sampled(logits, 1.0, 1, 1, 0) == draw.greedy(logits) == 699
    logits[0, 3] = -2.0
    assert all(draw.sampled(logits, 1.0, seed, 1, 0) == 3 for seed in range(50))


def test_a_row_whose_quotients_overflow_has_the_reference_token_or_none():
    draw, logits = RowDraw(300), torch.zeros(1, 300)
    logits[0, [7, 200]] = 3e38
    assert draw.sampled(logits, 0.001, 1, 1, 0) == expected(logits, 0.001, 1, 1, 0) == 7
    logits.fill_(-3e38)  # all quotients are minus infinity, though the row is usable
    assert draw.sampled(logits, 0.001, 1, 1, 0) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 255, 256, 699])
def test_one_pass_decides_no_row_with_a_nan_or_an_infinity(bad, place):
    draw, logits = RowDraw(700), torch.randn(1, 700)
    logits[0, place] = bad
    assert draw.sampled(logits, 1.0, 1, 1, 0) is None and draw.greedy(logits) is None


def test_one_pass_decides_no_row_of_minus_infinities():
    draw, logits = RowDraw(700), torch.full((1, 700), -math.inf)
    assert draw.sampled(logits, 1.0, 1, 1, 0) is None and draw.greedy(logits) is None


def test_one_pass_does_not_decide_among_more_contenders_than_there_is_room_for():
    """Equal logits so large that no noise changes a score: every token is a contender."""
    assert RowDraw(5000).sampled(torch.full((1, 5000), 2.0**40), 1.0, 1, 1, 0) is None


def test_the_table_is_below_the_noise_of_every_part():
    lower = shapes.lower_bounds()
    assert len(lower) == shapes.BINS
    for part in range(1, shapes.BINS):
        first, last = part << 28, (part + 1 << 28) - 1
        noise = gumbel_of_words(np.array([2**32 - 1 - first, 2**32 - 1 - last], np.uint32))
        assert noise.min() - 0.01 < lower[part] < noise.min()


def test_there_is_no_draw_in_one_pass_where_nothing_can_be_compiled(monkeypatch):
    def refused(module):
        raise NoKernelsError("none here")

    monkeypatch.setattr("tree_kernels.row_draw.cpu.load_kernels", refused)
    with pytest.raises(NoKernelsError):
        RowDraw(10)
