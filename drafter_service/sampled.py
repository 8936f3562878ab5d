"""Growth of trees whose guesses are drawn from the drafter's law, without replacement, with noise of the drafter's own.

The number of a row's children is decided before they are drawn: by the shape, or in a dynamic tree by the laws and the
levels above (`DrawnForm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from dendro.drawn_form import DrawnForm
from dendro.errors import BadRequest
from dendro.shapes import DynamicShape, TreeShape
from dendro.text import Sampling
from dendro.tree import LAW_TOKENS, ChildLaw
from tree_kernels.sampled_walk import SparseLaw, drawn_order, law_of_scores
from tree_kernels.warp import Warp, warp

from drafter_service.grow import Growth, Numbers, growth_of


def check_drawn_shape(shape: TreeShape) -> None:
    """Raise BadRequest for a shape that chooses guesses by their probabilities, or that has more children a row than a
    law has tokens."""
    if not shape.drawable:
        raise BadRequest("shape", f"{shape} chooses guesses by their probabilities; drawn ones must not be chosen")
    if shape.width > LAW_TOKENS:
        raise BadRequest("shape", f"{shape} is wider than the {LAW_TOKENS} tokens of a row's law")


class DrawnGrowth(Growth):
    """A dynamic tree of drawn guesses. Unlike a tree of ranked guesses it is never pruned."""

    shape: DynamicShape

    def __post_init__(self) -> None:
        super().__post_init__()
        self._form = DrawnForm(self.shape)
        self._widths: list[int] = []

    def decide(self, laws: Sequence[SparseLaw]) -> None:
        """Decide the number of children of each frontier row, before any child is drawn. laws: one per frontier row"""
        self._widths = self._form.widths(laws)

    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        return self._widths

    def _next(self, first: int) -> list[int]:
        drawn, start = list[list[int]](), first
        for width in self._widths:
            drawn.append(self.tokens[start : start + width])
            start += width
        return [first + place for place in self._form.descend(drawn)]


def drawn_growth_of(root: int, shape: TreeShape) -> Growth:
    """Begin a tree of this shape for drawn guesses, with only its root."""
    return DrawnGrowth(root, shape) if isinstance(shape, DynamicShape) else growth_of(root, shape)


@dataclass
class GuessDraws:
    """Draws the children of one tree's rows, and keeps the laws from which they were drawn."""

    sampling: Sampling  # the request's parameters with the drafter's seed
    base: int  # length of the text at the start of the round
    laws: list[ChildLaw] = field(default_factory=list)  # one per row with children

    def drawn(
        self, growth: Growth, candidates: Sequence[Sequence[int]], scores: Sequence[Numbers]
    ) -> tuple[list[Sequence[int]], list[Numbers], list[Numbers]]:
        """Draw the children of a growth's frontier. Returns the arguments of `Growth.extend`: candidates in the order
        in which they are drawn, their scores, and the logarithms of their probabilities.

        candidates [frontier][k]: the likeliest tokens, k at least the shape's width   scores [frontier][k]: logits / T
        """
        tokens, found, chances = list[Sequence[int]](), list[Numbers](), list[Numbers]()
        sampling = self.sampling
        filters = replace(Warp.of(sampling), temperature=1.0)
        # The target's filters remove tokens that it would reject; any law may be drawn from.
        kept = warp(torch.tensor(np.array(scores), dtype=torch.float32), filters).double().numpy()
        laws = [
            law_of_scores(np.array(ids[:LAW_TOKENS], np.int64), weights[:LAW_TOKENS])
            for ids, weights in zip(candidates, kept, strict=True)
        ]
        if isinstance(growth, DrawnGrowth):
            growth.decide(laws)
        for row, law, ids, numbers in zip(growth.frontier, laws, candidates, scores, strict=True):
            self.laws.append(ChildLaw(row, law.ids, law.probabilities))
            order = drawn_order(law, sampling.seed, self.base, row, sampling.sample_index)
            tokens.append([ids[place] for place in order])
            found.append([numbers[place] for place in order])
            chances.append(np.log(law.probabilities[order]).clip(max=0.0).tolist())
        return tokens, found, chances
