"""The walker's two ways to pick a row's token give the same walks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.processor import why_not_vectors
from tree_kernels.warp import Warp

from verifier_service.walk import Draw, Walker

VOCABULARY = 23
TREE = DraftTree.of([3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, 1, 1, 2, 5])


def draw_of(sampling: Sampling) -> Draw:
    return Draw(session=1, first=0, wanted=0, base=11, tree=TREE, warp=Warp.of(sampling), sampling=sampling)


def walker_without_kernels(monkeypatch: pytest.MonkeyPatch) -> Walker:
    def refused(vocabulary: int) -> None:
        raise NoKernelsError("none here")

    with monkeypatch.context() as patched:
        patched.setattr("verifier_service.walk.RowDraw", refused)
        return Walker(VOCABULARY)


@pytest.mark.skipif(bool(why_not_vectors()), reason=why_not_vectors())
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_walks_drawn_in_one_pass_are_those_of_rows_of_noise(temperature, monkeypatch):
    one_pass, by_rows = Walker(VOCABULARY), walker_without_kernels(monkeypatch)
    lengths = set[int]()
    for seed in range(200):
        logits = torch.randn(TREE.rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        for row, token in zip(TREE.parents[1:].tolist(), TREE.tokens[1:].tolist(), strict=True):
            logits[row, token] += 2.0  # the guesses are likely
        if seed % 10 == 0:
            logits[seed % TREE.rows or 1, 2] = math.nan  # a guess's row cannot be used
        sampling = Sampling(temperature=temperature, seed=seed, sample_index=seed % 3)
        walked = one_pass.walk(draw_of(sampling), lambda row, its=logits: its[row : row + 1])
        assert walked == by_rows.walk(draw_of(sampling), lambda row, its=logits: its[row : row + 1])
        kept = by_rows.keeps_noise(1)
        by_rows.forget(1)  # the next seed is another text's
        lengths.add(len(walked.tokens))
    assert len(lengths) > 2, "walks of several lengths were compared"
    assert not one_pass.keeps_noise(1) and kept == (temperature > 0)


def test_a_text_with_filters_is_drawn_from_rows_of_noise_that_may_be_prepared(monkeypatch):
    walker = Walker(VOCABULARY)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(TREE.rows, VOCABULARY)).astype(np.float32))
    filtered = Sampling(temperature=1.0, top_p=0.9, seed=5)
    walked = walker.walk(draw_of(filtered), lambda row: logits[row : row + 1])
    assert walker.keeps_noise(1)
    walker.prepare(1, 14)
    expected = walker_without_kernels(monkeypatch).walk(draw_of(filtered), lambda row: logits[row : row + 1])
    assert walked == expected
