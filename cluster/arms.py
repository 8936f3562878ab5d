"""Arms: what a policy chooses among."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from dendro.shapes import OFF, ProposedShape, TreeShape


@dataclass(frozen=True, slots=True)
class Arm:
    """A shape and the maker of its trees. Arms of two makers share no experience, even for the same shape.

    >>> str(Arm("mamba", TreeShape.parse("2,1"))), str(Arm.parse("lookup+suffix:proposed(7)")), str(OFF_ARM)
    ('mamba:(2,1)', 'lookup+suffix:proposed(7)', 'off')
    """

    maker: str  # the drafter of a drafted shape, or the names of the proposers; empty for `off`
    shape: TreeShape
    # Kept, because a round of a policy reads each some twenty times.
    rows: int = field(init=False, repr=False, compare=False)
    depth: int = field(init=False, repr=False, compare=False)
    off: bool = field(init=False, repr=False, compare=False)
    drafted: bool = field(init=False, repr=False, compare=False)
    stops: bool = field(init=False, repr=False, compare=False)
    proposed: bool = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rows", "depth", "off", "drafted", "stops"):
            object.__setattr__(self, name, getattr(self.shape, name))
        object.__setattr__(self, "proposed", isinstance(self.shape, ProposedShape))
        object.__setattr__(self, "_hash", hash((self.maker, self.shape)))
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

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Arm], tuple[str, TreeShape]]:
        """Made anew in another process, whose hashes of texts differ."""
        return Arm, (self.maker, self.shape)


OFF_ARM = Arm("", OFF)


def drafters_of(arms: Sequence[Arm]) -> tuple[str, ...]:
    """The drafters of these arms, each once."""
    return tuple(dict.fromkeys(arm.maker for arm in arms if arm.drafted))


@functools.cache
def parsed_shapes(texts: tuple[str, ...]) -> tuple[TreeShape, ...]:
    """The shapes of a configuration, which every request reads."""
    return tuple(TreeShape.parse(text) for text in texts)
