"""Verification modes: how a tree's guesses decide which tokens are emitted."""

from __future__ import annotations

import hashlib
from enum import StrEnum


class VerificationMode(StrEnum):
    """COUPLED is the default; the others exist for comparison and to reproduce papers (docs/verify.md)."""

    COUPLED = "coupled"
    """The target's token by noise that the drafter shares: the tokens of plain decoding with the same seed."""
    GREEDY = "greedy"
    """The same at temperature 0, at which there is no noise. Refused at any other temperature."""
    NAIVE = "naive"
    """The target's token by its noise, which drafters do not get: they guess the likeliest. COUPLED's tokens."""
    MULTI_STEP = "multi-step"
    """Guesses are drawn from the drafter without replacement and accepted by their probabilities. Keeps the law."""
    BLOCK = "block"
    """The same of chains, whose guesses are accepted together. Keeps the law."""
    LENIENT = "lenient"
    """Lossy: MULTI_STEP that accepts more, by a request's lenience."""

    @property
    def lossy(self) -> bool:
        """True if answers do not have the target's law."""
        return self is VerificationMode.LENIENT


LISTED_MODES = (VerificationMode.NAIVE, VerificationMode.MULTI_STEP, VerificationMode.BLOCK, VerificationMode.LENIENT)
"""Modes that a cluster serves only where its configuration lists them. In the last three a drafter that reports false
probabilities changes the law of answers."""


def draft_seed(seed: int) -> int:
    """The seed that drafters get in LISTED_MODES. The request's own, of the verifier's coins, cannot be computed from
    it."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8, person=b"dendro draft").digest()
    return int.from_bytes(digest, "little")
