"""The interface of a model's memory of texts and of the nodes of trees.

A memory runs a plan's rows and folds nodes into texts; what a node slot holds depends on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from dendro.shelf import Arrays
from torch import Tensor
from tree_kernels.acceptance_head.cpu import Chances, HeadCalls
from tree_kernels.ranking import Orders
from tree_kernels.ranking.cpu import Ids, Scores

from drafter_service.plan import Chains, Level, Levels, TextFold


class RankedGuesses(NamedTuple):
    """The best tokens of rows, best first."""

    ids: Ids  # [rows, width]
    scores: Scores  # [rows, width] by which they are ordered
    chances: Chances | None  # [rows, width] log chances by the acceptance head; None without one


class DrafterMemory(Protocol):
    """The text slots and node slots of one model. Used by one thread, in inference mode."""

    @property
    def layout(self) -> str:
        """The format of what `save` returns, as one word; part of a saved state's name."""
        ...

    def text_bytes(self, longest: int) -> int:
        """Most bytes of a text slot, and of what `save` returns, if no text is longer than `longest` tokens."""
        ...

    @property
    def node_bytes(self) -> int:
        """Bytes of a node slot."""
        ...

    def save(self, text: int, tokens: int) -> Arrays:
        """A text slot that has consumed `tokens` tokens, as plain arrays."""
        ...

    def check(self, arrays: Arrays, tokens: int) -> None:
        """Raise ValueError or TypeError unless `save` could return these arrays after `tokens` tokens."""
        ...

    def load(self, text: int, arrays: Arrays) -> None:
        """Write what `save` returned into a text slot."""
        ...

    def chain(self, rows: Chains) -> Tensor:
        """Hidden [rows, T, d] of a plan's chains; writes their text slots and root nodes."""
        ...

    def level(self, rows: Level) -> Tensor:
        """Hidden [rows, d] of new nodes; writes their slots."""
        ...

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Fold accepted nodes into the memories of their texts; all targets differ."""
        ...


@runtime_checkable
class FusedMemory(DrafterMemory, Protocol):
    """A memory that ranks the tokens of one or more levels in the call that runs them."""

    def use_head(self, head: HeadCalls) -> None:
        """Compute the chances of all guesses by this head from now on. Raises NoKernelsError."""
        ...

    def guesses(
        self, rows: Level, groups: Sequence[int], depths: Sequence[int], orders: Orders, width: int
    ) -> RankedGuesses:
        """The `width` best tokens of each row; writes the new nodes' slots.

        groups: numbers of adjacent rows whose tokens have the same order; depths, orders: of each group
        """
        ...

    def guesses_of_levels(self, rows: Levels, depths: Sequence[int], orders: Orders, width: int) -> RankedGuesses:
        """The `width` best tokens of all levels' rows; writes the new nodes' slots.

        depths, orders: of each level; width: more than any of `rows.ranks`
        """
        ...

    def guesses_of_hidden(
        self, hidden: Tensor, groups: Sequence[int], depths: Sequence[int], orders: Orders, width: int
    ) -> RankedGuesses:
        """The `width` best tokens of hidden rows [rows, d], as of `guesses`."""
        ...
