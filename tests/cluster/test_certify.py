import numpy as np
import pytest
import torch
from dendro.shapes import OFF, LevelShape
from dendro.text import Sampling

from cluster.certify.law import expected_law, fit
from cluster.certify.promises import Promise, first_difference, report
from cluster.certify.twin import (
    KeyedByRow,
    OneTooMany,
    TwinVerifier,
    answer_of,
    float32_noise_is_infinite,
    top_k_as_if_sampled,
)

VOCABULARY = 16
TABLE = torch.from_numpy(np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)) * 1.5


def toy_logits(ids, tree):
    """A target that looks at one token."""
    return TABLE[torch.from_numpy(tree.tokens)]


async def told(rule, shape, drafter_seed):
    return await answer_of([1, 2, 3], 96, shape, rule(toy_logits, Sampling(temperature=1.0, seed=3)), drafter_seed)


async def test_the_twin_without_a_fault_tells_the_plain_tokens():
    plain = await told(TwinVerifier, OFF, 3)
    assert await told(TwinVerifier, LevelShape((3, 2, 1)), 3) == plain
    assert await told(TwinVerifier, LevelShape((3, 2, 1)), 4) == plain


@pytest.mark.parametrize("rule, drafter_seed", [(KeyedByRow, 3), (OneTooMany, 4)])
async def test_a_planted_fault_changes_tokens(rule, drafter_seed):
    assert await told(rule, LevelShape((2, 2, 1)), drafter_seed) != await told(TwinVerifier, OFF, 3)


def test_the_law_check_passes_true_draws_and_fails_a_lossy_rule():
    law = expected_law(TABLE[0], 1.0)
    true = np.random.default_rng(0).choice(VOCABULARY, size=4000, p=law)
    assert fit(true.tolist(), law).good
    assert fit(top_k_as_if_sampled(TABLE[0], 1.0, 3, 4000, seed=1), law).p < 1e-12


def test_a_draw_of_no_chance_fails_whatever_the_rest():
    assert fit([0] * 999 + [1], np.array([1.0, 0.0])).p == 0.0


@pytest.mark.parametrize("top_k, top_p, kept", [(0, 1.0, 4), (2, 1.0, 2), (0, 0.6, 2), (3, 0.5, 1)])
def test_the_expected_law_keeps_the_head_that_was_asked_for(top_k, top_p, kept):
    law = expected_law(torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])), 1.0, top_k, top_p)
    assert np.count_nonzero(law) == kept and law.sum() == pytest.approx(1.0)


def test_float32_noise_breaks_on_the_largest_word():
    assert float32_noise_is_infinite()


def test_a_missing_token_is_a_difference():
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_one_broken_finding_breaks_the_promise_for_good():
    promise = Promise("p")
    for holds in (True, False, True):
        promise.check(holds, "line")
    assert promise.kept is False
    assert report([promise], {}, "s")["promises"][0]["broken"] == ["line"]
