"""What a model remembers of texts and of the nodes of trees, in the form that suits it.

A form is asked to run a plan's rows and to fold nodes into texts; what a node slot holds is its own affair.
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
        """What `save` returns as one word; part of a saved state's name."""
        ...

    def text_bytes(self, longest: int) -> int:
        """Bytes of a text slot at most, where no text is longer than so many tokens."""
        ...

    @property
    def node_bytes(self) -> int:
        """Bytes of a node slot."""
        ...

    def save(self, text: int, tokens: int) -> Arrays:
        """A text slot that has consumed so many tokens, as plain arrays."""
        ...

    def check(self, arrays: Arrays, tokens: int) -> None:
        """Raise ValueError or TypeError unless these are what `save` returns after so many tokens."""
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
        """Bring texts up to the nodes that they went through; no two have one target."""
        ...
