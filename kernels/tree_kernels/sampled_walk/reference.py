"""Verification of sampled trees: the plain formulas in float64, over the whole vocabulary, for one tree.

`cpu.py` computes the same from the tokens of the sparse laws alone, and is what a verifier runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tree_kernels.sampled_walk.draws import Floats, SparseLaw
from tree_kernels.tree_walk import Walk, children_of, walk

SMALLEST_MASS = 1e-12
"""A residual of at most this mass is the rounding of a rejection that has no probability: the guess is accepted."""


class Coins(Protocol):
    """Makes a verification's random decisions, independent of the draws of the tree and of one another."""

    def accept(self, row: int, chance: float) -> bool:
        """True with this probability; above 1: always. Called at most once for each row of a tree."""
        ...

    def draw(self, row: int, weights: Floats) -> int:
        """A token, with probabilities proportional to the weights [vocabulary]. Called once for a tree."""
        ...


def multi_step(
    tokens: Sequence[int],
    parents: Sequence[int],
    target_probs: Callable[[int], Floats],
    draft_laws: Mapping[int, SparseLaw],
    coins: Coins,
    lenience: float = 1.0,
) -> Walk:
    """Multi-step speculative sampling (recursive rejection) of siblings drawn without replacement.

    tokens, parents: of the tree; siblings in the order in which they were drawn   target_probs(row): [vocabulary] the
    target's law after that row's path   draft_laws: of each row with children   lenience: see README.md; 1 is exact

    The children of a row are tried in order with the residual r, at first target_probs, and the proposal q, at first
    the row's draft law: x is accepted with probability min(1, r[x] / q[x]); else r = norm(max(r - q, 0)), and q loses x
    and is normalised. Where none is accepted, the token is drawn from r.
    """
    children = children_of(tokens, parents)
    path, emitted, ranks = [0], list[int](), list[int]()
    while True:
        row = path[-1]
        residual = _normalised(target_probs(row))
        proposal = dense(draft_laws[row], len(residual)) if children[row] else residual
        for rank, child in enumerate(children[row]):
            token = tokens[child]
            rejected = np.maximum(residual - proposal, 0.0)
            mass = rejected.sum()
            chance = residual[token] / (lenience * proposal[token])
            if coins.accept(child, chance) or mass <= SMALLEST_MASS:
                path.append(child)
                emitted.append(token)
                ranks.append(rank)
                break
            residual = rejected / mass
            proposal[token] = 0.0
            if rank + 1 < len(children[row]):
                proposal = _normalised(proposal)
        else:
            emitted.append(coins.draw(row, residual))
            return Walk(tuple(path), tuple(emitted), tuple(ranks))


def block(
    tokens: Sequence[int],
    parents: Sequence[int],
    target_probs: Callable[[int], Floats],
    draft_laws: Mapping[int, SparseLaw],
    coins: Coins,
) -> Walk:
    """Block verification (Sun et al., ICLR 2025) of a chain x_1 ... x_g drawn from the drafter. Arguments are those of
    `multi_step`.

        P_0 = 1,  P_i = min(P_(i-1) p_i(x_i) / q_i(x_i), 1)
        s_i = sum over x of max(P_i p_(i+1)(x) - q_(i+1)(x), 0)
        h_i = s_i / (s_i + 1 - P_i) for i < g,  1 where that is 0 / 0;  h_g = P_g
        m = the greatest i whose coin of chance h_i is true, 0 without one
        y ~ norm(max(P_m p_(m+1) - q_(m+1), 0)),  or y ~ p_(g+1) where m = g

    p_i, q_i: the laws of the i-th token of target and drafter. Raises ValueError for a tree that is no chain.
    """
    guesses = chain_guesses(parents)
    laws, drafts, reach = list[Floats](), list[Floats](), [1.0]
    for row in range(guesses + 1):
        laws.append(_normalised(target_probs(row)))
        if row < guesses:
            drafts.append(dense(draft_laws[row], len(laws[row])))
            token = tokens[row + 1]
            reach.append(min(reach[row] * laws[row][token] / drafts[row][token], 1.0))
    rest = [np.maximum(reach[row] * laws[row] - drafts[row], 0.0) for row in range(guesses)]
    masses = [float(each.sum()) for each in rest]
    accepted = 0
    for row in range(guesses, 0, -1):
        if coins.accept(row, accepting(reach[row], masses[row]) if row < guesses else reach[row]):
            accepted = row
            break
    while accepted < guesses and masses[accepted] <= SMALLEST_MASS:
        accepted += 1
    drawn = coins.draw(accepted, rest[accepted] if accepted < guesses else laws[guesses])
    return Walk(tuple(range(accepted + 1)), (*tokens[1 : accepted + 1], drawn), (0,) * accepted)


def accepting(reach: float, mass: float) -> float:
    """Chance h_i of the coin that accepts the first i guesses, from P_i (reach) and s_i (mass)."""
    beyond = mass + 1.0 - reach
    return mass / beyond if beyond > 0 else 1.0


def lenient_greedy(
    tokens: Sequence[int], parents: Sequence[int], scores: Callable[[int], Floats], lenience: float
) -> Walk:
    """Walk greedily and leniently, which is lossy: if the likeliest token has no child, go to the row's first child
    with at least `lenience` times the likeliest token's probability. scores(row): logits [vocabulary]"""
    children = children_of(tokens, parents)

    def pick(row: int) -> int:
        logits = scores(row)
        best = int(np.argmax(logits))
        guessed = [tokens[child] for child in children[row]]
        least = float(logits[best]) + math.log(lenience)
        good = (token for token in guessed if float(logits[token]) >= least)
        return best if best in guessed else next(good, best)

    return walk(tokens, parents, pick)


def dense(law: SparseLaw, vocabulary: int) -> Floats:
    """A sparse law as [vocabulary] probabilities with the sum 1."""
    probabilities = np.zeros(vocabulary)
    probabilities[law.ids] = law.probabilities
    return _normalised(probabilities)


def _normalised(weights: Floats) -> Floats:
    normalised: Floats = weights / weights.sum()
    return normalised


def chain_guesses(parents: Sequence[int]) -> int:
    """Number of guesses of a chain. Raises ValueError for a tree with branches."""
    if list(parents) != list(range(-1, len(parents) - 1)):
        raise ValueError(f"parents: block verification needs a chain, got {list(parents)}")
    return len(parents) - 1
