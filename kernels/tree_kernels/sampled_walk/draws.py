"""The drafter's sparse laws, and the order in which a row's children are drawn from one, without replacement.

Drafter and verifier compute the order by the same function from the probabilities that were sent, so that the verifier
can check that the children of a row are the first draws.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tree_kernels.noise import gumbel_of_words, uniform_words

DRAFT_STREAM = 1
"""The noise stream of the drafter's draws; that of shared noise is 0."""
LEAST_PROBABILITY = 1e-6
"""Number added to the probability of each id of a law made here, so that all ids can be drawn and the mass that is left
to draw from is never smaller."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class SparseLaw(NamedTuple):
    """Probabilities of a few tokens; all other tokens have the probability 0."""

    ids: Ints  # [k] unique
    probabilities: Floats  # [k] of float32 precision, at least 0; their sum is 1 up to rounding


def law_of_scores(ids: Ints, scores: Floats) -> SparseLaw:
    """The law softmax(scores [k]) over `ids`, with probabilities of at least about LEAST_PROBABILITY. Some scores may
    be minus infinity, but not all. Probabilities are rounded to float32, as they are sent: the draws follow the rounded
    numbers."""
    weights = np.exp(scores - scores.max())
    law = weights / weights.sum() + LEAST_PROBABILITY
    return SparseLaw(ids, (law / law.sum()).astype(np.float32).astype(np.float64))


def drawn_order(law: SparseLaw, seed: int, base: int, row: int, sample_index: int = 0) -> list[int]:
    """Places in the law of the tokens that can be drawn, in the order in which they are drawn without replacement.

    base: length of the text that the round starts from, so that no two rounds share noise   row: of the tree

    The order of log(probability) + Gumbel noise is that of successive draws, each from what is left, renormalised.
    """
    noise = gumbel_of_words(uniform_words(seed, base, law.ids, sample_index, DRAFT_STREAM, row)).astype(np.float64)
    with np.errstate(divide="ignore"):
        scores = np.log(law.probabilities) + noise
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return [place for place in order if law.probabilities[place] > 0]
