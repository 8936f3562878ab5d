"""Trees whose guesses were drawn from the drafter's law: their check, and their walks."""

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
    """Raise BadRequest for a tree that the request's mode cannot verify: laws where guesses are not drawn, none where
    they are, children that are not the first draws of their row's law, a tree where the mode needs a chain.

    base: length of the text that the round starts from

    A law that was chosen after its draws cannot be detected: therefore these modes must be listed.
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
    """The walk of a request in a mode whose tokens are not those of plain decoding.

    scores: a row of the tree -> [1, vocabulary] float32 logits, before the temperature
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
    """[1, n] as [n] float64 on the host."""
    numbers: Floats = row[0].cpu().numpy().astype(np.float64)
    return numbers
