"""Checks and walks of trees in modes whose tokens are not those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from dendro.errors import BadRequest
from dendro.modes import VerificationMode, draft_seed
from dendro.text import Sampling
from dendro.tree import DraftTree
from torch import Tensor
from tree_kernels.sampled_walk import Floats, NoiseCoins, SparseLaw, block, drawn_order, lenient_greedy, multi_step
from tree_kernels.tree_walk import Walk
from tree_kernels.warp import Warp, warp


def check_laws(tree: DraftTree, sampling: Sampling, base: int, vocabulary: int) -> None:
    """Raise BadRequest for a tree that the request's mode cannot verify: with laws although its guesses are not drawn,
    without laws although they are, with children that are not the first draws of their row's law, or with branches in a
    mode that needs a chain.

    base: length of the text at the start of the round

    A law that was chosen after its draws cannot be detected, so a cluster serves these modes only if its configuration
    lists them.
    """
    if not sampling.draws_guesses:
        if tree.laws:
            raise BadRequest("tree.laws", f"have no use in mode {sampling.mode} at temperature {sampling.temperature}")
        return
    if tree.guesses and not tree.laws:
        raise BadRequest("tree.laws", f"are missing; mode {sampling.mode} needs those of all rows with children")
    if sampling.mode is VerificationMode.BLOCK and tree.depth < tree.guesses:
        raise BadRequest("tree.parents", "are those of a tree; mode block needs a chain")
    seed = draft_seed(sampling.seed)
    for law in tree.laws:
        if int(law.ids.max()) >= vocabulary:
            raise BadRequest(f"tree.laws[{law.row}].ids", f"a token lies outside the vocabulary of {vocabulary}")
        order = drawn_order(SparseLaw(law.ids, law.probabilities), seed, base, law.row, sampling.sample_index)
        children = tree.tokens[tree.children(law.row)].tolist()
        if children != law.ids[order[: len(children)]].tolist():
            raise BadRequest(f"tree.laws[{law.row}]", "the row's children are not the first draws of its law")


def walk_by_mode(
    tree: DraftTree, base: int, settings: Warp, sampling: Sampling, scores: Callable[[int], Tensor]
) -> Walk:
    """Walk a tree in a mode whose tokens are not those of plain decoding.

    scores: returns logits [1, vocabulary] float32 of a row of the tree, before the temperature
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    if not sampling.draws_guesses:
        return lenient_greedy(tokens, parents, lambda row: _numbers(scores(row)), sampling.lenience)

    def target_probs(row: int) -> Floats:
        return _numbers(torch.softmax(warp(scores(row), settings), dim=1))

    laws = {law.row: SparseLaw(law.ids, law.probabilities) for law in tree.laws}
    coins = NoiseCoins(sampling.seed, base, sampling.sample_index)
    if sampling.mode is VerificationMode.BLOCK:
        return block(tokens, parents, target_probs, laws, coins)
    return multi_step(tokens, parents, target_probs, laws, coins, sampling.lenience)


def _numbers(row: Tensor) -> Floats:
    """Copy a row [1, n] to the host as [n] float64."""
    numbers: Floats = row[0].cpu().numpy().astype(np.float64)
    return numbers
