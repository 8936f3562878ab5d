"""Linear layers whose rows do not depend on how many rows there are, nor on a row's place among them.

A library picks how to split the inner dimension by the number of rows, and then a row's rounding depends on its
neighbours (oneDNN's bfloat16 products with more than some 320 inputs, here). Splitting it ourselves, always alike,
mends that. Each layer gets the first form of a fixed list that passes a check; nothing is timed, so that replicas on
one kind of machine choose alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST_SLICE = 768
"""The longest slices that are tried. Longer ones are no faster with 8 rows, nor, past this, with 48; few pass."""

PADDED_SLICE = 256
"""The slice of an inner dimension that no multiple of 64 divides."""

TILE = 64
"""Rows of the last form: every product has exactly so many."""


@dataclass(frozen=True, slots=True)
class RowsReport:
    """What was chosen: how many layers have which form, and the shapes that no form makes independent."""

    forms: dict[str, int] = field(default_factory=dict)
    failed: tuple[str, ...] = ()

    @property
    def independent(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        forms = ", ".join(f"{count} {form}" for form, count in sorted(self.forms.items()))
        return forms + (f"; not independent: {', '.join(self.failed)}" if self.failed else "")


Form = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Choice:
    """A way to multiply by a weight: `make(weight, bias)` prepares it."""

    name: str
    make: Callable[[Tensor, Tensor | None], Form]


def _plain(weight: Tensor, bias: Tensor | None) -> Form:
    return lambda x: F.linear(x, weight, bias)


def _sliced(weight: Tensor, bias: Tensor | None, size: int) -> Form:
    """The inner dimension in slices, multiplied as one batch and added up in order."""
    outputs, inputs = weight.shape
    count = -(-inputs // size)
    missing = count * size - inputs
    padded = F.pad(weight, (0, missing)) if missing else weight
    slices = padded.view(outputs, count, size).permute(1, 2, 0).contiguous()  # [count, size, outputs]

    def run(x: Tensor) -> Tensor:
        rows = x.reshape(-1, inputs)
        if missing:
            rows = F.pad(rows, (0, missing))
        total = torch.bmm(rows.view(-1, count, size).transpose(0, 1), slices).sum(0)
        return (total if bias is None else total + bias).view(*x.shape[:-1], outputs)

    return run


def _tiled(weight: Tensor, bias: Tensor | None) -> Form:
    """Products of exactly TILE rows, the last one padded."""

    def run(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        missing = -len(rows) % TILE
        tiles = F.pad(rows, (0, 0, 0, missing)).split(TILE)
        return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[: len(rows)].view(*x.shape[:-1], -1)

    return run


def _choices(inputs: int) -> list[_Choice]:
    """The forms to try for an inner dimension, in order."""
    sizes = [size for size in range(LARGEST_SLICE, 127, -64) if inputs % size == 0 and size < inputs]
    if not sizes and inputs > PADDED_SLICE:
        sizes = [PADDED_SLICE]
    return [
        _Choice("plain", _plain),
        *(_Choice(f"slices of {size}", partial(_sliced, size=size)) for size in sizes),
        _Choice("tiles", _tiled),
    ]


def rows_are_independent(run: Form, rows: Tensor, buckets: Sequence[int]) -> bool:
    """Whether each bucket of rows, in places other than in the largest, has the bits that the largest gives them.

    rows [the largest bucket, inputs]. Every row is looked at in every bucket that divides their number.
    """
    truth = run(rows[None])[0]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.device)
    for bucket in sorted(buckets):
        for start in range(0, len(rows) - bucket + 1, bucket):
            places = order[start : start + bucket]
            if not torch.equal(run(rows[places][None])[0], truth[places]):
                return False
    return True


def make_rows_independent(model: nn.Module, buckets: Sequence[int]) -> RowsReport:
    """Give every `nn.Linear` of the model the first form that passes its check for these numbers of rows.

    The weights are shared, or repacked where the form is sliced: the module keeps its own, which nobody reads then.
    """
    chosen: dict[tuple[int, int, bool, torch.dtype], _Choice | None] = {}
    forms: Counter[str] = Counter()
    failed = []
    for layer in model.modules():
        if type(layer) is not nn.Linear or "forward" in layer.__dict__:  # somebody's own form already
            continue
        key = (layer.in_features, layer.out_features, layer.bias is not None, layer.weight.dtype)
        if key not in chosen:
            chosen[key] = _first_independent(layer, buckets)
        choice = chosen[key]
        if choice is None:
            failed.append(f"{layer.in_features} x {layer.out_features} {layer.weight.dtype}")
        elif choice.name != "plain":
            layer.forward = choice.make(layer.weight, layer.bias)  # type: ignore[method-assign, assignment]
        forms[choice.name if choice else "plain"] += 1
    return RowsReport(dict(forms), tuple(dict.fromkeys(failed)))


def _first_independent(layer: nn.Linear, buckets: Sequence[int]) -> _Choice | None:
    """The first form that passes, on numbers whose products cancel.

    The second half of each sum takes away what the first half gave, in a random order of inputs, so that nothing is
    left but the rounding on the way. On ordinary numbers another order of adding shows in one result of thousands: the
    last step rounds it away.
    """
    generator = torch.Generator().manual_seed(0)
    half = layer.in_features // 2
    order = torch.randperm(layer.in_features, generator=generator)
    rows = torch.zeros(max(buckets), layer.in_features)
    rows[:, :half] = torch.randn(len(rows), half, generator=generator)
    rows[:, half : 2 * half] = -rows[:, :half]
    weight = torch.zeros(layer.out_features, layer.in_features)
    weight[:, :half] = torch.randn(layer.out_features, half, generator=generator)
    weight[:, half : 2 * half] = weight[:, :half]
    rows, weight = rows[:, order].to(layer.weight), weight[:, order].to(layer.weight)
    with torch.inference_mode():
        for choice in _choices(layer.in_features):
            if rows_are_independent(choice.make(weight, layer.bias), rows, buckets):
                return choice
    return None
