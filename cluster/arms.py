"""Arms: what a policy chooses among."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from dendro.shapes import OFF, TreeShape


@dataclass(frozen=True, slots=True)
class Arm:
    """A shape and the maker of its trees. Arms of two makers share no experience, even for the same shape.

    >>> str(Arm("mamba", TreeShape.parse("2,1"))), str(Arm.parse("lookup+suffix:proposed(7)")), str(OFF_ARM)
    ('mamba:(2,1)', 'lookup+suffix:proposed(7)', 'off')
    """

    maker: str  # the drafter of a drafted shape, or the names of the proposers; empty for `off`
    shape: TreeShape

    def __post_init__(self) -> None:
        if bool(self.maker) is self.shape.off:
            raise ValueError(f"arm: {self.shape} of {self.maker!r}; every shape but off has a maker")

    def __str__(self) -> str:
        return f"{self.maker}:{self.shape}" if self.maker else str(self.shape)

    @classmethod
    def of(cls, maker: str, shape: TreeShape) -> Arm:
        """The arm of a shape that may be `off`, which has no maker."""
        return cls("" if shape.off else maker, shape)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read what `str` writes. Raises ValueError for other text."""
        maker, _, shape = text.rpartition(":")
        return cls(maker, TreeShape.parse(shape))

    @property
    def rows(self) -> int:
        return self.shape.rows

    @property
    def depth(self) -> int:
        return self.shape.depth

    @property
    def off(self) -> bool:
        return self.shape.off

    @property
    def drafted(self) -> bool:
        return self.shape.drafted


OFF_ARM = Arm("", OFF)


def drafters_of(arms: Sequence[Arm]) -> tuple[str, ...]:
    """The drafters of these arms, each once."""
    return tuple(dict.fromkeys(arm.maker for arm in arms if arm.drafted))


@functools.cache
def parsed_shapes(texts: tuple[str, ...]) -> tuple[TreeShape, ...]:
    """The shapes of a configuration, which every request reads."""
    return tuple(TreeShape.parse(text) for text in texts)
