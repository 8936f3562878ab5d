"""Guesses of a proposer, each with the length of its match and the proposer's estimate of its chance (hope)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dendro.text import Text


@dataclass(slots=True)
class Proposal:
    """Guesses, parents first, as they are found. Row 0 is the root. Siblings are distinct and in order of hope."""

    root: int
    tokens: list[int] = field(init=False)  # [rows]
    parents: list[int] = field(init=False)  # [rows]
    matched: list[int] = field(init=False)  # [rows] tokens before the row, its path included, that are matched
    hopes: list[float] = field(init=False)  # [rows] in (0, 1): estimated chance that it follows its parent

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.matched, self.hopes = [self.root], [-1], [0], [1.0]

    def add(self, parent: int, token: int, matched: int, hope: float) -> int:
        """Add a guess below a row and return its own row."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.matched.append(matched)
        self.hopes.append(hope)
        return len(self.tokens) - 1

    @property
    def guesses(self) -> int:
        return len(self.tokens) - 1

    def children(self, row: int) -> list[int]:
        """The rows below `row`."""
        return [child for child, parent in enumerate(self.parents) if parent == row]


LEAST = 1 / 64
"""Least chance of being reached for a guess to get a row."""


class Proposer(Protocol):
    """Guesses how one text goes on, without a model. Takes microseconds, so its calls are synchronous."""

    @property
    def name(self) -> str: ...

    def grow(self, text: Text) -> None:
        """Called before `propose`. Processes the tokens appended to the text since the last call."""
        ...

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        """Called once per round. Returns guesses for the text at the last `grow`: at most `max_rows` rows, root
        included. Changes no state."""
        ...

    def end(self, text: Text) -> None:
        """Called when the text has ended. It may be kept for later texts of its tenant."""
        ...


def trust(matched: int) -> float:
    """Prior chance that the token which followed a match of m tokens follows again: m / (m + 1).

    >>> trust(1), trust(3)
    (0.5, 0.75)
    """
    return matched / (matched + 1)
