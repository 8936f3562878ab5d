"""Targets with states on an accelerator: the library's logits, and the same tokens with trees as without.

Without an accelerator other files test the same on the CPU.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from dendro.text import Sampling
from tree_layers.library_mixers import group_norms

from tests.support.routers import RoundByRound, guessing
from tests.support.tiny_hybrids import FAMILIES, VOCABULARY, make_checkpoint, oracle, paths_below, tree_below
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="there is no accelerator")]
COUNT = 12


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
async def test_logits_are_the_librarys_and_trees_change_no_token(family, tmp_path):
    """In float32, where a random target's two likeliest tokens are seldom as close as rounding."""
    library = make_checkpoint(tmp_path, family)
    group_norms(library)  # as transformers 5.17, which a GPU machine may have, norms all groups as one
    options = VerifierOptions(
        name="tiny", dtype=torch.float32, device=DEVICE, max_length=160, max_sessions=4, max_depth=6
    )
    engine = VerifierEngine.load(tmp_path, options)
    for length in (5, 40, 90):
        ids = np.random.default_rng(length).integers(3, VOCABULARY, length).tolist()
        found = engine.logits_of(ids, tree_below(ids[-1]))
        truth = torch.stack([oracle(library, path) for path in paths_below(ids)])
        assert torch.allclose(found, truth, atol=2e-3 * float(truth.abs().max())), (found - truth).abs().max()
    prompts = [list(range(3, 20)), [9, 8, 7], list(range(10, 76))]
    laws = [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=6)]
    asked = list(zip(prompts, laws, strict=True))
    await engine.start()
    try:
        plain = await asyncio.gather(*(RoundByRound(engine, *each, COUNT).finish() for each in asked))
        routers, rng = [RoundByRound(engine, *each, COUNT) for each in asked], np.random.default_rng(0)
        trees = [guessing(rng, truth, VOCABULARY) for truth in plain]
        assert await asyncio.gather(*map(RoundByRound.finish, routers, trees)) == plain
        assert engine.stats()["guesses"] > 0
    finally:
        await engine.stop()
