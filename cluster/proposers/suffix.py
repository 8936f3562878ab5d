"""Suffix automata: how the longest suffix went on that was written before, in this text or in earlier answers.

The automaton of a string is the smallest that accepts its suffixes; a state is a set of substrings that end at the
same places (Blumer et al. 1985). It grows by a token in amortised constant time. What a state leads to is what ever
followed its substrings, and how often, which is how SuffixDecoding weighs its guesses (ALGORITHMS 8).
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dendro.text import Text

from cluster.proposers.proposal import LEAST, Proposal, trust

END = -1
"""Stands between texts, or parts of one: no token, so no match crosses it."""
LONGEST = 32
"""Tokens of the text's end that are looked for."""
COUNTED = 16
"""States whose count a token raises, the longest suffixes first; shorter ones are counted too low where one token is
repeated on end."""
WIDTH = 4
"""Children of a row."""
SLICE = 512
"""Tokens that a round takes in at most: a long prompt must not hold the router up."""


class Automaton:
    """The suffix automaton of one string, which grows at its end."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # of each state; state 0 is the empty substring
        self._link = array("q", [-1])  # the state of the longest suffix that ends in more places
        self._length = array("q", [0])  # of the longest substring
        self._count = array("q", [0])  # places where it ends
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
        """The state of exactly `state`'s longest substring and a token: a clone where longer ones share it."""
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
        """State and length of the longest suffix of the whole string that ended somewhere else before."""
        state = self._link[self._last]
        return (state, self._length[state]) if state > 0 else (0, 0)

    def longest(self, tail: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `tail` that is in the string and that something follows."""
        state = length = 0
        for token in tail:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return self._followed(state, length)

    def following(self, state: int, length: int) -> tuple[list[tuple[float, int, int]], int]:
        """What followed a substring of this state and length, as (share, token, state), the most frequent first, and
        the length of what was found: a shorter suffix where the substring stands at the string's end alone."""
        state, length = self._followed(state, length)
        if not state:
            return [], 0
        seen = [(self._count[to], token, to) for token, to in self._next[state].items() if token != END]
        total = sum(count for count, _, _ in seen)
        return [(count / total, token, to) for count, token, to in heapq.nlargest(WIDTH, seen)], length

    def _followed(self, state: int, length: int) -> tuple[int, int]:
        while state and (not (following := self._next[state]) or (len(following) == 1 and END in following)):
            state = self._link[state]
            length = self._length[state]
        return state, length


class Recent:
    """The automaton of a string's last tokens, at most `budget` of them.

    Two halves: what does not fit into the newer one begins the next, and the older one goes. So the oldest is dropped
    without taking an automaton apart. A match does not cross from one into the other.
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
        self._waiting: deque[int] = deque(maxlen=budget)  # the oldest go first
        self.recent = Recent(budget)

    def add(self, answer: Iterable[int]) -> None:
        """Keep an answer, for proposals after the calls of `grow` that it takes."""
        self._waiting.append(END)
        self._waiting.extend(answer)

    def grow(self) -> None:
        """Take in a slice of what was added."""
        for _ in range(min(SLICE, len(self._waiting))):
            self.recent.extend(self._waiting.popleft())


class Suffix:
    """The longest known suffix of one text: its own, or of the answers that its tenant got before."""

    name = "suffix"

    def __init__(self, outputs: Outputs, budget: int) -> None:
        """`budget` bounds the tokens of the text that are kept, the newest."""
        self._outputs = outputs
        self._budget = budget
        self._own = Recent(budget)
        self._taken = 0  # tokens of the text

    def grow(self, text: Text) -> None:
        start = max(self._taken, len(text) - self._budget)
        if start > self._taken > 0:
            self._own.extend(END)  # what is left out keeps apart what is not
        self._taken = min(start + SLICE, len(text))
        for token in text.ids[start : self._taken]:
            self._own.extend(token)
        self._outputs.grow()

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        proposal = Proposal(text.root)
        automaton, state, matched = self._longest(text)
        paths: list[tuple[float, int, _Path]] = []  # a heap: the likeliest first, of equals the one found first
        found, row, depth, chance = 0, 0, 0, 1.0
        while True:
            if depth < max_depth:
                following, matched = automaton.following(state, matched)
                for share, token, to in following:
                    hope = share * trust(matched)
                    if chance * hope >= LEAST:
                        heapq.heappush(paths, (-chance * hope, found, _Path(row, depth + 1, token, matched, hope, to)))
                        found += 1
            if not paths or proposal.guesses >= max_rows - 1:
                return proposal
            less, _, path = heapq.heappop(paths)
            row = proposal.add(path.parent, path.token, path.matched, path.hope)
            chance, depth, state, matched = -less, path.depth, path.state, path.matched + 1

    def end(self, text: Text) -> None:
        self._outputs.add(text.answer)

    def _longest(self, text: Text) -> tuple[Automaton, int, int]:
        """The automaton with the longest match, its state there and the match's length; of equals the text's own."""
        tail, own, recent = text.ids[-LONGEST:], self._own, self._outputs.recent
        whole = self._taken == len(text)
        found = [
            (own.newer, *(own.newer.before() if whole else own.newer.longest(tail))),
            *((other, *other.longest(tail)) for other in (own.older, recent.newer, recent.older) if other.tokens),
        ]
        return max(found, key=lambda match: match[2])


class _Path(NamedTuple):
    """A guess that may be proposed."""

    parent: int  # its row
    depth: int
    token: int
    matched: int
    hope: float
    state: int
