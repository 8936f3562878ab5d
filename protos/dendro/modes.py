"""Verification modes, which say how a tree's guesses decide the emitted tokens."""

from __future__ import annotations

import hashlib
from enum import StrEnum


class VerificationMode(StrEnum):
    """COUPLED is the default; the others exist for comparison and to reproduce papers (docs/modes.md)."""

    COUPLED = "coupled"
    """Emits the tokens of plain decoding with the same seed; the drafter ranks its guesses by the target's noise."""
    GREEDY = "greedy"
    """COUPLED at temperature 0, at which there is no noise. Refused at any other temperature."""
    NAIVE = "naive"
    """Emits COUPLED's tokens; drafters do not get the noise and guess the likeliest tokens."""
    MULTI_STEP = "multi-step"
    """Draws guesses from the drafter without replacement and accepts them by their probabilities. Keeps the target's
    law."""
    BLOCK = "block"
    """MULTI_STEP for chains, whose guesses are accepted together. Keeps the target's law."""
    LENIENT = "lenient"
    """MULTI_STEP that accepts more, by a request's lenience. Lossy: biases the output."""

    @property
    def lossy(self) -> bool:
        """True if answers do not have the target's law."""
        return self is VerificationMode.LENIENT


DRAWING_MODES = (VerificationMode.MULTI_STEP, VerificationMode.BLOCK, VerificationMode.LENIENT)
"""Modes in which guesses are drawn from the drafter's law, at a temperature above 0. A drafter that reports false
probabilities changes the law of their answers."""
LISTED_MODES = (VerificationMode.NAIVE, *DRAWING_MODES)
"""Modes that a cluster serves only where its configuration lists them."""


def draft_seed(seed: int) -> int:
    """Seed that drafters get in LISTED_MODES. The request's own seed, of the verifier's coins, cannot be computed from
    it."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8, person=b"dendro draft").digest()
    return int.from_bytes(digest, "little")
