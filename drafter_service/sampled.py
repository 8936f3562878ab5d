"""Trees whose guesses are drawn from the drafter's own law, without replacement, with noise of its own.

The form of a tree is fixed before anything is drawn: each row has exactly the shape's number of children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from dendro.errors import BadRequest
from dendro.shapes import LevelShape, NodeShape, TreeShape
from dendro.text import Sampling
from dendro.tree import LAW_TOKENS, ChildLaw
from tree_kernels.sampled_walk import drawn_order, law_of_scores
from tree_kernels.warp import Warp, warp

from drafter_service.grow import Growth, Numbers


def check_drawn_shape(shape: TreeShape) -> None:
    """Raise BadRequest for a shape whose tree depends on its tokens, or draws more children than a law has tokens."""
    if not isinstance(shape, LevelShape | NodeShape):
        raise BadRequest("shape", f"{shape} depends on the tokens that are drawn; drawn guesses need a static tree")
    if shape.width > LAW_TOKENS:
        raise BadRequest("shape", f"{shape} is wider than the {LAW_TOKENS} tokens of a row's law")


@dataclass
class GuessDraws:
    """Draws the children of one tree's rows, and keeps the laws that they were drawn from."""

    sampling: Sampling  # with the drafter's seed
    base: int  # length of the text that the round starts from
    laws: list[ChildLaw] = field(default_factory=list)

    def drawn(
        self, growth: Growth, candidates: Sequence[Sequence[int]], scores: Sequence[Numbers]
    ) -> tuple[list[Sequence[int]], list[Numbers], list[Numbers]]:
        """Candidates of the growth's frontier in the order in which they are drawn, their scores, and the logarithms of
        their probabilities: what `Growth.extend` takes.

        candidates, scores [frontier][k], k at least the shape's width: the likeliest tokens, logits / T
        """
        tokens, found, chances = list[Sequence[int]](), list[Numbers](), list[Numbers]()
        sampling = self.sampling
        filters = Warp(1.0, sampling.top_k, sampling.top_p, sampling.min_p)
        # The target's filters remove tokens that it would reject; any law may be drawn from.
        kept = warp(torch.tensor(np.array(scores), dtype=torch.float32), filters).double().numpy()
        for row, ids, numbers, weights in zip(growth.frontier, candidates, scores, kept, strict=True):
            law = law_of_scores(np.array(ids[:LAW_TOKENS], np.int64), weights[:LAW_TOKENS])
            self.laws.append(ChildLaw(row, law.ids, law.probabilities))
            order = drawn_order(law, sampling.seed, self.base, row, sampling.sample_index)
            tokens.append([ids[place] for place in order])
            found.append([numbers[place] for place in order])
            chances.append(np.log(law.probabilities[order]).clip(max=0.0).tolist())
        return tokens, found, chances
