"""Linear layers whose rows do not depend on how many rows there are, nor on a row's place among them.

A library picks how to split the inner dimension by the number of rows, and then a row's rounding depends on its
neighbours (oneDNN's bfloat16 products with more than some 320 inputs and more than 32 rows, here). Products of few rows
at a time mend that. Each layer gets the first form of a fixed list that passes a check; nothing is timed, so that
replicas on one kind of machine choose alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TILE = 32
"""The most rows of a product, where more would split it otherwise."""
ALONE = 1 << 20
"""A layer of fewer weights runs in one thread, whatever the number of rows: waking another takes longer."""


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
    """A way to multiply by a weight: a product, and how many rows it is given at once."""

    name: str
    product: Callable[[Tensor, Tensor | None], Form]
    rows: Callable[[Form], Form]

    def make(self, weight: Tensor, bias: Tensor | None) -> Form:
        return self.rows(self.product(weight, bias))


def _plain(weight: Tensor, bias: Tensor | None) -> Form:
    return lambda x: F.linear(x, weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Form:
    """oneDNN's own layout of a weight: as fast as memory gives it, with 8 rows as with 1 (half the time, here)."""
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")


def _at_once(form: Form) -> Form:
    return form


def _in_tiles(form: Form) -> Form:
    """Products of at most TILE rows."""

    def run(x: Tensor) -> Tensor:
        if x.shape[-2] <= TILE:
            return form(x)
        return torch.cat([form(tile) for tile in x.split(TILE, -2)], -2)

    return run


def _in_full_tiles(form: Form) -> Form:
    """Products of exactly TILE rows, the last one padded."""

    def run(x: Tensor) -> Tensor:
        count = x.shape[-2]
        tiles = F.pad(x, (0, 0, 0, -count % TILE)).split(TILE, -2)
        return torch.cat([form(tile) for tile in tiles], -2)[..., :count, :]

    return run


def in_threads(form: Form, threads: int) -> Form:
    """The form in so many threads, whatever the caller runs in."""

    def run(x: Tensor) -> Tensor:
        before = torch.get_num_threads()
        if before == threads:
            return form(x)
        torch.set_num_threads(threads)
        try:
            return form(x)
        finally:
            torch.set_num_threads(before)

    return run


def _choices(weight: Tensor) -> list[_Choice]:
    """The forms to try for a weight, in order."""
    products = {"packed": _packed, "plain": _plain}
    half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.device.type != "cpu" or not half:
        del products["packed"]
    rows = {"": _at_once, ", in tiles": _in_tiles, ", in full tiles": _in_full_tiles}
    return [_Choice(name + ways, products[name], rows[ways]) for name in products for ways in rows]


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


def make_rows_independent(model: nn.Module, buckets: Sequence[int], threads: int = 1) -> RowsReport:
    """Give every `nn.Linear` of the model the first form that passes its check for these numbers of rows.

    threads: of large layers, on a CPU. A packed weight takes the place of the layer's own, of which only shape and type
    are left (unless an embedding shares it).
    """
    chosen: dict[tuple[int, int, bool, torch.dtype], _Choice | None] = {}
    forms: Counter[str] = Counter()
    failed = []
    for layer in model.modules():
        if type(layer) is not nn.Linear or "forward" in layer.__dict__:  # somebody's own form already
            continue
        own_threads = threads if layer.weight.numel() >= ALONE else 1
        key = (layer.in_features, layer.out_features, layer.bias is not None, layer.weight.dtype)
        if key not in chosen:
            chosen[key] = _first_independent(layer, buckets, own_threads)
        choice = chosen[key]
        if choice is None:
            failed.append(f"{layer.in_features} x {layer.out_features} {layer.weight.dtype}")
        form = (choice.make if choice else _plain)(layer.weight, layer.bias)
        layer.forward = in_threads(form, own_threads)  # type: ignore[method-assign, assignment]
        if choice and choice.name.startswith("packed"):
            layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
        forms[choice.name if choice else "plain"] += 1
    return RowsReport(dict(forms), tuple(dict.fromkeys(failed)))


def _first_independent(layer: nn.Linear, buckets: Sequence[int], threads: int = 1) -> _Choice | None:
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
        for choice in _choices(weight):
            if rows_are_independent(in_threads(choice.make(weight, layer.bias), threads), rows, buckets):
                return choice
    return None
