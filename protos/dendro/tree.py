"""Draft trees: plain arrays, checked by the constructor where they enter a process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dendro.order import Order
from dendro.shapes import MAX_ROWS, LevelShape

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
FloatArray64 = npt.NDArray[np.float64]
RANKED = 8
"""Candidates of a row among which a drafter ranks the text's tokens. RANKED itself stands for every rank past them."""
LONGEST_TRACE = 64
"""Tokens since its last tree that a drafter ranks. Of more tokens it reports the unranked first ones as past all
candidates, so a longer trace is ignored as a whole."""

_NO_PARENT: IntArray = np.array([-1], np.int64)
_NO_VALUE: FloatArray = np.zeros(1, np.float32)
_NO_PARENT.flags.writeable = _NO_VALUE.flags.writeable = False  # all trees without guesses share them
LAW_TOKENS = 32
"""Most tokens of a drafter's law of one row."""
LAW_TOLERANCE = 1e-3
"""Largest distance of the sum of a law's probabilities from 1."""
EMPTY_TRACE: npt.NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class ChildLaw:
    """The law from which the children of a row were drawn without replacement, in the order of their ranks. Raises
    ValueError, naming the field."""

    row: int
    ids: IntArray  # [k] unique; at most LAW_TOKENS
    probabilities: FloatArray64  # [k] of float32 precision

    def __post_init__(self) -> None:
        name, ids, probabilities = f"tree.laws[{self.row}]", self.ids.tolist(), self.probabilities.tolist()
        if not 1 <= len(ids) <= LAW_TOKENS or len(ids) != len(probabilities):
            counts = f"{len(ids)} ids and {len(probabilities)} probabilities"
            raise ValueError(f"{name}: has {counts}; as many of both, 1 to {LAW_TOKENS}")
        if min(ids) < 0 or len(set(ids)) < len(ids):
            raise ValueError(f"{name}.ids: are negative or not unique: {ids}")
        if not all(0 <= probability <= 1 for probability in probabilities):
            raise ValueError(f"{name}.probabilities: must lie in [0, 1]: {probabilities}")
        if not abs(sum(probabilities) - 1) <= LAW_TOLERANCE:
            raise ValueError(f"{name}.probabilities: their sum is {sum(probabilities)}; must be 1")


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft tree, parents first. Row 0 is the root, the last committed token; the other rows are guesses.

    Raises ValueError, naming the field, if it is not a tree: this protects the verifier from a faulty drafter.
    The verifier checks that the tokens are in the vocabulary.
    """

    tokens: IntArray  # [rows]
    parents: IntArray  # [rows]; parents[0] == -1, otherwise 0 <= parents[i] < i; siblings in order of rank
    values: FloatArray  # [rows] log of the estimated probability of reaching the row; to trim, merge and judge trees
    proposer: str = ""
    trace: npt.NDArray[np.int32] = field(default_factory=lambda: EMPTY_TRACE)
    """Drafter's rank of each text token since the last tree, [tokens], 0 to RANKED."""
    draft_us: int = 0  # microseconds that the tree was queued or computed at the drafter
    texts: int = 1  # texts whose trees were grown together, this one included
    missed: bool = False  # a drafter was called and sent no tree; any guesses are the router's own proposals
    laws: tuple[ChildLaw, ...] = ()  # one per row with children, ascending, if guesses were drawn; else empty
    proposed: frozenset[int] = frozenset()  # rows of a drafter's tree that are the router's own proposals alone
    ahead: bool = False  # a root alone: the next round likely has no tree either, so the verifier may begin it ahead
    order: Order | None = None  # the next round's tree, if the verifier is to ask a drafter for it
    ordered: bool = False  # a root alone, which stands for the tree that was ordered in the last round

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"tree.tokens: {rows} rows; a tree has 1 to {MAX_ROWS}")
        if self.parents.shape != (rows,) or self.values.shape != (rows,):
            raise ValueError(
                f"tree.parents, tree.values: lengths {self.parents.shape}, {self.values.shape} for {rows} tokens"
            )
        # Lists: of so few numbers, a dozen calls of NumPy take four times as long.
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        if parents[0] != -1 or not all(0 <= parent < row for row, parent in enumerate(parents[1:], 1)):
            raise ValueError(f"tree.parents: not parent-first: {parents}")
        if min(tokens) < 0:
            raise ValueError(f"tree.tokens: negative token: {tokens}")
        if not all(-math.inf < value <= 0 for value in self.values.tolist()):
            raise ValueError("tree.values: must be finite logarithms of probabilities, at most 0")
        if len(set(zip(parents[1:], tokens[1:], strict=True))) < rows - 1:
            raise ValueError("tree.tokens: two siblings have the same token")
        if self.draft_us < 0:
            raise ValueError(f"tree.draft_us: negative: {self.draft_us}")
        if self.texts < 1:
            raise ValueError(f"tree.texts: must be at least 1, got {self.texts}")
        if self.laws and [law.row for law in self.laws] != sorted(set(parents[1:])):
            raise ValueError(f"tree.laws: are of rows {[law.row for law in self.laws]}, not of those with children")

    @classmethod
    def of(cls, tokens: Iterable[int], parents: Iterable[int], values: Iterable[float] | None = None) -> DraftTree:
        """A tree from plain lists; without `values`, they are zero."""
        ids = np.fromiter(tokens, np.int64)
        logs = np.zeros(len(ids), np.float32) if values is None else np.fromiter(values, np.float32)
        return cls(ids, np.fromiter(parents, np.int64), logs)

    @classmethod
    def root_only(cls, root: int, proposer: str = "", ahead: bool = False, ordered: bool = False) -> DraftTree:
        """The empty tree: a round with it is a plain decode step. ordered: unless an ordered tree takes its place"""
        return cls.unchecked(np.array([root], np.int64), _NO_PARENT, _NO_VALUE, proposer, ahead=ahead, ordered=ordered)

    @classmethod
    def unchecked(
        cls,
        tokens: IntArray,
        parents: IntArray,
        values: FloatArray,
        proposer: str = "",
        trace: npt.NDArray[np.int32] = EMPTY_TRACE,
        draft_us: int = 0,
        texts: int = 1,
        missed: bool = False,
        proposed: frozenset[int] = frozenset(),
        ahead: bool = False,
        ordered: bool = False,
    ) -> DraftTree:
        """A tree that its maker built parents first, of checked tokens. The constructor's checks take as long as a
        quarter of a router's round."""
        tree = object.__new__(cls)
        tree.__dict__.update(
            tokens=tokens,
            parents=parents,
            values=values,
            proposer=proposer,
            trace=trace,
            draft_us=draft_us,
            texts=texts,
            missed=missed,
            proposed=proposed,
            ahead=ahead,
            ordered=ordered,
        )
        return tree

    def with_order(self, order: Order) -> DraftTree:
        """A copy that orders the next round's tree, which is therefore not begun ahead as a root alone."""
        tree = object.__new__(DraftTree)
        tree.__dict__.update(self.__dict__, order=order, ahead=False)
        return tree

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def guesses(self) -> int:
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> IntArray:
        """Levels of each row below the root, [rows]; a row's position is base - 1 + depth."""
        depths = [0]
        for parent in self.parents[1:].tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int64)

    @cached_property
    def depth(self) -> int:
        """The greatest of `depths`."""
        return int(max(self.depths.tolist()))

    @cached_property
    def paths(self) -> IntArray:
        """The row at each depth of a row's path, from the root to itself, [rows, depth + 1]; -1 past it."""
        paths = np.full((self.rows, self.depth + 1), -1, np.int64)
        paths[:, 0] = 0
        for depth in range(1, self.depth + 1):
            rows = np.flatnonzero(self.depths == depth)
            paths[rows] = paths[self.parents[rows]]
            paths[rows, depth] = rows
        return paths

    @cached_property
    def ancestors(self) -> IntArray:
        """Ancestors as bit masks, [rows] int64: bit j is set if row j is the row itself or an ancestor."""
        words = [1]
        for row, parent in enumerate(self.parents[1:].tolist(), 1):
            words.append(words[parent] | 1 << row)
        return np.array(words, np.uint64).view(np.int64)

    @cached_property
    def promised(self) -> float | None:
        """Expected number of accepted guesses of this tree, by its values: at most one per depth.

            sum over depths d >= 1 of min(1, sum of exp(value) over the rows of depth d)

        None if there are guesses and all values are zero: its proposer does not estimate probabilities.
        """
        if self.guesses and not self.values.any():
            return None
        probabilities = np.exp(self.values[1:].astype(np.float64))
        return float(np.minimum(np.bincount(self.depths[1:], weights=probabilities), 1.0).sum())

    def path_to(self, row: int) -> list[int]:
        """The rows from the root to `row`, both included."""
        path = [row]
        while path[-1] != 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def children(self, row: int) -> list[int]:
        """The rows below `row`, in order of rank."""
        return np.flatnonzero(self.parents == row).tolist()


def full_tree(root: int, shape: LevelShape, tokens: Sequence[Sequence[int]]) -> DraftTree:
    """The tree of `shape` with the tokens `tokens[i]` on level i, each parent's children together in order of rank."""
    parents, flat, above = [-1], [root], [0]
    for width, level in zip(shape.widths, tokens, strict=True):
        first = len(flat)
        parents += [parent for parent in above for _ in range(width)]
        flat += level
        above = list(range(first, len(flat)))
    return DraftTree.of(flat, parents)
