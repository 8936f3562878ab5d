"""What a drafter does with a request's bias, banned and allowed ids: the same in either form of ranking."""

import numpy as np
import pytest
import torch
from dendro.text import Sampling
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.noise import gumbel_noise
from tree_kernels.ranking import Orders, ranking_of
from tree_kernels.warp import drafter_ranking

from drafter_service.runner import DraftLaw

VOCABULARY = 40
GIVEN = {"logit_bias": ((3, 5.0), (7, -9.0), (900, 1.0)), "banned_ids": (1, 2, 900), "allowed_ids": (1, 3, 7, 9, 900)}


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("names", [("logit_bias",), ("banned_ids",), ("allowed_ids",), tuple(GIVEN)])
def test_guesses_are_those_of_the_edited_logits(names: tuple[str, ...], temperature: float):
    """By eager and by compiled ranking, of a vocabulary below the target's; ids past it are ignored."""
    sampling = Sampling(temperature=temperature, seed=3, **{name: GIVEN[name] for name in names})
    law = DraftLaw.of(sampling, VOCABULARY)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    edited = logits[0].double().numpy().copy()
    for token, bias in sampling.logit_bias:
        if token < VOCABULARY:
            edited[token] += bias
    scores = edited
    if temperature:
        scores = edited / temperature + gumbel_noise(3, [17], VOCABULARY)[0].double().numpy()
    removed = set(sampling.banned_ids)
    if sampling.allowed_ids:
        removed |= set(range(VOCABULARY)) - set(sampling.allowed_ids)
    left = [token for token in np.argsort(-scores).tolist() if token not in removed]
    width = min(len(left), 5)
    added = law.added_to(17)
    assert added is not None
    found = drafter_ranking(logits, law.warp, added[None], 5)
    assert found.ids[0, :width].tolist() == left[:width] and torch.isfinite(found.scores).all()
    try:
        ranking = ranking_of(logits, [1], Orders([law.warp.temperature], [added], [VOCABULARY]), 5)
    except NoKernelsError:
        return
    ids, theirs = ranking.results(1, 5)
    assert ids.tolist() == found.ids.tolist() and theirs.tolist() == found.scores.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_depend_on_the_text_change_no_guess(temperature: float):
    plain = DraftLaw.of(Sampling(temperature=temperature, seed=3), VOCABULARY)
    given = Sampling(temperature=temperature, seed=3, repetition_penalty=2.0, frequency_penalty=3.0, bad_words=((1,),))
    law = DraftLaw.of(given, VOCABULARY)
    assert law.shift is None and law.warp == plain.warp
