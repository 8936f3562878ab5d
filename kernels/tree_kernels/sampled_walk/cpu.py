"""What a verifier runs: `reference.py`'s decisions from the K tokens of each sparse law; the vocabulary is read once.

Off the K tokens a residual is the target's law times one number, so a rejection costs K operations
(docs/design/verification.md#sparse-laws).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tree_kernels.sampled_walk.draws import Floats, SparseLaw
from tree_kernels.sampled_walk.reference import SMALLEST_MASS, Coins, accepting, chain_guesses
from tree_kernels.tree_walk import Walk, children_of


def multi_step(
    tokens: Sequence[int],
    parents: Sequence[int],
    target_probs: Callable[[int], Floats],
    draft_laws: Mapping[int, SparseLaw],
    coins: Coins,
    lenience: float = 1.0,
) -> Walk:
    """Walk like `reference.multi_step`. target_probs(row) is called once for each visited row, in order."""
    children = children_of(tokens, parents)
    path, emitted, ranks = [0], list[int](), list[int]()
    while True:
        row = path[-1]
        target = target_probs(row)
        if not children[row]:
            emitted.append(coins.draw(row, target))
            return Walk(tuple(path), tuple(emitted), tuple(ranks))
        law, scale = draft_laws[row], 1.0 / float(target.sum())
        places = {token: place for place, token in enumerate(law.ids.tolist())}
        residual = target[law.ids] * scale
        proposal = law.probabilities / law.probabilities.sum()
        for rank, child in enumerate(children[row]):
            place = places[tokens[child]]
            mass = 1.0 - float(np.minimum(residual, proposal).sum())
            chance = float(residual[place]) / (lenience * float(proposal[place]))
            if coins.accept(child, chance) or mass <= SMALLEST_MASS:
                path.append(child)
                emitted.append(tokens[child])
                ranks.append(rank)
                break
            residual = np.maximum(residual - proposal, 0.0) / mass
            scale /= mass
            proposal[place] = 0.0
            if rank + 1 < len(children[row]):
                proposal = proposal / proposal.sum()
        else:
            weights = target * scale
            weights[law.ids] = residual
            emitted.append(coins.draw(row, weights))
            return Walk(tuple(path), tuple(emitted), tuple(ranks))


def block(
    tokens: Sequence[int],
    parents: Sequence[int],
    target_probs: Callable[[int], Floats],
    draft_laws: Mapping[int, SparseLaw],
    coins: Coins,
) -> Walk:
    """Walk like `reference.block`. target_probs(row) is called in order, once for each row up to the first whose P_i
    is 0."""
    guesses = chain_guesses(parents)
    laws, reach, masses = list[Floats](), [1.0], list[float]()
    for row in range(guesses + 1):
        target = target_probs(row)
        laws.append(target / target.sum())
        if row == guesses:
            break
        law = draft_laws[row]
        proposal, own = law.probabilities / law.probabilities.sum(), laws[row][law.ids]
        masses.append(reach[row] * (1.0 - float(own.sum())) + float(np.maximum(reach[row] * own - proposal, 0.0).sum()))
        place = law.ids.tolist().index(tokens[row + 1])
        reach.append(min(reach[row] * float(own[place]) / float(proposal[place]), 1.0))
        if reach[-1] == 0.0:  # nor can a later guess be reached
            break
    accepted = 0
    for row in range(len(laws) - 1, 0, -1):
        if coins.accept(row, accepting(reach[row], masses[row]) if row < guesses else reach[row]):
            accepted = row
            break
    while accepted < len(laws) - 1 and masses[accepted] <= SMALLEST_MASS:
        accepted += 1
    weights = laws[accepted]
    if accepted < guesses:
        law = draft_laws[accepted]
        own = reach[accepted] * weights[law.ids] - law.probabilities / law.probabilities.sum()
        weights = weights * reach[accepted]
        weights[law.ids] = np.maximum(own, 0.0)
    drawn = coins.draw(accepted, weights)
    return Walk(tuple(range(accepted + 1)), (*tokens[1 : accepted + 1], drawn), (0,) * accepted)
