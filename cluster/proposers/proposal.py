"""What a proposer says: guesses from the text alone, with what each of them rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dendro.text import Text


@dataclass(slots=True)
class Proposal:
    """Guesses, parents first, as they are found. Row 0 is the root; siblings in order of hope, none of them twice."""

    root: int
    tokens: list[int] = field(init=False)  # [rows]
    parents: list[int] = field(init=False)  # [rows]
    matched: list[int] = field(init=False)  # [rows] tokens before the row, its path among them, that stood so before
    hopes: list[float] = field(init=False)  # [rows] in (0, 1): the proposer's own word that it follows its parent

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.matched, self.hopes = [self.root], [-1], [0], [1.0]

    def add(self, parent: int, token: int, matched: int, hope: float) -> int:
        """A guess below a row; the number of its own."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.matched.append(matched)
        self.hopes.append(hope)
        return len(self.tokens) - 1

    @property
    def guesses(self) -> int:
        return len(self.tokens) - 1

    def children(self) -> dict[int, list[int]]:
        """Of each row that has some, the rows below it."""
        below: dict[int, list[int]] = {}
        for row in range(1, len(self.parents)):
            below.setdefault(self.parents[row], []).append(row)
        return below


LEAST = 1 / 64
"""The least chance of being reached that is worth a row."""


class Proposer(Protocol):
    """Guesses how one text goes on, without a model. Microseconds, so it answers at once."""

    @property
    def name(self) -> str: ...

    def grow(self, text: Text) -> None:
        """Take in what the text has more than at the last call; it only ever grows."""
        ...

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        """Guesses for the text as it was last grown: at most `max_rows` rows, the root among them. Changes nothing."""
        ...

    def end(self, text: Text) -> None:
        """The text is over, and may be kept for later ones of its tenant."""
        ...


def trust(matched: int) -> float:
    """A first guess at the chance that what followed a match of so many tokens follows again: m / (m + 1)."""
    return matched / (matched + 1)
