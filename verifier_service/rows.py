"""The rows of a step as plain arrays: positions, parents, the slots of the keys that a row sees, and its own slot."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from dendro.errors import DendroError
from dendro.logprobs import TokenLogprobs
from dendro.tree import DraftTree
from tree_kernels.row_slots import Homes, Ints, StepRows, first_seen, path_slots
from tree_kernels.row_slots.shapes import ABOVE, POSITION, TEXT, TOKEN
from tree_kernels.tree_attention import PAGE, FarRows
from tree_kernels.tree_walk import Walk

from verifier_service.walk import Draw, Echo

NO_ROWS: Ints = np.zeros(0, np.int64)
NOT_KEPT = -1
"""Target of a checkpoint that only its own step needs."""


class TextPart(NamedTuple):
    """One text's rows of a step: committed ones, then those of a tree whose root is the text's last token."""

    ids: Sequence[int]
    committed: Ints  # positions, each at most once
    tree: DraftTree | None


@dataclass(frozen=True, slots=True, eq=False)
class RowPaths:
    """The rows of several texts, text after text. Each text has at least one."""

    texts: Ints  # [rows] number of each row's text
    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    above: Ints  # [rows] row of a guess's parent; -1 for other rows
    starts: list[int]  # [texts] first row
    least: list[int]  # [texts] least position of a row
    most: list[int]  # [texts] greatest position of a row
    certain: list[int]  # [texts] greatest position of a row that is not a guess
    numbers: array[int]  # texts, tokens, positions and above, one after the other: the arrays [rows] are views of it

    @classmethod
    def of(cls, parts: Sequence[TextPart]) -> Self:
        # Most texts have few rows, for which lists are faster than calls of NumPy.
        texts, tokens, positions, above = list[int](), list[int](), list[int](), list[int]()
        starts, least, most, certain = list[int](), list[int](), list[int](), list[int]()
        for number, (ids, committed, tree) in enumerate(parts):
            first, root = len(tokens), len(ids) - 1
            lowest = highest = root
            if len(committed):
                its = committed.tolist()
                tokens += [ids[position] for position in its]
                positions += its
                above += [-1] * len(its)
                lowest, highest = min(its), max(its)
            if tree is not None:
                under = len(tokens)
                tokens += tree.tokens.tolist()
                positions += [root + depth for depth in tree.depths.tolist()]
                above += [-1, *[under + parent for parent in tree.parents.tolist()[1:]]]
                lowest, highest = min(lowest, root), root
            texts += [number] * (len(tokens) - first)
            starts.append(first)
            least.append(lowest)
            certain.append(highest)
            most.append(highest if tree is None else root + tree.depth)
        numbers = array("q", [*texts, *tokens, *positions, *above])
        its = np.frombuffer(numbers, np.int64).reshape(4, -1)
        return cls(its[TEXT], its[TOKEN], its[POSITION], its[ABOVE], starts, least, most, certain, numbers)

    def from_lowest(self, lowest: Sequence[int]) -> StepRows:
        """The rows for `path_slots`. lowest [texts]: position from which slots are needed"""
        return StepRows(self.numbers, lowest, self.most, self.certain)


@dataclass(frozen=True, slots=True, eq=False)
class FoldOf:
    """Computation of a checkpoint from the checkpoint one block earlier."""

    source: int  # slot of the states; -1 - f for the result of the step's fold f
    columns: Ints  # [block] slots of the block's inputs
    target: int  # slot of the states, or NOT_KEPT


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRows:
    """Rows of a step, or of one text in a step, for a target with states."""

    columns: Ints  # [rows, 2 * block] slots of the inputs at positions from the row's checkpoint on; 0 where none is
    own: Ints  # [rows] column of the row's own input
    homes: Ints  # [rows] slot of the row's position in its text's ring
    sources: Ints  # [rows] checkpoint from which the row starts, numbered like `FoldOf.source`
    folds: tuple[FoldOf, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The rows of one step, as plain arrays that can be sent to shards or fill the buffers of a recorded graph."""

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    slots: Ints  # [rows] slot to which the row's key and value are written: a scratch slot for a guess, else its home
    homes: Ints  # [rows] slot of the row's position in its text, to which an accepted guess is copied
    near: Ints  # [rows, 2 * near] slots of the keys at near * (p // near - 1) + column; 0 where there is none
    far: tuple[FarRows, ...]  # pages with keys before the near columns of their texts' rows
    wanted: Ints = field(default_factory=lambda: NO_ROWS)  # [k] rows whose logits are needed
    draws: tuple[Draw, ...] = ()
    recurrent: RecurrentRows | None = None  # the rows for mixers; None for a target without states
    echoes: tuple[Echo, ...] = ()

    @property
    def certain(self) -> npt.NDArray[np.bool_]:
        """True for rows that are not guesses, [rows]."""
        certain: npt.NDArray[np.bool_] = self.slots == self.homes
        return certain


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a plan."""

    walks: tuple[Walk | DendroError, ...]  # one per draw; an error ends its text alone
    forward_us: int  # time of the model's forward, attention included
    run_us: int  # time of all of the step's work in the model's thread
    cold: bool = False  # True if kernels were compiled or recorded: later steps of this shape take less time
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by draw: one per token of a walk
    echoed: tuple[tuple[TokenLogprobs, ...] | DendroError, ...] = ()  # one per echo; an error ends its text alone


def text_rows(
    ids: Sequence[int],
    committed: Ints,
    tree: DraftTree | None,
    pages: Sequence[int],
    scratch: int,
    near: int,
    window: int | None = None,
) -> StepPlan:
    """The plan of a step with one text's rows (`rows_of_texts`)."""
    return rows_of_texts(RowPaths.of([TextPart(ids, committed, tree)]), [pages], scratch, near, window)


def rows_of_texts(
    rows: RowPaths, pages: Sequence[Sequence[int]], scratch: int, near: int, window: int | None = None
) -> StepPlan:
    """The plan of a step of these texts' rows, of which no logits are wanted yet.

    pages: each text's pages by position   scratch: first slot for keys of guesses, which are used in order; all other
    keys go to their homes   window: the widest sliding window; None if a layer sees all positions
    The keys that a row sees must be in place already, or belong to rows of the same step.
    """
    lowest = [first_seen(position, near) for position in rows.least]
    table, offsets = list[int](), list[int]()  # pages of all rows' columns, and where each text's page 0 would be
    for its, least, most in zip(pages, lowest, rows.most, strict=True):
        begin, end = max(least, 0) // PAGE, (most + PAGE) // PAGE
        offsets.append(len(table) - begin)
        table += its[begin:end]
        assert len(table) - offsets[-1] == end
    slots = path_slots(rows.from_lowest(lowest), near, Homes(table, offsets, PAGE, paged=True), scratch, for_all=False)
    far, stops = list[FarRows](), [*rows.starts[1:], len(rows.tokens)]
    for its, start, stop, least, most in zip(pages, rows.starts, stops, rows.least, rows.most, strict=True):
        begin = 0 if window is None else max(least - window + 1, 0) // PAGE
        end = max(first_seen(most, near) + PAGE - 1, 0) // PAGE  # pages from here on begin in the last row's columns
        if end > begin:
            far.append(FarRows(start, stop, tuple(its[begin:end]), begin))
    return StepPlan(rows.tokens, rows.positions, slots.own, slots.homes, slots.columns, tuple(far))
