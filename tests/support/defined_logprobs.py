"""Log-probabilities by their definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dendro.logprobs import TokenLogprobs
from dendro.tree import DraftTree
from tree_kernels.row_softmax import log_probabilities

from verifier_service.engine import VerifierEngine


def defined_logprobs(engine: VerifierEngine, ids: Sequence[int], first: int, top: int) -> list[TokenLogprobs]:
    """Those of the tokens of `ids` from place `first`: each token's own row, computed alone, in a softmax of its own;
    every id sorted."""
    found = []
    for place in range(first, len(ids)):
        logits = engine.logits_of(ids[:place], DraftTree.root_only(ids[place - 1]))[0]
        values = log_probabilities(logits[None], torch.arange(len(logits))).tolist()
        order = sorted(range(len(logits)), key=lambda each: (-float(logits[each]), each))
        found.append(TokenLogprobs(values[ids[place]], tuple((each, values[each]) for each in order[:top])))
    return found
