"""Shapes of draft trees, as values and as texts. The drafter grows the trees.

>>> texts = ("off", "3,2,1", "nodes(2,1)", "beam(4,3)", "dynamic(6,5,24)", "until(auto,8)", "proposed(7)")
>>> [str(TreeShape.parse(text)) for text in texts]
['off', '(3,2,1)', 'nodes(2,1)', 'beam(4,3)', 'dynamic(6,5,24)', 'until(auto,8)', 'proposed(7)']
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

MAX_ROWS = 64
"""The root and 63 guesses: a row's ancestors are a mask of 64 bits."""
DEFAULT_DEPTH = 16
"""The most levels below the root, where a target's or drafter's options set no `max_depth`."""
MAX_K = 16
"""The greatest k of a dynamic tree: a level has up to k squared candidates."""
MAX_CHARACTERS = 512
"""The longest text of a shape. A shape has at most 63 numbers of two digits."""
CHANCE_DIGITS = 4
"""Decimals of the two chances of an `until` shape, so that its text is exact."""
LEAST_H = 10**-CHANCE_DIGITS
HOW = "write off, (1,1,1,1), (3,2,2,1,1), nodes(2,1), beam(4,3), dynamic(6,5,24), until(0.6,8) or proposed(7)"
UNTIL = re.compile(r"until\((auto|[0-9]*\.?[0-9]+),([0-9]+(?:,[0-9]+)*)(?:,least=([0-9]*\.?[0-9]+))?\)")


class TreeShape(ABC):
    """The shape of a draft tree. The constructor raises ValueError if a tree of it could exceed MAX_ROWS rows."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """The greatest number of levels below the root."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The most rows of a tree of this shape, the root included."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The most children of one row: the number of ranked candidates that a drafter computes per row."""

    @property
    @abstractmethod
    def forwarded(self) -> int:
        """The most rows that the drafter computes: those that may get children, including rows dropped later."""

    @property
    def off(self) -> bool:
        return self.rows == 1

    @property
    def stops(self) -> bool:
        """True if trees are often much smaller than the shape: the drafter's estimates end their growth."""
        return False

    @property
    def drawable(self) -> bool:
        """True if the guesses of its trees may be drawn from the drafter's law: which of them a tree has, and in which
        order, must then not depend on their own or later tokens
        (docs/design/verification.md#what-a-decision-may-depend-on)."""
        return False

    @property
    def drafted(self) -> bool:
        """True if a drafter makes the tree."""
        return self.forwarded > 0

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Read `off`, `(3,2,2,1,1)`, `3,2,2,1,1`, `nodes(...)`, `beam(...)`, `dynamic(...)`, `until(...)` or
        `proposed(...)`."""
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"shape: has {len(text)} characters; at most {MAX_CHARACTERS}")
        bare = text.replace(" ", "")
        if bare == "off":
            return OFF
        if (until := UNTIL.fullmatch(bare)) is not None:
            return _until(until[1], tuple(map(int, until[2].split(","))), until[3])
        found = re.fullmatch(r"([a-z]*)\(([0-9]+(?:,[0-9]+)*),?\)|([0-9]+(?:,[0-9]+)*),?", bare)
        if found is None:
            raise ValueError(f"shape: {text!r} is not a shape; {HOW}")
        kind, numbers = found[1] or "", tuple(int(number) for number in (found[2] or found[3]).split(","))
        match kind, numbers:
            case "", _:
                return LevelShape(numbers)
            case "nodes", _:
                return NodeShape(numbers)
            case "beam", (steps, beams):
                return BeamShape(steps, beams)
            case "dynamic", (k, depth, total):
                return DynamicShape(k, depth, total)
            case "proposed", (guesses,):
                return ProposedShape(guesses)
        raise ValueError(f"shape: {text!r} is not a shape; {HOW}")

    def _check_rows(self) -> None:
        """Raise ValueError for more than MAX_ROWS rows. Call `_check_numbers` first: it bounds the numbers."""
        if self.rows > MAX_ROWS:
            raise ValueError(f"shape: {self} has more than {MAX_ROWS - 1} guesses")


def _check_numbers(numbers: tuple[int, ...], least: int, first: int = 1) -> None:
    """Raise ValueError for more numbers than a tree has guesses, or for a number out of range. Must precede any
    arithmetic. The message does not contain the numbers: Python refuses to print one of more than 4,300 digits.

    first: the place of `numbers[0]` among the numbers of the shape's text"""
    if len(numbers) >= MAX_ROWS:
        raise ValueError(f"shape: has {len(numbers)} numbers; at most {MAX_ROWS - 1}, the most guesses of a tree")
    for index, number in enumerate(numbers, first):
        if not least <= number < MAX_ROWS:
            raise ValueError(f"shape: number {index} must lie in {least} to {MAX_ROWS - 1}")


def _until(h: str, numbers: tuple[int, ...], least: str | None) -> TreeShape:
    """The shape of an `until` text. numbers: (most), or (k, steps, total) as of `dynamic`"""
    _check_numbers(numbers, 1, first=2)
    match numbers:
        case (most,):
            tree = DynamicShape(1, most, most)
        case (k, steps, total):
            tree = DynamicShape(k, steps, total)
        case _:
            raise ValueError(f"shape: after h, until has one number or three, as until(0.6,4,5,15); not {len(numbers)}")
    if h != "auto":
        return UntilShape(tree, float(h), float(least or 0.0))
    if least is not None:
        raise ValueError("shape: least is computed where h is auto; leave it out")
    return MarginalShape(tree)


@dataclass(frozen=True)
class LevelShape(TreeShape):
    """A tree in which every row of level i has `widths[i]` children. Without widths: `off`.

    The levels of (3,2,2,1,1) have 3, 6, 12, 12 and 12 guesses, with the root 46 rows:

    >>> str(LevelShape((3, 2, 2, 1, 1))), str(LevelShape(())), LevelShape((3, 2, 2, 1, 1)).rows
    ('(3,2,2,1,1)', 'off', 46)
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_numbers(self.widths, 1)
        self._check_rows()

    def __str__(self) -> str:
        return f"({','.join(map(str, self.widths))})" if self.widths else "off"

    @property
    def drawable(self) -> bool:
        return True

    @property
    def depth(self) -> int:
        return len(self.widths)

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Guesses of each level, without the root: (3,2,1) has 3, 6 and 6."""
        return tuple(accumulate(self.widths, mul))

    @functools.cached_property
    def rows(self) -> int:
        return 1 + sum(self.levels)

    @property
    def width(self) -> int:
        return max(self.widths, default=0)

    @property
    def forwarded(self) -> int:
        return self.rows - self.levels[-1] if self.levels else 0


@dataclass(frozen=True)
class NodeShape(TreeShape):
    """Any static tree: row i has `children[i]` children. Rows are numbered level by level, a row's children
    consecutively; rows past the last number have no children. Sequoia's trees have this form
    (docs/design/policies.md#optimal-trees).

    >>> NodeShape((2, 1)).rows, NodeShape((2, 1)).depth, NodeShape((1, 2, 0, 1)).levels
    (4, 2, (1, 2, 1))
    """

    children: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_numbers(self.children, 0)
        if not self.children or self.children[-1] < 1:
            raise ValueError(f"shape: {self} must have at least one child, and end with a row that has children")
        self._check_rows()
        rows = 1
        for row, count in enumerate(self.children):
            if row >= rows:
                raise ValueError(f"shape: {self} gives children to row {row}, which is not the child of any row")
            rows += count

    def __str__(self) -> str:
        return f"nodes({','.join(map(str, self.children))})"

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Guesses of each level, without the root."""
        levels, start, stop = [], 0, 1
        while below := sum(self.children[start:stop]):
            levels.append(below)
            start, stop = stop, stop + below
        return tuple(levels)

    @property
    def drawable(self) -> bool:
        return True

    @property
    def depth(self) -> int:
        return len(self.levels)

    @functools.cached_property
    def rows(self) -> int:
        return 1 + sum(self.children)

    @property
    def width(self) -> int:
        return max(self.children)

    @property
    def forwarded(self) -> int:
        return sum(count > 0 for count in self.children)


@dataclass(frozen=True)
class BeamShape(TreeShape):
    """A tree of all tokens of a beam search: `steps` levels of the `beams` likeliest paths (STree, Table 1).

    With the root, 3 levels of 4 beams have 13 rows:

    >>> str(BeamShape(4, 3)), BeamShape(4, 3).rows
    ('beam(4,3)', 13)
    """

    steps: int
    beams: int

    def __post_init__(self) -> None:
        _check_numbers((self.steps, self.beams), 1)
        self._check_rows()

    def __str__(self) -> str:
        return f"beam({self.steps},{self.beams})"

    @property
    def depth(self) -> int:
        return self.steps

    @property
    def rows(self) -> int:
        return 1 + self.steps * self.beams

    @property
    def width(self) -> int:
        return self.beams

    @property
    def forwarded(self) -> int:
        return 1 + (self.steps - 1) * self.beams


@dataclass(frozen=True)
class DynamicShape(TreeShape):
    """EAGLE-2's tree: on each of `steps` levels the `k` rows of greatest value get `k` children each, and the `total`
    guesses of greatest value are kept (docs/design/drafting.md#dynamic-trees). Drawn guesses are all kept: the numbers
    of children are decided before they are drawn (docs/design/drafting.md#drawn-dynamic-trees).

    With k = 6 and 5 steps, the root gets 6 candidates and each of 4 levels 6 * 6, of which 24 are kept:

    >>> str(DynamicShape(6, 5, 24)), DynamicShape(6, 5, 24).rows, DynamicShape(6, 5, 24).candidates
    ('dynamic(6,5,24)', 25, 150)
    """

    k: int
    steps: int
    total: int

    def __post_init__(self) -> None:
        _check_numbers((self.k, self.steps, self.total), 1)
        if self.k > MAX_K:
            raise ValueError(f"shape: {self} must have k in 1 to {MAX_K}")
        if not self.steps <= self.total <= self.candidates:
            raise ValueError(f"shape: {self} must keep {self.steps} to {self.candidates} guesses")

    def __str__(self) -> str:
        return f"dynamic({self.k},{self.steps},{self.total})"

    @property
    def drawable(self) -> bool:
        return True

    @property
    def depth(self) -> int:
        return self.steps

    @property
    def candidates(self) -> int:
        """The number of guesses from which `total` are chosen."""
        return self.k + (self.steps - 1) * self.k**2

    @property
    def rows(self) -> int:
        return 1 + self.total

    @property
    def width(self) -> int:
        return self.k

    @property
    def forwarded(self) -> int:
        return 1 + (self.steps - 1) * self.k


@dataclass(frozen=True)
class StoppingShape(TreeShape):
    """A dynamic tree whose growth the drafter's own estimates end (SpecDec++,
    docs/design/stopping.md#when-a-draft-stops)."""

    tree: DynamicShape  # the largest tree; a chain where its k is 1

    @property
    def stops(self) -> bool:
        return True

    @property
    def depth(self) -> int:
        return self.tree.depth

    @property
    def rows(self) -> int:
        return self.tree.rows

    @property
    def width(self) -> int:
        return self.tree.width

    @property
    def forwarded(self) -> int:
        return self.tree.forwarded

    @property
    def _numbers(self) -> str:
        """Numbers after h in the shape's text."""
        k, steps, total = self.tree.k, self.tree.steps, self.tree.total
        return str(steps) if k == 1 else f"{k},{steps},{total}"


@dataclass(frozen=True)
class UntilShape(StoppingShape):
    """A dynamic tree that gets another level while the estimated chance that the text leaves it stays below h:

        1 - sum of V(row) < h        over the rows that would get children; V(row): estimated chance to reach a row

    In a chain this is the chance that some guess so far is rejected. Guesses with V(row) <= least are left out.

    >>> str(UntilShape(DynamicShape(1, 8, 8), 0.6)), str(UntilShape(DynamicShape(4, 5, 15), 0.25, 0.05))
    ('until(0.6,8)', 'until(0.25,4,5,15,least=0.05)')
    """

    h: float  # greater than 0 and less than 1, of at most CHANCE_DIGITS decimals
    least: float = 0.0  # at least 0 and less than 1, of at most CHANCE_DIGITS decimals

    def __post_init__(self) -> None:
        if not 0 < self.h < 1:
            raise ValueError("shape: h must be greater than 0 and less than 1, or auto")
        if not 0 <= self.least < 1:
            raise ValueError("shape: least must be at least 0 and less than 1")
        for name, chance in (("h", self.h), ("least", self.least)):
            if chance != round(chance, CHANCE_DIGITS):
                raise ValueError(f"shape: {name} must have at most {CHANCE_DIGITS} decimals")

    def __str__(self) -> str:
        least = f",least={self.least:g}" if self.least else ""
        return f"until({self.h:g},{self._numbers}{least})"


@dataclass(frozen=True)
class MarginalShape(StoppingShape):
    """An `UntilShape` whose h and least the router computes before each round, from measured costs and the current
    rate (docs/design/stopping.md#the-marginal-rule). The drafter gets that `UntilShape`.

    >>> str(MarginalShape(DynamicShape(1, 8, 8))), str(MarginalShape(DynamicShape(4, 5, 15)))
    ('until(auto,8)', 'until(auto,4,5,15)')
    """

    def __str__(self) -> str:
        return f"until(auto,{self._numbers})"

    def at(self, h: float, least: float) -> UntilShape:
        """The shape with these finite numbers, rounded, and moved to the nearest end of their ranges where they lie
        outside: no rate or cost makes it invalid."""
        h, least = (round(min(max(chance, 0.0), 1 - LEAST_H), CHANCE_DIGITS) for chance in (h, least))
        return UntilShape(self.tree, max(h, LEAST_H), least)


@dataclass(frozen=True)
class ProposedShape(TreeShape):
    """A tree of at most `total` guesses by proposers that have no model; no drafter is called. Without any proposal the
    round is plain decoding.

    >>> str(ProposedShape(7)), ProposedShape(7).rows, ProposedShape(7).drafted
    ('proposed(7)', 8, False)
    """

    total: int

    def __post_init__(self) -> None:
        _check_numbers((self.total,), 1)

    def __str__(self) -> str:
        return f"proposed({self.total})"

    @property
    def depth(self) -> int:
        return self.total

    @property
    def rows(self) -> int:
        return 1 + self.total

    @property
    def width(self) -> int:
        return self.total

    @property
    def forwarded(self) -> int:
        return 0


OFF = LevelShape(())


@functools.lru_cache(maxsize=1024)  # clients can name any number of shapes
def child_counts(shape: TreeShape) -> tuple[int, ...]:
    """Children of each row of a static tree, rows level by level. Raises ValueError for other shapes.

    >>> child_counts(LevelShape((2, 1))), child_counts(NodeShape((2, 0, 1)))
    ((2, 1, 1, 0, 0), (2, 0, 1, 0))
    """
    if isinstance(shape, NodeShape):
        return shape.children + (0,) * (shape.rows - len(shape.children))
    if isinstance(shape, LevelShape):
        levels = zip((1, *shape.levels), (*shape.widths, 0), strict=True)
        return tuple(width for rows, width in levels for _ in range(rows))
    raise ValueError(f"shape: {shape} is not static: the drafter's probabilities determine the tree")
