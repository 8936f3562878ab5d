"""The interface of a model's memory of texts and of the nodes of trees.

A memory runs a plan's rows and folds nodes into texts; what a node slot holds depends on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dendro.shelf import Arrays
from torch import Tensor

from drafter_service.plan import Chains, Level, TextFold


class DrafterMemory(Protocol):
    """The text slots and node slots of one model. Used by one thread, in inference mode."""

    @property
    def layout(self) -> str:
        """The format of what `save` returns, as one word; part of a saved state's name."""
        ...

    def text_bytes(self, longest: int) -> int:
        """Most bytes of a text slot if no text is longer than `longest` tokens."""
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
