"""Arms: what a policy chooses among."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from dendro.arguments import shown
from dendro.shapes import MAX_CHARACTERS, OFF, ProposedShape, TreeShape


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

    def name(self, names_drafter: bool) -> str:
        """The arm in statistics, requests and configurations: its shape, with its drafter where that is wanted.

        >>> [Arm.parse(text).name(True) for text in ("small:(2,1)", "lookup:proposed(7)", "off")]
        ['small:(2,1)', 'proposed(7)', 'off']
        """
        return str(self) if names_drafter and self.drafted else str(self.shape)

    @classmethod
    def of(cls, maker: str, shape: TreeShape) -> Arm:
        """The arm of a shape that may be `off`, which has no maker."""
        return cls("" if shape.off else maker, shape)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read what `str` writes. Raises ValueError for other text."""
        return cls(*maker_and_shape(text))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Arm], tuple[str, TreeShape]]:
        """Made anew in another process, whose hashes of texts differ."""
        return Arm, (self.maker, self.shape)


OFF_ARM = Arm("", OFF)


def maker_and_shape(text: str) -> tuple[str, TreeShape]:
    """Read an arm whose maker may be left out: the maker, empty where there is none, and the shape.

    Raises ValueError, beginning with `shape: `, for other text.

    >>> [(maker, str(shape)) for maker, shape in map(maker_and_shape, ("small:(2,1)", "2,1", "off"))]
    [('small', '(2,1)'), ('', '(2,1)'), ('', 'off')]
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"shape: has {len(text)} characters; at most {MAX_CHARACTERS}")
    maker, colon, shape = text.rpartition(":")
    maker = maker.strip()
    if colon and not maker:
        raise ValueError(f"shape: {text!r} names no drafter before its colon")
    return maker, TreeShape.parse(shape)


def canonical_arm(text: str) -> str:
    """An arm of a configuration in one form: `small:(3,2,1)`, or `(3,2,1)` without a drafter. Raises ValueError for
    other text, and for a drafter of a shape that no drafter makes."""
    try:
        drafter, shape = maker_and_shape(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("shape: ")) from None
    if drafter and not shape.drafted:
        raise ValueError(f"{text!r} names a drafter, but no drafter makes {shape}")
    return f"{drafter}:{shape}" if drafter else str(shape)


def drafters_of(arms: Sequence[Arm]) -> tuple[str, ...]:
    """The drafters of these arms, each once."""
    return tuple(dict.fromkeys(arm.maker for arm in arms if arm.drafted))


@functools.cache
def parsed_arms(texts: tuple[str, ...]) -> tuple[tuple[str, TreeShape], ...]:
    """The arms of a configuration, which every request reads: the drafter, empty where none is named, and the shape."""
    return tuple(maker_and_shape(text) for text in texts)


def quoted_arm(given: object) -> object:
    """An arm as YAML has read it. Raises ValueError for one without quotes that YAML reads otherwise: `off`, a boolean
    there, and `(3,2,1)` in a list in brackets, which is split at its commas."""
    if given is False:
        raise ValueError('is a boolean: YAML reads off as one; write "off", with the quotes')
    if isinstance(given, str) and given.count("(") != given.count(")"):
        raise ValueError(f'{shown(given)} is a part of a shape, split at its commas; write "(3,2,1)", with the quotes')
    return given


def distinct_arms(texts: tuple[str, ...]) -> tuple[str, ...]:
    """A configuration's list of arms in their canonical form, unchanged. Raises ValueError where it is empty or names
    an arm twice."""
    if not texts:
        raise ValueError("is empty; name at least one shape")
    if len(set(texts)) != len(texts):
        raise ValueError("names a shape twice")
    for drafter, shape in parsed_arms(texts):
        if drafter and str(shape) in texts:
            raise ValueError(f"names {Arm(drafter, shape)} beside {shape}, an arm of every drafter")
    return texts
