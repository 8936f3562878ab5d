"""How often one row's guesses hold the target's token, by the kind of guesses and of verification (simulated laws).

1,000 tokens, 200 contexts and 10 draws in each, seeded. The drafter's logits are the target's plus normal noise.
"""

from functools import cache

import numpy as np
import pytest

VOCABULARY, CONTEXTS, DRAWS = 1000, 200, 10
CLOSE, WEAK = 0.7, 1.5  # standard deviations of the drafter's logits from the target's


def law(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def accepted_one_by_one(target, draft, drawn):
    """The chance that multi-step sampling accepts one of these guesses, which were drawn without replacement."""
    alive, residual, proposal = 1.0, target.copy(), draft.copy()
    for token in drawn:
        alive *= 1 - min(1.0, residual[token] / proposal[token])
        residual = np.maximum(residual - proposal, 0.0)
        if residual.sum() < 1e-12 or alive < 1e-12:
            return 1.0
        residual /= residual.sum()
        proposal[token] = 0.0
        proposal /= proposal.sum()
    return 1 - alive


@cache
def acceptance(distance, guesses):
    """Mean acceptance with noise that target and drafter share, of multi-step sampling, and of the drafter's likeliest
    tokens; and the mean of (1 - d) / (1 + d), d the total variation of the laws."""
    rng = np.random.default_rng(1)
    shared, multi_step, likeliest, least = [], [], [], []
    for _ in range(CONTEXTS):
        logits = rng.gamma(2.0, 1.5) * rng.standard_normal(VOCABULARY) + 0.5 * rng.gumbel(size=VOCABULARY)
        target, draft = law(logits), law(logits + distance * rng.standard_normal(VOCABULARY))
        noise = rng.gumbel(size=(DRAWS, VOCABULARY))
        drawn = np.argsort(-(np.log(draft) + noise))[:, :guesses]  # by the shared noise, and without replacement
        shared.append((drawn == (np.log(target) + noise).argmax(1)[:, None]).any(1).mean())
        multi_step.append(np.mean([accepted_one_by_one(target, draft, each) for each in drawn]))
        likeliest.append(target[np.argsort(-draft)[:guesses]].sum())
        apart = np.abs(target - draft).sum() / 2
        least.append((1 - apart) / (1 + apart))
    return np.mean(shared), np.mean(multi_step), np.mean(likeliest), np.mean(least)


@pytest.mark.parametrize("distance", [CLOSE, WEAK])
def test_shared_noise_accepts_less_than_multi_step_sampling_with_one_guess_and_more_with_four(distance):
    one, four = acceptance(distance, 1), acceptance(distance, 4)
    assert 0.02 < one[1] - one[0] < 0.1
    assert 0.0 < four[0] - four[1] < 0.08


@pytest.mark.parametrize("distance", [CLOSE, WEAK])
def test_shared_noise_accepts_one_guess_with_at_least_the_chance_of_the_bound(distance):
    shared, _, _, least = acceptance(distance, 1)
    assert shared > least


@pytest.mark.parametrize("guesses", [1, 4])
@pytest.mark.parametrize("distance", [CLOSE, WEAK])
def test_the_drafters_likeliest_tokens_are_accepted_far_less(distance, guesses):
    shared, multi_step, likeliest, _ = acceptance(distance, guesses)
    assert likeliest < min(shared, multi_step) - 0.1
