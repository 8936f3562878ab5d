"""The forms of quantised weights, and their layout in memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tree_kernels.processor import lanes


class QuantisedForm(IntEnum):
    """How a weight is computed from what is stored."""

    Q4_1 = 0
    Q8_0 = 1
    Q4_K = 2
    Q6_K = 3


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A weight is `scale * field + offset`, the sum rounded to float32 and then to bfloat16.

    Without an offset the field of b bits stands for a signed number: field - 2^(b - 1).
    """

    bits: int  # bits of a field
    block: int  # inputs that have an output's scale in common
    offset: bool  # True if offsets are stored
    wide: bool  # scales and offsets are float32; else float16

    @property
    def zero(self) -> int:
        """The field that stands for zero times the scale."""
        return 0 if self.offset else 1 << (self.bits - 1)

    @property
    def fields(self) -> int:
        """Number of fields in a word of 32 bits: an output's neighbouring inputs, the first in the lowest bits."""
        return 32 // self.bits

    @property
    def places(self) -> tuple[FieldPlace, ...]:
        """Places of a word's fields."""
        return FIELD_PLACES[self.bits]

    def factor_bytes(self, panel: int) -> int:
        """Bytes of a block's scales and offsets in a panel."""
        return panel * (4 if self.wide else 2) * (2 if self.offset else 1)

    def block_bytes(self, panel: int) -> int:
        """Bytes of a block in a panel: scales, offsets, and the words of each `fields` inputs."""
        return self.factor_bytes(panel) + self.block * panel * self.bits // 8

    def entry_bytes(self, panel: int) -> int:
        """Bytes of one input in a panel, its share of the scales among them."""
        return self.block_bytes(panel) // self.block


class FieldPlace(NamedTuple):
    """Where a word has a field after it was shifted: inside a float32's mantissa, and high enough for `base` times a
    scale of float16 to be added to an offset without rounding."""

    shift: int  # bits of a shift to the left; negative: to the right
    position: int  # position of the field's lowest bit

    @property
    def base(self) -> int:
        """Number whose exponent, above a field f, makes the float32 `base + f`."""
        return 1 << (MANTISSA - self.position)


MANTISSA = 23
"""Bits of a float32's mantissa."""
FIELD_PLACES = {
    4: tuple(
        FieldPlace(*each) for each in ((11, 11), (11, 15), (11, 19), (-1, 11), (-1, 15), (-1, 19), (-13, 11), (-13, 15))
    ),
    8: tuple(FieldPlace(*each) for each in ((7, 7), (7, 15), (-9, 7), (-9, 15))),
}
"""Places of a word's fields, by the bits of a field. Several fields share one shift: a processor shifts a vector in the
time of two other operations."""
FORMS = {
    QuantisedForm.Q4_1: BlockForm(bits=4, block=32, offset=True, wide=False),
    QuantisedForm.Q8_0: BlockForm(bits=8, block=32, offset=False, wide=False),
    QuantisedForm.Q4_K: BlockForm(bits=4, block=32, offset=True, wide=True),
    QuantisedForm.Q6_K: BlockForm(bits=8, block=16, offset=False, wide=True),
}


def tile_panels() -> tuple[int, ...]:
    """Panels of a tile by its rows. Each holds a scale and offsets in registers, beside the sums."""
    return (0, 2, 1, 1, 1, 1) if lanes() == 8 else (0, 2, 2, 1, 1, 1, 1, 1, 1)


DOT_PANELS = (0, 1, 1, 1, 1, 1, 1, 1, 1)
"""Panels of tiles of dot products, by number of rows. Two panels with one row took a fifth longer: memory is read in
turns."""


def dot_symbol(form: QuantisedForm, rows: int, panels: int) -> str:
    """The name of a tile of dot products."""
    return f"dendro_dots_{form.name}_{rows}_{panels}"


def tile_symbol(form: QuantisedForm, rows: int, panels: int) -> str:
    """The name of a tile's function."""
    return f"dendro_tile_{form.name}_{rows}_{panels}"


def quantised_matrix_symbol(form: QuantisedForm, rows: int, panels: int) -> str:
    """The name of the function of a tile with matrix tiles."""
    return f"dendro_matrix_{form.name}_{rows}_{panels}"


def unpack_symbol(form: QuantisedForm) -> str:
    """The name of the function that unpacks inputs of a panel."""
    return f"dendro_unpack_{form.name}"
