"""Suffix automata: propose what followed the longest suffix that occurred before, in this text or earlier answers.

The automaton of a string is the smallest that accepts its suffixes; a state is a set of substrings that end at the
same places (Blumer et al. 1985). Appending a token takes amortised constant time. The transitions of a state are all
tokens that followed its substrings, with counts, by which SuffixDecoding weighs its guesses
(docs/design/drafting.md#proposers).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, nlargest

from dendro.text import Text

from cluster.proposers.proposal import LEAST, Proposal, trust

END = -1
"""Separator between texts, or parts of one. It is no token, so no match crosses it."""
LONGEST = 32
"""Most tokens of the text's end that are matched."""
SHORT = 8
"""Tokens of the text's end that are matched first. Most matches are shorter, and then no more tokens are read."""
COUNTED = 16
"""Most states whose count a token increases, longest suffixes first. If a token is repeated many times, the counts of
shorter suffixes are too low."""
WIDTH = 4
"""Most children of a row."""
SLICE = 512
"""Most tokens processed per round, so that a long prompt does not block the router."""

_Path = tuple[float, int, int, int, int, int, float, int]
"""A guess not yet proposed: minus its chance, its number, its parent's row, its depth, token, matched tokens, hope and
state."""


class Automaton:
    """The suffix automaton of one string, which grows at its end."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # transitions of each state; state 0 is the empty substring
        self._link = array("q", [-1])  # the state of the longest suffix that ends in more places
        self._length = array("q", [0])  # length of each state's longest substring
        self._count = array("q", [0])  # number of places where each state's substrings end
        self._last = 0
        self.tokens = 0

    def extend(self, token: int) -> None:
        """Append a token."""
        state, new = self._last, self._state(self._length[self._last] + 1, 0, {})
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != -1:
            self._link[new] = self._split(state, token)
        self._last = new
        self.tokens += 1
        for _ in range(COUNTED):
            self._count[new] += 1
            new = self._link[new]
            if new <= 0:
                break

    def _split(self, state: int, token: int) -> int:
        """The state of `state`'s longest substring followed by a token, cloned if it also has longer substrings."""
        old = self._next[state][token]
        length = self._length[state] + 1
        if self._length[old] == length:
            return old
        clone = self._state(length, self._link[old], dict(self._next[old]))
        self._count[clone] = self._count[old]
        self._link[old] = clone
        while state != -1 and self._next[state].get(token) == old:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _state(self, length: int, link: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        return len(self._next) - 1

    def before(self) -> tuple[int, int]:
        """State and length of the longest suffix of the whole string that also ended at an earlier place."""
        state = self._link[self._last]
        return (state, self._length[state]) if state > 0 else (0, 0)

    def longest(self, tail: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `tail` that the string has with a token after it."""
        state, length = self._match(tail[-SHORT:])
        if length == SHORT:  # if it is shorter, the string has no longer suffix
            state, length = self._match(tail)
        return self._followed(state, length)

    def _match(self, tail: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `tail` that is in the string."""
        state = length = 0
        for token in tail:
            while (following := self._next[state].get(token)) is None and state:
                state = self._link[state]
                length = self._length[state]
            if following is not None:
                state, length = following, length + 1
        return state, length

    def following(self, state: int, length: int) -> tuple[list[tuple[float, int, int]], int]:
        """The tokens that followed a substring of this state and length, as (share, token, state), the most frequent
        first, and the length matched: that of a shorter suffix where the substring is only at the string's end."""
        state, length = self._followed(state, length)
        if not state:
            return [], 0
        next_states = self._next[state]
        if len(next_states) == 1:  # the most usual case
            return [(1.0, *next(iter(next_states.items())))], length
        seen = [(self._count[to], token, to) for token, to in next_states.items() if token != END]
        total = sum(count for count, _, _ in seen)
        return [(count / total, token, to) for count, token, to in nlargest(WIDTH, seen)], length

    def _followed(self, state: int, length: int) -> tuple[int, int]:
        while state and (not (following := self._next[state]) or (len(following) == 1 and END in following)):
            state = self._link[state]
            length = self._length[state]
        return state, length


class Recent:
    """Automata of a string's last tokens, at most `budget` of them.

    They are two halves. When the newer is full, it becomes the older, whose predecessor is dropped, because tokens
    cannot be removed from an automaton. No match crosses from one into the other.
    """

    def __init__(self, budget: int) -> None:
        self._half = max(budget // 2, 1)
        self.newer, self.older = Automaton(), Automaton()

    @property
    def tokens(self) -> int:
        return self.newer.tokens + self.older.tokens

    def extend(self, token: int) -> None:
        if self.newer.tokens >= self._half:
            self.newer, self.older = Automaton(), self.newer
        self.newer.extend(token)


class Outputs:
    """The last answers of one tenant at one target, at most `budget` tokens. Shared by that tenant's requests."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._waiting: deque[int] = deque(maxlen=budget)  # drops the oldest
        self.recent = Recent(budget)

    def add(self, answer: Iterable[int]) -> None:
        """Queue an answer, which later calls of `grow` process."""
        self._waiting.append(END)
        self._waiting.extend(answer)

    def grow(self) -> None:
        """Process up to SLICE of the queued tokens."""
        for _ in range(min(SLICE, len(self._waiting))):
            self.recent.extend(self._waiting.popleft())


class Suffix:
    """Proposes from the longest suffix match of one text, in itself or in earlier answers to its tenant."""

    name = "suffix"

    def __init__(self, outputs: Outputs, budget: int) -> None:
        """budget: the newest tokens of the text that are kept"""
        self._outputs = outputs
        self._budget = budget
        self._own = Recent(budget)
        self._processed = 0  # tokens of the text processed so far

    def grow(self, text: Text) -> None:
        start = max(self._processed, len(text) - self._budget)
        if start > self._processed > 0:
            self._own.extend(END)  # marks the tokens left out
        self._processed = min(start + SLICE, len(text))
        for token in text.ids[start : self._processed]:
            self._own.extend(token)
        self._outputs.grow()

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        proposal = Proposal(text.root)
        automaton, state, matched = self._longest(text)
        paths: list[_Path] = []  # a heap: the likeliest first; of equals, the first found
        found, row, depth, chance = 0, 0, 0, 1.0
        while True:
            if depth < max_depth:
                following, matched = automaton.following(state, matched)
                trusted = trust(matched)
                for share, token, to in following:
                    hope = share * trusted
                    if chance * hope >= LEAST:
                        heappush(paths, (-chance * hope, found, row, depth + 1, token, matched, hope, to))
                        found += 1
            if not paths or row >= max_rows - 1:
                return proposal
            less, _, parent, depth, token, matched, hope, state = heappop(paths)
            row = proposal.add(parent, token, matched, hope)
            chance, matched = -less, matched + 1

    def end(self, text: Text) -> None:
        self._outputs.add(text.answer)

    def _longest(self, text: Text) -> tuple[Automaton, int, int]:
        """The automaton with the longest match, the state and length of that match; of equals, the text's own."""
        tail, own, recent = text.ids[-LONGEST:], self._own, self._outputs.recent
        whole = self._processed == len(text)
        found = [
            (own.newer, *(own.newer.before() if whole else own.newer.longest(tail))),
            *((other, *other.longest(tail)) for other in (own.older, recent.newer, recent.older) if other.tokens),
        ]
        return max(found, key=lambda match: match[2])
