"""Confidences: the online fit recovers the distribution of the ranks, and predicts acceptance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.confidence import CANDIDATES, MOST_UNSEEN, SHARPEST, Calibration, Calibrations

K = CANDIDATES


def sorted_scores(rng: np.random.Generator, rows: int, spread: float) -> np.ndarray:
    """[rows, K] float32, descending, with gaps of many widths."""
    scale = spread * rng.uniform(0.2, 2.0, (rows, 1))
    return -np.sort(-rng.normal(0.0, scale, (rows, K)), axis=1).astype(np.float32)


def law_of(scores: np.ndarray, tau: float, unseen: float) -> np.ndarray:
    """[rows, K + 1] probabilities of each candidate and of none, as in the docstring of `Calibration`."""
    weights = np.exp((scores - scores[:, -1:]).astype(np.float64) / tau)
    weights = np.concatenate([weights, np.full((len(scores), 1), unseen)], axis=1)
    return weights / weights.sum(1, keepdims=True)


def sampled(rng: np.random.Generator, law: np.ndarray) -> np.ndarray:
    """[rows] one sample of each row's distribution."""
    return (law.cumsum(1) < rng.random((len(law), 1))).sum(1)


def fitted(scores: np.ndarray, ranks: np.ndarray, calibration: Calibration | None = None) -> Calibration:
    calibration = calibration or Calibration()
    for row, rank in zip(scores, ranks.tolist(), strict=True):
        calibration = calibration.learn(row.tolist(), rank)
    return calibration


def confidences(calibration: Calibration, scores: np.ndarray) -> np.ndarray:
    """[rows, k] as `Calibration.confidences`, of an array."""
    return np.array(calibration.confidences(scores.tolist()))


def calibration_error(chances: np.ndarray, accepted: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: mean difference of chance and frequency over bins of equally many guesses."""
    parts = np.array_split(np.argsort(chances), bins)
    return sum(abs(chances[part].mean() - accepted[part].mean()) * len(part) for part in parts) / len(chances)


@pytest.mark.parametrize("tau, unseen", [(0.5, 1.0), (1.0, 9.0), (1.7, 4.0), (3.0, 1.0)])
def test_the_fit_recovers_the_distribution_of_the_ranks(tau, unseen):
    """One pass over 6000 draws, from another initial n. Over twelve seeds 1/tau was within 6% and log n within 0.3.

    Exact chances have a calibration error of about 0.02 on 4000 fresh draws in ten bins.
    """
    rng = np.random.default_rng(7)
    scores = sorted_scores(rng, 6000, 2.0 * tau)
    calibration = fitted(scores, sampled(rng, law_of(scores, tau, unseen)))
    assert calibration.sharpness == pytest.approx(1 / tau, rel=0.08)
    assert calibration.unseen == pytest.approx(np.log(unseen), abs=0.4)
    fresh = sorted_scores(rng, 4000, 2.0 * tau)
    chances = np.exp(confidences(calibration, fresh)[:, 0])
    assert calibration_error(chances, sampled(rng, law_of(fresh, tau, unseen)) == 0) < 0.03


def test_the_fit_follows_a_distribution_that_changes():
    rng = np.random.default_rng(8)
    calibration = Calibration()
    for tau, unseen in ((0.5, 1.0), (2.0, 6.0)):
        scores = sorted_scores(rng, 20_000, 3.0)
        calibration = fitted(scores, sampled(rng, law_of(scores, tau, unseen)), calibration)
    assert calibration.tau == pytest.approx(2.0, rel=0.15)


def test_under_shared_noise_confidence_orders_acceptance_where_probability_does_not():
    """A vocabulary of 300 tokens: the drafter's logits are the target's plus an error, and both add the same noise.

    From each fifth of the confidences to the next acceptance rises, from below 0.55 to above 0.9. Between the outer
    fifths of the first guess's probability it differs less than half as much.
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
    calibration = fitted(scores[:half], ranks[:half])
    chances = np.exp(confidences(calibration, scores[half:])[:, 0])
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
    chances = confidences(calibration, scores[None])[0]
    assert np.isfinite(chances).all() and (chances <= 0).all()
    assert (np.diff(chances) <= 0).all()
    assert np.exp(chances[:K].astype(np.float64)).sum() <= 1 + 1e-5


@given(st.lists(st.floats(-50, 50, width=32), min_size=16, max_size=16), calibrations)
def test_a_rows_confidences_do_not_depend_on_the_other_rows_or_on_more_candidates(scores, calibration):
    """A row drafted beside wider trees gets more candidates than it needs."""
    row = np.sort(np.array(scores, np.float32))[::-1]
    other = np.sort(np.arange(16, dtype=np.float32))[::-1]
    alone = confidences(calibration, row[None, :K])[0]
    together = confidences(calibration, np.stack([other, row]))[1]
    assert together[:K].tobytes() == alone.tobytes()


@settings(max_examples=50)
@given(st.lists(st.tuples(row_scores, st.integers(0, K)), max_size=60))
def test_the_parameters_stay_in_their_bounds_after_any_updates(updates):
    calibration = Calibration()
    for scores, rank in updates:
        calibration = calibration.learn(scores.tolist(), rank)
    assert 1 / SHARPEST <= calibration.sharpness <= SHARPEST
    assert -MOST_UNSEEN <= calibration.unseen <= MOST_UNSEEN


@pytest.mark.parametrize("gap", [1e8, 1e9, 1e20, 3e38])
@pytest.mark.parametrize("others", [0, 1])
def test_scores_that_lie_far_apart_leave_what_other_rows_taught(gap: float, others: int):
    """A bias, a low temperature and a drafter's large weights make such scores."""
    calibration = Calibration()
    for rank in (0, 2, 1):
        calibration = calibration.learn([gap] * (1 + others) + [0.0], rank)
    a, b, c = calibration.curvature
    assert a >= 31.9 and c >= 1.99 and a * c > b * b


def test_a_row_of_nan_leaves_the_calibration_unchanged():
    calibration = Calibration()
    assert calibration.learn([math.nan] * K, 0) is calibration


def test_ranks_are_learned_in_their_order_when_asked_and_one_that_cannot_be_is_left_out(monkeypatch, caplog):
    learn = Calibration.learn
    kept, rows = Calibrations(), [([2.0, 1.0], 0), ([3.0, 0.5], 1)]
    monkeypatch.setattr(
        Calibration, "learn", lambda own, scores, rank: 1 / 0 if rank == 9 else learn(own, scores, rank)
    )
    kept.note("noise", *rows[0])
    kept.note("noise", [1.0], 9)
    kept.note("noise", *rows[1])
    assert kept["noise"] == Calibration()
    kept.learn()
    assert kept["noise"] == learn(learn(Calibration(), *rows[0]), *rows[1]) and kept["logits"] == Calibration()
    assert "could not be learned" in caplog.text
    before = kept["noise"]
    kept.learn()
    assert kept["noise"] is before
