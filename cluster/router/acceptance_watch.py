"""Warns of a drafter none of whose guesses is accepted: it costs time, and something is wrong with its checkpoint."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from dendro.v1 import generation_pb2 as pb

log = logging.getLogger("dendro.router")

UNACCEPTED = 1000
"""Number of guesses from a router's start, none of them accepted, after which it warns."""


class AcceptanceWatch:
    """Counts the guesses of each drafter for each target until one is accepted."""

    def __init__(self) -> None:
        self._guesses: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._settled: set[tuple[str, str]] = set()  # a guess was accepted, or the warning was given

    def learn(self, target: str, drafters: Iterable[pb.DrafterStats]) -> None:
        """Add the statistics of an answer's drafters. Warns once for a drafter and target."""
        for each in drafters:
            pair = each.name, target
            if pair in self._settled:
                continue
            self._guesses[pair] += each.drafted_tokens
            if each.accepted_tokens:
                self._settled.add(pair)
            elif self._guesses[pair] >= UNACCEPTED:
                self._settled.add(pair)
                log.warning(
                    "drafter %s: none of its %d guesses for %s was accepted; was it trained for this target?",
                    each.name,
                    self._guesses[pair],
                    target,
                )
