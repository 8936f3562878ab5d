"""Confidences: what is fitted online is the law that the ranks were drawn from, and it says what will be accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.confidence import CANDIDATES, MOST_UNSEEN, SHARPEST, Calibration

K = CANDIDATES


def sorted_scores(rng: np.random.Generator, rows: int, spread: float) -> np.ndarray:
    """[rows, K] float32, descending; rows of many widths of gaps."""
    scale = spread * rng.uniform(0.2, 2.0, (rows, 1))
    return -np.sort(-rng.normal(0.0, scale, (rows, K)), axis=1).astype(np.float32)


def law_of(scores: np.ndarray, tau: float, unseen: float) -> np.ndarray:
    """[rows, K + 1] chances of each candidate and of none, as the docstring says them."""
    weights = np.exp((scores - scores[:, -1:]).astype(np.float64) / tau)
    weights = np.concatenate([weights, np.full((len(scores), 1), unseen)], axis=1)
    return weights / weights.sum(1, keepdims=True)


def drawn(rng: np.random.Generator, law: np.ndarray) -> np.ndarray:
    """[rows] one draw of each row's law."""
    return (law.cumsum(1) < rng.random((len(law), 1))).sum(1)


def learnt(scores: np.ndarray, ranks: np.ndarray, calibration: Calibration | None = None) -> Calibration:
    calibration = calibration or Calibration()
    for row, rank in zip(scores, ranks.tolist(), strict=True):
        calibration = calibration.learn(row, rank)
    return calibration


def calibration_error(chances: np.ndarray, came: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: how far chance and frequency lie apart in bins of as many guesses each."""
    parts = np.array_split(np.argsort(chances), bins)
    return sum(abs(chances[part].mean() - came[part].mean()) * len(part) for part in parts) / len(chances)


@pytest.mark.parametrize("tau, unseen", [(0.5, 1.0), (1.0, 9.0), (1.7, 4.0), (3.0, 1.0)])
def test_the_fit_comes_to_the_law_that_the_ranks_were_drawn_from(tau, unseen):
    """6000 draws: over twelve seeds 1/tau was within 6% and log n within 0.3; one pass starts from another n.

    Of 4000 fresh draws in ten bins, exact chances have a calibration error of about 0.02.
    """
    rng = np.random.default_rng(7)
    scores = sorted_scores(rng, 6000, 2.0 * tau)
    calibration = learnt(scores, drawn(rng, law_of(scores, tau, unseen)))
    assert calibration.sharpness == pytest.approx(1 / tau, rel=0.08)
    assert calibration.unseen == pytest.approx(np.log(unseen), abs=0.4)
    fresh = sorted_scores(rng, 4000, 2.0 * tau)
    chances = np.exp(calibration.confidences(fresh)[:, 0])
    assert calibration_error(chances, drawn(rng, law_of(fresh, tau, unseen)) == 0) < 0.03


def test_the_fit_follows_a_law_that_changes():
    rng = np.random.default_rng(8)
    calibration = Calibration()
    for tau, unseen in ((0.5, 1.0), (2.0, 6.0)):
        scores = sorted_scores(rng, 20_000, 3.0)
        calibration = learnt(scores, drawn(rng, law_of(scores, tau, unseen)), calibration)
    assert calibration.tau == pytest.approx(2.0, rel=0.15)


def test_under_shared_noise_confidence_orders_acceptance_where_probability_does_not():
    """A toy of 300 tokens: the drafter's logits are the target's with an error, and both add one noise.

    By fifths of the confidence acceptance rises each time, from below 0.55 to above 0.9; by fifths of the first
    guess's probability the ends are less than half as far apart.
    """
    rng = np.random.default_rng(9)
    contexts, tokens = 6000, 300
    target = rng.normal(0, 1.5, (contexts, tokens))
    draft = target + rng.normal(0, 0.7, (contexts, tokens))
    noise = rng.gumbel(size=(contexts, tokens))
    order = np.argsort(-(draft + noise), axis=1)[:, :K]
    scores = np.take_along_axis(draft + noise, order, 1).astype(np.float32)
    tokens_drawn = np.argmax(target + noise, axis=1)
    hits = order == tokens_drawn[:, None]
    ranks = np.where(hits.any(1), hits.argmax(1), K)
    half = contexts // 2
    calibration = learnt(scores[:half], ranks[:half])
    chances = np.exp(calibration.confidences(scores[half:])[:, 0])
    shift = np.log(np.exp(draft).sum(1))
    probabilities = np.exp(draft[np.arange(contexts), order[:, 0]] - shift)[half:]
    accepted = ranks[half:] == 0

    def fifths(by: np.ndarray) -> list[float]:
        return [float(accepted[part].mean()) for part in np.array_split(np.argsort(by), 5)]

    confident, probable = fifths(chances), fifths(probabilities)
    assert confident == sorted(confident)
    assert confident[0] < 0.55 < 0.9 < confident[-1]
    assert abs(probable[-1] - probable[0]) < 0.5 * (confident[-1] - confident[0])
    assert calibration_error(chances, accepted) < 0.04


row_scores = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=16).map(
    lambda scores: np.sort(np.array(scores, np.float32))[::-1]
)
calibrations = st.builds(
    Calibration, st.floats(1 / SHARPEST, SHARPEST), st.floats(-MOST_UNSEEN, MOST_UNSEEN), st.just((1.0, 0.0, 1.0))
)


@given(row_scores, calibrations)
def test_confidences_are_chances_in_the_order_of_the_scores(scores, calibration):
    chances = calibration.confidences(scores[None])[0]
    assert chances.dtype == np.float32
    assert np.isfinite(chances).all() and (chances <= 0).all()
    assert (np.diff(chances) <= 0).all()
    assert np.exp(chances[:K].astype(np.float64)).sum() <= 1 + 1e-5


@given(st.lists(st.floats(-50, 50, width=32), min_size=16, max_size=16), calibrations)
def test_what_else_is_asked_for_does_not_change_a_rows_confidences(scores, calibration):
    """A row drafted beside wider trees has more candidates than it needs; its neighbours must not matter."""
    row = np.sort(np.array(scores, np.float32))[::-1]
    other = np.sort(np.arange(16, dtype=np.float32))[::-1]
    alone = calibration.confidences(row[None, :K])[0]
    together = calibration.confidences(np.stack([other, row]))[1]
    assert together[:K].tobytes() == alone.tobytes()


@settings(max_examples=50)
@given(st.lists(st.tuples(row_scores, st.integers(0, K)), max_size=60))
def test_whatever_is_learned_the_parameters_stay_in_their_bounds(story):
    calibration = Calibration()
    for scores, rank in story:
        calibration = calibration.learn(scores, rank)
    assert 1 / SHARPEST <= calibration.sharpness <= SHARPEST
    assert -MOST_UNSEEN <= calibration.unseen <= MOST_UNSEEN


def test_a_row_that_is_not_of_numbers_teaches_nothing():
    calibration = Calibration()
    assert calibration.learn(np.array([np.nan] * K, np.float32), 0) is calibration
