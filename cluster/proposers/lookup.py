"""Prompt lookup: proposes what followed earlier occurrences of the text's last tokens
(docs/design/drafting.md#proposers).

The longest n-gram at the text's end that occurred before comes first. Each match proposes the tokens that followed it;
of matches that continue with the same token the longest is used, and of these the newest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from dendro.text import Text

from cluster.proposers.proposal import Proposal, trust

LONGEST = 16
"""Most tokens of a match that are compared; longer matches are hardly more certain."""
SCANNED = 8192
"""The newest occurrences of the root that are considered."""
MOST = 512
"""Most occurrences of the root that are compared. If there are more, the ones that match more of the text's end stay,
the newest first."""
FEW = 24
"""Most occurrences that are compared one by one: for so few, NumPy's calls take longer."""
SHORT = 1024
"""Most tokens of a first text whose positions are listed one by one; those of a longer one are sorted."""
BRANCHES = 4
"""Most continuations that are proposed."""

_Ints = npt.NDArray[np.int32]
"""Ids and positions, which are below 2**31."""
_NOWHERE: _Ints = np.empty(0, np.int32)


class Lookup:
    """Proposes from earlier occurrences in one text.

    The text ends with 1, 2, which stood at its beginning before 3, 4, 1: these tokens are proposed.

    >>> from dendro.text import Limits, Sampling
    >>> text, lookup = Text([1, 2, 3, 4, 1, 2], Sampling(), Limits(max_length=50)), Lookup()
    >>> lookup.grow(text)
    >>> proposal = lookup.propose(text, max_rows=4, max_depth=3)
    >>> proposal.tokens, proposal.parents
    ([2, 3, 4, 1], [-1, 0, 1, 2])
    """

    name = "lookup"

    def __init__(self) -> None:
        # LONGEST entries of -1, which is no token, precede the text, so that no match extends past its beginning.
        self._ids: _Ints = np.full(256, -1, np.int32)
        self._length = 0
        # Positions by token: those of a long first text sorted, which is fast, and all others in lists.
        self._tokens = self._positions = _NOWHERE
        self._later: dict[int, list[int]] = {}

    def grow(self, text: Text) -> None:
        more = text.ids[self._length :]
        start, self._length = self._length, len(text)
        if LONGEST + self._length > len(self._ids):
            longer = np.full(max(LONGEST + self._length, 2 * len(self._ids)), -1, np.int32)
            longer[: len(self._ids)] = self._ids
            self._ids = longer
        self._ids[LONGEST + start : LONGEST + self._length] = more
        if not start and len(more) > SHORT:
            first = self._ids[LONGEST : LONGEST + self._length]
            self._positions = np.argsort(first, kind="stable").astype(np.int32)
            self._tokens = first[self._positions]
            return
        for position, token in enumerate(more, start):
            self._later.setdefault(token, []).append(position)

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        proposal = Proposal(text.root)
        for rank, (end, matched) in enumerate(self._matches(text.ids)):
            depth = min(max_depth, max_rows - 1 - proposal.guesses)
            if depth < 1:
                break
            _follow(proposal, text.ids, end, matched, depth, rank)
        return proposal

    def end(self, text: Text) -> None:
        """Do nothing: lookups keep no ended texts."""

    def _matches(self, text: list[int]) -> list[tuple[int, int]]:
        """Matches as (place, matched): the position after an earlier occurrence of the text's last tokens, and their
        number. The longest come first, then the newest; at most BRANCHES, each followed by a different token.

        A place is before the text's end, so the end does not match itself, though a match may overlap it.
        """
        later = self._later.get(text[-1], [])
        few = not len(self._tokens) and len(later) <= FEW + 1
        return _compared(text, later[:-1]) if few else self._by_arrays(text)

    def _by_arrays(self, text: list[int]) -> list[tuple[int, int]]:
        """`_matches` for any number of earlier positions of the last token."""
        ids = self._ids[: LONGEST + self._length]
        earlier = self._earlier(text[-1])
        if not len(earlier):
            return []
        places = LONGEST + 1 + earlier
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
        best: dict[int, int] = {}  # first rank of each token that follows (np.unique is slower)
        for rank, token in enumerate(ids[places[order]].tolist()):
            best.setdefault(token, rank)
        order = order[list(best.values())[:BRANCHES]]
        return list(zip((places[order] - LONGEST).tolist(), matched[order].tolist(), strict=True))

    def _earlier(self, token: int) -> _Ints:
        """The newest earlier positions of `token`, the text's last one, at most SCANNED, in ascending order."""
        first, last = np.searchsorted(self._tokens, np.array((token, token + 1), np.int32))  # another type is slow
        later = self._later.get(token, [])
        if last - first + len(later) == 1:
            return _NOWHERE
        initial = self._positions[max(first, last - SCANNED - 1) : last]
        return np.concatenate([initial, np.array(later[-SCANNED - 1 :], np.int32)])[:-1][-SCANNED:]


def _compared(ids: list[int], earlier: list[int]) -> list[tuple[int, int]]:
    """`Lookup._matches` for a few earlier positions of the last token, by a loop, which is then faster than NumPy."""
    found = []
    for position in earlier:
        matched, most = 1, min(LONGEST, position + 1)
        while matched < most and ids[position - matched] == ids[-1 - matched]:
            matched += 1
        found.append((matched, position + 1))
    best: dict[int, tuple[int, int]] = {}
    for matched, place in sorted(found, reverse=True):
        best.setdefault(ids[place], (place, matched))
    return list(best.values())[:BRANCHES]


def _follow(proposal: Proposal, ids: list[int], end: int, matched: int, depth: int, rank: int) -> None:
    """Propose the tokens from `end` on. Past the text's end, it continues with the path proposed so far."""
    row, path = 0, list[int]()
    for place in range(end, end + depth):
        path.append(ids[place] if place < len(ids) else path[place - len(ids)])
        before = matched + len(path) - 1
        row = proposal.add(row, path[-1], before, trust(before) / (1 + 2 * rank if row == 0 else 1))
