"""Prompt lookup: what followed the last time the text's last words were written (ALGORITHMS 8).

The text's end is looked up in the text before it, its longest n-gram first. Each match proposes the tokens that
followed; of matches that go on with the same token the one found first counts: the longer, then the newer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from dendro.text import Text

from cluster.proposers.proposal import Proposal, trust

LONGEST = 16
"""Tokens beyond which a match is not lengthened: it could hardly be surer."""
MOST = 512
"""Places that are compared. Where the root stands in more, those stay that have more of the text's end before them,
and of these the newest."""
BRANCHES = 4
"""Continuations that are proposed."""


class Lookup:
    """The lookup of one text."""

    name = "lookup"

    def __init__(self) -> None:
        # Before the text are LONGEST of what no token is, so that no match reaches beyond its beginning.
        self._ids: npt.NDArray[np.int64] = np.full(256, -1, np.int64)
        self._length = 0

    def grow(self, text: Text) -> None:
        more = text.ids[self._length :]
        start, self._length = self._length, len(text)
        if LONGEST + self._length > len(self._ids):
            longer = np.full(max(LONGEST + self._length, 2 * len(self._ids)), -1, np.int64)
            longer[: len(self._ids)] = self._ids
            self._ids = longer
        self._ids[LONGEST + start : LONGEST + self._length] = more

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        proposal = Proposal(text.root)
        firsts: set[int] = set()
        for end, matched in self._matches():
            if text.ids[end] in firsts:
                continue
            depth = min(max_depth, max_rows - 1 - proposal.guesses)
            if len(firsts) == BRANCHES or depth < 1:
                break
            _follow(proposal, text.ids, end, matched, depth, len(firsts))
            firsts.add(text.ids[end])
        return proposal

    def end(self, text: Text) -> None:
        """Nothing of it is kept."""

    def _matches(self) -> list[tuple[int, int]]:
        """Places at which the text's last tokens ended before, and how many of them: the most first, then the newest.

        A place is where the next token stands, so it lies before the text's end: no match is the end itself, though
        the two may overlap.
        """
        ids = self._ids[: LONGEST + self._length]
        places = LONGEST + 1 + np.flatnonzero(ids[LONGEST:-1] == ids[-1])
        for back in range(2, LONGEST + 1):
            if len(places) <= MOST:
                break
            closer = places[ids[places - back] == ids[-back]]
            places = closer if len(closer) else places[-MOST:]
        places = places[-MOST:]
        backs = np.arange(1, LONGEST + 1)
        alike = ids[places[:, None] - backs] == ids[-backs]  # [places, LONGEST]
        matched = np.logical_and.accumulate(alike, axis=1).sum(axis=1)
        order = np.argsort(matched, kind="stable")[::-1]
        return list(zip((places[order] - LONGEST).tolist(), matched[order].tolist(), strict=True))


def _follow(proposal: Proposal, ids: list[int], end: int, matched: int, depth: int, rank: int) -> None:
    """Propose what stands from `end` on; where that runs into the text's end, the proposed path is what comes next."""
    row, path = 0, list[int]()
    for place in range(end, end + depth):
        path.append(ids[place] if place < len(ids) else path[place - len(ids)])
        met = matched + len(path) - 1
        row = proposal.add(row, path[-1], met, trust(met) / (1 + 2 * rank if row == 0 else 1))
