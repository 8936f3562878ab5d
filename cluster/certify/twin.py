"""A small copy of the system in this process, with faults planted that the checks must notice.

No service has a switch for a lossy rule, so the faults are planted here: the same loop and the same kernels, with one
rule changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from dendro.shapes import LevelShape, TreeShape
from dendro.text import Limits, Sampling, Text, Verdict, cut_verdict
from dendro.tree import DraftTree, full_tree
from tree_kernels.noise import NoiseRows, gumbel_noise
from tree_kernels.tree_walk import Walk, walk
from tree_kernels.warp import Warp, drafter_order, tokens_of

from cluster.arms import Arm
from cluster.policies import Static
from cluster.router.rounds import rounds

LogitsOf = Callable[[Sequence[int], DraftTree], torch.Tensor]
"""The target: logits [rows, V] after every row of a tree whose root is the last token of a text."""


class SelfDrafter:
    """Drafts with the target: grows its trees, level by level, from the target's own logits.

    With the contract's noise, every first-ranked guess is the token that the target draws.
    """

    def __init__(self, logits_of: LogitsOf, sampling: Sampling) -> None:
        self.logits_of = logits_of
        self.warp = Warp.of(sampling)
        self.sampling = sampling

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        levels: list[list[int]] = []
        tree, shape = DraftTree.root_only(text.root), arm.shape
        assert isinstance(shape, LevelShape)
        for depth, width in enumerate(shape.widths):
            logits = self.logits_of(text.ids, tree)
            frontier = np.flatnonzero(tree.depths == depth)
            noise: torch.Tensor | None = None
            if self.warp.temperature:
                position = len(text) + depth  # position of the token drawn after a row of this depth
                noise = gumbel_noise(self.sampling.seed, [position], logits.shape[-1], self.sampling.sample_index)
                noise = noise.expand(len(frontier), -1)
            order = drafter_order(logits[torch.from_numpy(frontier)], self.warp, noise, width)
            levels.append(order.flatten().tolist())
            tree = full_tree(text.root, LevelShape(shape.widths[: depth + 1]), levels)
        return tree


class TwinVerifier:
    """The verifier's acceptance rule. Each subclass plants a fault in it."""

    def __init__(self, logits_of: LogitsOf, sampling: Sampling) -> None:
        self.logits_of = logits_of
        self.sampling = sampling
        self.warp = Warp.of(sampling)
        self.noise: NoiseRows | None = None
        self.changed = 0  # tokens of the answer that the planted fault changed

    def drawn(self, logits: torch.Tensor, position: int) -> int:
        """The token that the target draws from logits [1, V] for an absolute position."""
        if self.noise is None:
            self.noise = NoiseRows(self.sampling.seed, logits.shape[-1], self.sampling.sample_index)
        noise = self.noise.rows([position]) if self.warp.temperature else None
        return int(tokens_of(logits, self.warp, noise)[0])

    def token_after(self, row: int, logits: torch.Tensor, text: Text, tree: DraftTree) -> int:
        """The token drawn after a row of the tree, from that row's logits [1, V]."""
        return self.drawn(logits, len(text) + int(tree.depths[row]))

    def accept(self, text: Text, tree: DraftTree, pick: Callable[[int], int]) -> Walk:
        return walk(tree.tokens.tolist(), tree.parents.tolist(), pick)

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        logits = self.logits_of(text.ids, tree)
        found = self.accept(text, tree, lambda row: self.token_after(row, logits[row : row + 1], text, tree))
        verdict = Verdict(found.tokens, found.path, found.ranks, None, len(found.tokens))
        return cut_verdict(verdict, frozenset(), len(text), text.limits)


class KeyedByRow(TwinVerifier):
    """Planted: the noise is keyed by the row's index in the tree, not by its position."""

    def token_after(self, row: int, logits: torch.Tensor, text: Text, tree: DraftTree) -> int:
        right, planted = super().token_after(row, logits, text, tree), self.drawn(logits, len(text) + row)
        self.changed += planted != right and len(text) + int(tree.depths[row]) < text.limits.max_length
        return planted


class OneTooMany(TwinVerifier):
    """Planted: one guess more than the target accepts is committed."""

    def accept(self, text: Text, tree: DraftTree, pick: Callable[[int], int]) -> Walk:
        true = super().accept(text, tree, pick)
        below = tree.children(true.path[-1])
        if not below:
            return true
        guess = below[-1]
        self.changed += len(text) + len(true.tokens) <= text.limits.max_length
        extra = (*true.tokens[:-1], int(tree.tokens[guess]), pick(guess))
        return Walk((*true.path, guess), extra, (*true.ranks, len(below) - 1))


async def answer_of(
    prompt: Sequence[int], count: int, shape: TreeShape, verifier: TwinVerifier, drafter_seed: int
) -> list[int]:
    """`count` tokens after a prompt, drafted by the target itself in one shape and verified by the twin's rule.

    With the verifier's seed, every first-ranked guess of the drafter is accepted; with another, as many as of a good
    drafter.
    """
    text = Text(prompt, verifier.sampling, Limits(len(prompt) + count, ignore_end=True))
    drafter = SelfDrafter(verifier.logits_of, replace(verifier.sampling, seed=drafter_seed))
    async for _ in rounds(text, drafter, verifier, Static(Arm.of("self", shape))):
        pass
    return text.answer


def top_k_as_if_sampled(law: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.float64]:
    """Planted: the drafter's k likeliest tokens, verified as if sampled from its law (u * draft_prob < target_prob).

    law [V]: the target's. The drafter's is the same at 1.5 times the temperature. Returns the law [V] of the first
    token, computed and not sampled.
    """
    proposal = law ** (1 / 1.5)
    proposal /= proposal.sum()
    residual, rejected = law.copy(), 1.0  # rejected: the probability that no guess so far was accepted
    emitted = np.zeros_like(law)
    for guess in np.argsort(-proposal, kind="stable")[:k]:
        accepted = min(residual[guess] / proposal[guess], 1.0) if proposal[guess] > 0 else 1.0
        emitted[guess] += rejected * accepted
        rejected *= 1 - accepted
        residual = np.maximum(residual - proposal, 0)
        proposal[guess] = 0
        if rejected == 0 or residual.sum() == 0 or proposal.sum() == 0:
            break
        residual /= residual.sum()
        proposal /= proposal.sum()
    emitted += rejected * residual
    return np.asarray(emitted / emitted.sum())


def noise_of_word(word: int, dtype: type[np.floating]) -> float:
    """The Gumbel noise of one 32-bit word, computed in a floating-point type."""
    uniform = dtype((dtype(word) + dtype(0.5)) * dtype(2.0**-32))
    with np.errstate(divide="ignore"):
        return float(-np.log(-np.log(uniform)))


def float32_noise_is_infinite() -> bool:
    """True where float32 arithmetic breaks the noise on the largest word and float64 does not."""
    largest = 2**32 - 1
    return math.isinf(noise_of_word(largest, np.float32)) and math.isfinite(noise_of_word(largest, np.float64))
