"""The walker's two ways to pick a row's token give the same walks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from dendro.errors import BadRequest
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.noise import gumbel_noise
from tree_kernels.processor import why_not_vectors
from tree_kernels.row_draw import RowDraw
from tree_kernels.warp import History, Processors, Warp, tokens_of

from verifier_service.walk import Draw, Walker

VOCABULARY = 23
TREE = DraftTree.of([3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, 1, 1, 2, 5])
TEXT = [1, 3, 3, 7, 2, 9, 4, 4, 4, 1, 3]
LAWS = {
    "greedy": Sampling(),
    "0.3": Sampling(temperature=0.3),
    "1": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=0.7, top_k=3),
    "top-p": Sampling(temperature=1.3, top_p=0.6),
    "min-p": Sampling(temperature=1.0, min_p=0.2),
    "penalties, greedy": Sampling(repetition_penalty=1.5, frequency_penalty=0.3),
    "penalties": Sampling(temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.3),
    "penalties, top-p": Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.5, banned_ids=(4,)),
}
with_kernels = pytest.mark.skipif(bool(why_not_vectors()), reason=why_not_vectors())


def draw_of(sampling: Sampling, tree: DraftTree = TREE, vocabulary: int = VOCABULARY) -> Draw:
    history = None
    if sampling.changes_logits:
        its = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        history = History(Processors(*its, banned=sampling.banned_ids), vocabulary, prompt_length=5)
        history.follow(TEXT, 0)
    return Draw(0, 0, len(TEXT), tree, Warp.of(sampling), sampling, history)


def walker_without_kernels(monkeypatch: pytest.MonkeyPatch, vocabulary: int = VOCABULARY) -> Walker:
    def refused(vocabulary: int) -> None:
        raise NoKernelsError("none here")

    with monkeypatch.context() as patched:
        patched.setattr("verifier_service.walk.RowDraw", refused)
        return Walker(vocabulary)


@with_kernels
@pytest.mark.parametrize("law", LAWS)
def test_walks_drawn_in_one_pass_are_those_of_the_noise_of_all_tokens(law, monkeypatch):
    decided = list[int | None]()

    class NotedDraw(RowDraw):
        def greedy(self, *given: Any) -> int | None:
            decided.append(super().greedy(*given))
            return decided[-1]

        def sampled(self, *given: Any) -> int | None:
            decided.append(super().sampled(*given))
            return decided[-1]

    from_all = walker_without_kernels(monkeypatch)
    monkeypatch.setattr("verifier_service.walk.RowDraw", NotedDraw)
    one_pass, lengths = Walker(VOCABULARY), set[int]()
    for seed in range(200):
        logits = torch.randn(TREE.rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        for row, token in zip(TREE.parents[1:].tolist(), TREE.tokens[1:].tolist(), strict=True):
            logits[row, token] += 2.0  # the guesses are likely
        if seed % 10 == 0:
            logits[seed % TREE.rows or 1, 2] = math.nan  # a guess's row cannot be used
        draw = draw_of(replace(LAWS[law], seed=seed, sample_index=seed % 3))
        walked = one_pass.walk(draw, lambda row, its=logits: its[row : row + 1])
        assert walked == from_all.walk(draw, lambda row, its=logits: its[row : row + 1])
        lengths.add(len(walked.tokens))
    assert len(lengths) > 2, "walks of several lengths were compared"
    assert len([token for token in decided if token is not None]) > 0.9 * len(decided) > 0


@pytest.mark.parametrize(
    ("sampling", "filled"),
    [
        (Sampling(temperature=0.001, seed=1), 3e38),  # all quotients are infinite
        (Sampling(temperature=0.001, seed=1), -3e38),
        (Sampling(temperature=0.001, top_p=0.5, seed=1), -3e38),
        (Sampling(temperature=1.0, seed=1), 2.0**40),  # no noise changes a score: every token may have the greatest
        (Sampling(temperature=1.0, frequency_penalty=0.5, seed=1), 2.0**40),
    ],
)
def test_a_row_that_one_pass_does_not_decide_has_the_token_of_the_noise_of_all(sampling, filled):
    draw, logits = draw_of(sampling, DraftTree.root_only(3), 1000), torch.full((1, 1000), filled)
    scores = logits if draw.history is None else draw.history.scores(logits, [[]], ())
    noise = gumbel_noise(1, [len(TEXT)], 1000)
    expected = int(tokens_of(scores, draw.warp, noise)[0])
    assert Walker(1000).walk(draw, lambda row: logits).tokens == (expected,)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_root_whose_logits_are_not_usable_is_refused(law, bad):
    """NaN, infinity, or nothing but minus infinities."""
    logits = torch.full((1, VOCABULARY), -math.inf) if bad < 0 else torch.zeros(1, VOCABULARY)
    logits[0, 5] = bad
    with pytest.raises(BadRequest, match="first 11 tokens are not finite"):
        Walker(VOCABULARY).walk(draw_of(LAWS[law], DraftTree.root_only(3)), lambda row: logits)
