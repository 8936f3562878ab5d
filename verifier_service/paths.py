"""The rows of a step: the text, token, position and parent of each row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from dendro.tree import DraftTree
from tree_kernels.row_slots import Ints, StepRows
from tree_kernels.row_slots.shapes import ABOVE, POSITION, TEXT, TOKEN


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
