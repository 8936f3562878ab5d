"""Orders of trees: what a verifier asks of a drafter itself, so that a round's tree need not pass through the router.

    call of round k, with an order -> verdict k -> DraftCall -> tree -> step of round k + 1 -> verdict k + 1
    router                            verifier     verifier     drafter   verifier             router

The router orders round k + 1 in its call of round k. Once that round's verdict is known, the verifier sends the text
to the drafter and asks for the tree, while the verdict is on its way to the router. The router's call of round k + 1
claims the order's verdict (`VerifyCall.ordered`), or has another tree, which drops the order. Nothing is committed
before the router has the verdict, and the verifier alone decides which guesses are accepted: an order can cost time and
changes no token.

After an ordered tree its drafter may send the next round's tree for likely verdicts, before it is asked for it
(`dendro.calls.PreparedTree`). The verifier keeps those trees, and begins the round with the one of its own verdict. The
drafter is asked as ever, so that it has the text and goes on, but the round does not wait for its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dendro.errors import BadAnswer, BadRequest, NotFound, PeerLost
from dendro.shapes import TreeShape

LONGEST_WAIT_US = 60_000_000
"""Longest wait for an ordered tree that a verifier accepts, in microseconds."""


@dataclass(frozen=True, slots=True)
class Order:
    """The tree of a text's next round. Made by the router, held by the verifier."""

    drafter: str  # address of the drafter's replica; in one process, the drafter's name
    opening: bytes  # the text's opening at the drafter
    shape: TreeShape
    start: int  # tokens of the text that the drafter is known to hold
    wait_us: int  # microseconds from the verdict after which the round has its root alone


class Missed(StrEnum):
    """Why a claimed order has no tree."""

    UNKNOWN = "unknown"  # the verifier has no such order: the text was opened again, or the order was dropped
    UNLINKED = "unlinked"  # the verifier cannot call the drafter
    LATE = "late"  # no tree came in time
    STALE = "stale"  # the drafter does not hold the text
    MALFORMED = "malformed"  # the tree does not fit the order or the text
    LOST = "lost"  # the drafter is gone
    FAILED = "failed"  # the drafter failed


def missed_by(error: object) -> Missed:
    """Why an order has no tree after this error of its drafter."""
    match error:
        case NotFound():
            return Missed.STALE
        case BadRequest() | BadAnswer():
            return Missed.MALFORMED
        case PeerLost():
            return Missed.LOST
    return Missed.FAILED
