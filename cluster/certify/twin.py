"""A small twin of the system in this process, in which rules can be broken on purpose.

No service has a switch for a lossy rule. Whether our checks could notice one is shown here instead: the same
loop, the same kernels, and a planted fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from dendro.shapes import LevelShape, TreeShape
from dendro.text import Limits, Sampling, Text, Verdict, cut_verdict
from dendro.tree import DraftTree, full_tree
from tree_kernels.noise import NoiseRows, gumbel_noise
from tree_kernels.tree_walk import Walk, walk
from tree_kernels.warp import Warp, drafter_order, tokens_of

from cluster.policies import Static
from cluster.rounds import rounds

LogitsOf = Callable[[Sequence[int], DraftTree], torch.Tensor]
"""The target: logits [rows, V] after every row of a tree whose root is the last token of a text."""


def warp_of(sampling: Sampling) -> Warp:
    return Warp(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


class SelfDrafter:
    """A drafter made of the target itself: grows its trees, level by level, from the target's own logits.

    With the noise of the contract every one of its first guesses is what the target draws.
    """

    def __init__(self, logits_of: LogitsOf, sampling: Sampling) -> None:
        self.logits_of = logits_of
        self.warp = warp_of(sampling)
        self.sampling = sampling

    async def draft(self, text: Text, shape: TreeShape) -> DraftTree:
        levels: list[list[int]] = []
        tree = DraftTree.root_only(text.root)
        assert isinstance(shape, LevelShape)
        for depth, width in enumerate(shape.widths):
            logits = self.logits_of(text.ids, tree)
            frontier = np.flatnonzero(tree.depths == depth)
            noise: torch.Tensor | None = None
            if self.warp.temperature:
                position = len(text) + depth  # of the token that is drawn below a row of this depth
                noise = gumbel_noise(self.sampling.seed, [position], logits.shape[-1], self.sampling.sample_index)
                noise = noise.expand(len(frontier), -1)
            order = drafter_order(logits[torch.from_numpy(frontier)], self.warp, noise, width)
            levels.append(order.flatten().tolist())
            tree = full_tree(text.root, LevelShape(shape.widths[: depth + 1]), levels)
        return tree


class TwinVerifier:
    """The verifier's rule in a few lines. Its subclasses break it."""

    def __init__(self, logits_of: LogitsOf, sampling: Sampling) -> None:
        self.logits_of = logits_of
        self.sampling = sampling
        self.warp = warp_of(sampling)
        self.noise: NoiseRows | None = None

    def position(self, text: Text, tree: DraftTree, row: int) -> int:
        """The absolute position of the token that is drawn after a row."""
        return len(text) + int(tree.depths[row])

    def accept(self, tree: DraftTree, pick: Callable[[int], int]) -> Walk:
        return walk(tree.tokens.tolist(), tree.parents.tolist(), pick)

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        logits = self.logits_of(text.ids, tree)
        if self.noise is None:
            self.noise = NoiseRows(self.sampling.seed, logits.shape[-1], self.sampling.sample_index)
        rows = self.noise

        def pick(row: int) -> int:
            noise = rows.rows([self.position(text, tree, row)]) if self.warp.temperature else None
            return int(tokens_of(logits[row : row + 1], self.warp, noise)[0])

        found = self.accept(tree, pick)
        verdict = Verdict(found.tokens, found.path, found.ranks, None, len(found.tokens))
        return cut_verdict(verdict, frozenset(), len(text), text.limits)


class KeyedByRow(TwinVerifier):
    """Planted: the noise is keyed by the row's index in the tree, not by its position."""

    def position(self, text: Text, tree: DraftTree, row: int) -> int:
        return len(text) + row


class OneTooMany(TwinVerifier):
    """Planted: one guess more than the target agrees with is committed."""

    def accept(self, tree: DraftTree, pick: Callable[[int], int]) -> Walk:
        true = super().accept(tree, pick)
        below = tree.children(true.path[-1])
        if not below:
            return true
        guess = below[-1]
        extra = (*true.tokens[:-1], int(tree.tokens[guess]), pick(guess))
        return Walk((*true.path, guess), extra, (*true.ranks, len(below) - 1))


async def answer_of(
    prompt: Sequence[int], count: int, shape: TreeShape, verifier: TwinVerifier, drafter_seed: int
) -> list[int]:
    """`count` tokens after a prompt, drafted by the target itself in one shape and judged by the twin's rule.

    A drafter with the verifier's own seed is always right; one with another is right as often as a good drafter.
    """
    text = Text(prompt, verifier.sampling, Limits(len(prompt) + count, ignore_end=True))
    drafter = SelfDrafter(verifier.logits_of, replace(verifier.sampling, seed=drafter_seed))
    async for _ in rounds(text, drafter, verifier, Static(shape)):
        pass
    return text.answer


def top_k_as_if_sampled(logits: torch.Tensor, temperature: float, k: int, draws: int, seed: int) -> list[int]:
    """Planted: the drafter's k likeliest tokens, judged as if they had been drawn from its law (u * q < p).

    The drafter's law is the target's own at 1.5 times the temperature. Returns the first token of `draws` answers.
    """
    law = torch.softmax(logits.double() / temperature, -1).numpy()
    draft = torch.softmax(logits.double() / (1.5 * temperature), -1).numpy()
    guesses = np.argsort(-draft, kind="stable")[:k]
    rng = np.random.default_rng(seed)
    tokens = []
    for _ in range(draws):
        residual, proposal = law.copy(), draft.copy()
        for guess in guesses:
            if rng.random() * proposal[guess] < residual[guess]:
                tokens.append(int(guess))
                break
            residual = np.maximum(residual - proposal, 0)
            residual /= residual.sum()
            proposal[guess] = 0
            proposal /= proposal.sum()
        else:
            tokens.append(int(rng.choice(len(residual), p=residual)))
    return tokens


def noise_of_word(word: int, dtype: type[np.floating]) -> float:
    """The Gumbel noise of one 32-bit word, computed in a floating-point type."""
    uniform = dtype((dtype(word) + dtype(0.5)) * dtype(2.0**-32))
    with np.errstate(divide="ignore"):
        return float(-np.log(-np.log(uniform)))


def float32_noise_is_infinite() -> bool:
    """True where float32 arithmetic breaks the noise on the largest word and float64 does not."""
    largest = 2**32 - 1
    return math.isinf(noise_of_word(largest, np.float32)) and math.isfinite(noise_of_word(largest, np.float64))
