"""Ports of a model's memory of texts and of the nodes of trees.

A memory runs a plan's rows and folds nodes into texts. The content of a node slot depends on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dendro.state import Arrays
from torch import Tensor
from tree_kernels.acceptance_head.cpu import HeadCalls
from tree_kernels.ranking import Orders

from drafter_service.plan import Chains, DraftOutcome, Level, Levels, TextFold


class DrafterMemory(Protocol):
    """The text slots and node slots of one model. Used by one thread, in inference mode."""

    @property
    def layout(self) -> str:
        """Name, one word, of the format of what `save` returns; part of a saved state's name."""
        ...

    def text_bytes(self, longest: int) -> int:
        """Most bytes of a text slot, and of what `save` returns, if no text is longer than `longest` tokens."""
        ...

    @property
    def node_bytes(self) -> int:
        """Bytes of a node slot."""
        ...

    def save(self, text: int, tokens: int) -> Arrays:
        """Called when a session closes. Returns the content of a text slot that has consumed `tokens` tokens."""
        ...

    def check(self, arrays: Arrays, tokens: int) -> None:
        """Called before `load`. Raises ValueError or TypeError unless `save` could return these arrays after `tokens`
        tokens."""
        ...

    def load(self, text: int, arrays: Arrays) -> None:
        """Called when a session continues a saved state. Writes what `save` returned into a text slot."""
        ...

    def chain(self, rows: Chains) -> Tensor:
        """Run a plan's chains. Returns hidden rows [rows, T, d]; writes the chains' text slots and root nodes."""
        ...

    def level(self, rows: Level) -> Tensor:
        """Run a level of new nodes. Returns hidden rows [rows, d]; writes the nodes' slots."""
        ...

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Called before a forward. Writes accepted nodes into their texts' slots; all target slots differ."""
        ...


@runtime_checkable
class FusedMemory(DrafterMemory, Protocol):
    """A memory that ranks the tokens of one or more levels in the call that runs them."""

    def fold_first(self, folds: Sequence[TextFold]) -> None:
        """Called instead of `fold` before `guesses`, which then folds first, in the same compiled call: each such call
        waits for the interpreter lock when it returns."""
        ...

    def fold_rest(self) -> None:
        """Called after `guesses`. Does the folds that are left because that call raised."""
        ...

    def use_head(self, head: HeadCalls) -> None:
        """Compute the chances of all guesses by this head from now on. Raises NoKernelsError."""
        ...

    def guesses(
        self, rows: Level | Levels, groups: Sequence[int], depths: Sequence[int], orders: Orders, width: int
    ) -> DraftOutcome:
        """Run rows and rank their tokens. Returns the `width` best of each row; writes the new nodes' slots, and the
        text's, if tokens before the root are among the rows.

        groups: numbers of adjacent rows whose tokens have the same order   depths, orders: one per group
        width: more than any of the ranks of `Levels`
        """
        ...

    def guesses_of_hidden(
        self, hidden: Tensor, groups: Sequence[int], depths: Sequence[int], orders: Orders, width: int
    ) -> DraftOutcome:
        """Rank the tokens of hidden rows [rows, d] of a chain. Returns the `width` best of each row.

        groups, depths, orders: as for `guesses`
        """
        ...
