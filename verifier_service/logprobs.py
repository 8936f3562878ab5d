"""Log-probabilities of the tokens that a walk emits, from the raw logits of the rows that it visited."""

from __future__ import annotations

from collections.abc import Callable

import torch
from dendro.errors import BadRequest
from dendro.logprobs import TokenLogprobs
from torch import Tensor
from tree_kernels.tree_walk import Walk

from verifier_service.structure_masks import BegunMasks
from verifier_service.walk import Draw, Echo, Walker, usable


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities after a row, by a softmax in float32, of a token and of the `top` tokens with the greatest
    logits; of equal logits the lower id comes first.

    logits [1, V]: one row at a time, so that the bits do not depend on other rows
    """
    logits = logits.float()
    logprobs = torch.log_softmax(logits, 1)[0]
    likeliest = likeliest_tokens(logits[0], top)
    found = logprobs[torch.cat([likeliest.new_tensor([token]), likeliest])].tolist()
    return TokenLogprobs(found[0], tuple(zip(likeliest.tolist(), found[1:], strict=True)))


def likeliest_tokens(logits: Tensor, top: int) -> Tensor:
    """Ids of the `top` greatest logits [V], greatest first; of equal logits the lower id comes first. (torch.topk does
    not order equal numbers, and sorting the vocabulary takes longer.)

    >>> likeliest_tokens(torch.tensor([1.0, 3.0, 2.0, 3.0]), top=3).tolist()
    [1, 3, 2]
    """
    top = min(top, len(logits))
    if not top:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    reached = (logits >= logits.topk(top).values[-1]).nonzero()[:, 0]
    order = logits[reached].sort(descending=True, stable=True).indices
    return reached[order[:top]]


def echo_logprobs(echo: Echo, logits: Callable[[int], Tensor]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the known tokens after these rows. logits: returns a row of the step's logits [1, V]

    Raises BadRequest if logits are not finite."""
    found = []
    for row, token in enumerate(echo.tokens, echo.wanted):
        here = logits(row)
        if not usable(here):
            raise BadRequest("echo", "the target's logits of the prompt are not finite")
        found.append(token_logprobs(here, token, echo.top))
    return tuple(found)


def walk_with_logprobs(
    walker: Walker, draw: Draw, logits: Callable[[int], Tensor], masks: BegunMasks | None = None
) -> tuple[Walk, tuple[TokenLogprobs, ...]]:
    """Walk a tree (`Walker.walk`). Returns the walk and the log-probabilities of its tokens; none if the draw does not
    ask for them."""
    if draw.logprobs is None:
        return walker.walk(draw, logits, masks), ()
    visited: list[Tensor] = []

    def row(place: int) -> Tensor:
        visited.append(logits(place))
        return visited[-1]

    walked, top = walker.walk(draw, row, masks), draw.logprobs
    pairs = zip(visited, walked.tokens, strict=False)
    return walked, tuple(token_logprobs(here, token, top) for here, token in pairs)
