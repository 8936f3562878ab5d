"""Matrix products in which a row's bits do not depend on the number of rows or on the row's place among them.

On a CPU where kernels can be compiled, the products are this project's own (`tree_kernels.matmul`): each sum adds its
inputs in one order, whatever the number of rows.

Libraries split the inner dimension by the number of rows, so a row's rounding depends on the other rows (for example in
oneDNN's bfloat16 products with more than about 320 inputs and more than 32 rows). Products of few rows at a time
prevent this. Each kind of weight gets the first form of a fixed list that passes a check. The choice uses no timings,
so replicas on the same kind of machine make the same one. A library's form is checked for the numbers of rows that
steps are padded to (buckets); other numbers, such as an expert's rows, are padded to these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tree_kernels.elementwise import is_narrow, leaves_tail, threads_of
from tree_kernels.matmul import PackedWeight, why_not_packed
from tree_kernels.matmul.cpu import PRECISIONS, in_matrix_tiles

from tree_layers.faster_rows import TIMED, faster_rows, padded
from tree_layers.narrow import narrow
from tree_layers.rows_report import OWN, RowsReport
from tree_layers.wide_results import may_widen, widening

TILE = 32
"""Rows per product of the tiled forms; libraries may split larger products differently."""
ALONE = 1 << 20
"""A layer with fewer weights runs in one thread for any number of rows: waking a second one takes longer."""
MOST_CHECKED = 1 << 27
"""The most elements of a weight in a check on a CPU: a larger weight is checked with fewer outputs. An accelerator's
libraries choose by all sizes of a product."""


Form = Callable[[Tensor], Tensor]
"""x [..., rows, inputs] -> [..., rows, outputs]"""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A candidate for the product of a kind of weight: a library's product, and the way in which rows are split for
    it."""

    name: str
    product: Callable[[Tensor, Tensor | None], Form]
    rows: Callable[[Form], Form]
    copies: bool = False  # the form holds a packed copy of the weight

    def make(self, weight: Tensor, bias: Tensor | None, threads: int = 1) -> Form:
        return in_threads(self.rows(self.product(weight, bias)), threads)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Our own product, for any number of rows."""

    name: str
    copies = True

    @classmethod
    def of(cls, weight: Tensor) -> _Compiled:
        """The product with weights of this kind. Matrix tiles add inputs in another order, which the name tells."""
        return cls("compiled, in matrix tiles" if in_matrix_tiles(weight) else OWN)

    def make(self, weight: Tensor, bias: Tensor | None, threads: int = 1) -> Form:
        return PackedWeight(weight, bias, threads)


def why_not_compiled(weight: Tensor) -> str:
    """Reason why products with this weight are not this project's own; empty if they are."""
    if weight.device.type != "cpu":
        return "the weight is not on a CPU"
    if weight.dtype not in PRECISIONS:
        return f"{weight.dtype} is not supported"
    return why_not_packed()


def kept_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which `RowForms.in_float32` keeps a weight."""
    return weight.dtype if not why_not_compiled(weight) or may_widen(weight) else torch.float32


def _plain(weight: Tensor, bias: Tensor | None) -> Form:
    return lambda x: F.linear(x, weight, bias)


def packed_product(weight: Tensor, bias: Tensor | None) -> Form:
    """The weight in oneDNN's own layout: limited by memory bandwidth with 1 row and with 8 (measured: half the time).

    In float32 its rows are independent from one row on; MKL's from four rows on (torch 2.13, AVX2).
    """
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
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


def _row_ways() -> Mapping[str, Callable[[Form], Form]]:
    """The ways in which rows may be split for a product, by their words in reports, in the order in which they are
    tried."""
    return {"": _at_once, ", in tiles": _in_tiles, ", in full tiles": _in_full_tiles}


def in_threads(form: Form, threads: int) -> Form:
    """Runs the form in `threads` threads; restores the caller's number afterwards."""

    def run(x: Tensor) -> Tensor:
        if torch.get_num_threads() == threads:  # the usual case; avoids a context manager per product
            return form(x)
        with threads_of(threads):
            return form(x)

    return run


def _choices(weight: Tensor, may_pack: bool = True) -> list[_Choice | _Compiled]:
    """The forms to try for a weight, in order."""
    own: list[_Choice | _Compiled] = [_Compiled.of(weight)] if may_pack and not why_not_compiled(weight) else []
    products = {"packed": packed_product, "plain": _plain}
    if not (may_pack and can_be_packed(weight)):
        del products["packed"]
    return own + [
        _Choice(name + ways, products[name], split, copies=name == "packed")
        for name in products
        for ways, split in _row_ways().items()
    ]


def can_be_packed(weight: Tensor) -> bool:
    """True if the library has a packed product with such a weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def rows_are_independent(run: Form, rows: Tensor, buckets: Sequence[int]) -> bool:
    """True if rows, in a random order and in any bucket, have the same bits as in the largest bucket.

    rows [the largest bucket, inputs]. A bucket that divides their number is checked with every row.
    """
    truth = run(rows[None])[0]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.device)
    for bucket in sorted(buckets):
        for start in range(0, len(rows) - bucket + 1, bucket):
            places = order[start : start + bucket]
            if not torch.equal(run(rows[places][None])[0], truth[places]):
                return False
    return True


class _Kind(NamedTuple):
    """The properties of a weight that the choice of a form depends on."""

    inputs: int
    outputs: int
    biased: bool
    dtype: torch.dtype
    turned: bool  # [inputs, outputs] in memory
    may_pack: bool


PACKED_LAYERS = (torch.bfloat16,)
"""Dtypes of layers that the library packs. It packs the head and experts in float32 too; layers would gain little."""
UNITS = (1, 4)
"""Multiples to which an expert's rows may be padded: the first that passes the check is used; if none does, buckets."""
UNIT_ROWS = 64
"""The most rows in the check of a unit."""


class _MadeLater:
    """A form that is made when it is first called."""

    __slots__ = ("_make", "form")

    def __init__(self, make: Callable[[], Form]) -> None:
        self._make = make
        self.form: Form | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.form is None:
            self.form = self._make()
        return self.form(x)


def packed_weight(layer: nn.Module) -> PackedWeight | None:
    """The packed weight of a layer that has been called, where its product is this project's own and its results are
    plain tensors."""
    form = vars(layer).get("forward")
    made = form.form if isinstance(form, _MadeLater) else None
    return made if isinstance(made, PackedWeight) else None


class RowForms:
    """The forms of a model's weights, chosen once for each kind of weight."""

    def __init__(self, buckets: Sequence[int], threads: int = 1, packed: Any = PackedWeight) -> None:
        """buckets: the numbers of rows that steps are padded to   threads: for large products, on a CPU
        packed: makes our own products; called as PackedWeight is"""
        self._packed = packed
        self.buckets = tuple(sorted(buckets))
        self.threads = threads
        self._chosen: dict[_Kind, _Choice | _Compiled | None] = {}
        self._counts: Counter[str] = Counter()
        self._failed: dict[str, None] = {}  # ordered set of reasons
        self._why_library = ""
        self._tails: set[int] = set()  # widths of results of which a single row leaves a tail
        self._units: dict[_Kind, int] = {}
        self._faster: dict[_Kind, Mapping[int, int]] = {}
        self._pieces: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {}

    def report(self) -> RowsReport:
        """The forms chosen so far."""
        tails = f"rows of {min(self._tails)} numbers do not fill vectors" if self._tails else ""
        library = "some products are the library's" if self._why_library else ""
        return RowsReport(dict(self._counts), tuple(self._failed), self._why_library, library or tails)

    def packs(self, weight: Tensor, bias: Tensor | None = None) -> bool:
        """True if `of` with may_pack returns a packed form, which holds a copy of the weight."""
        choice = self._choice(weight, bias, may_pack=True)
        return choice is not None and choice.copies

    def of(self, weight: Tensor, bias: Tensor | None = None, may_pack: bool = False, unit: int = 0) -> Form:
        """The product with a weight [outputs, inputs], for any number of rows.

        may_pack: the form may hold a packed copy; the caller then frees the weight   unit: the result of `unit` for
        such weights, to pad rows to its multiples; 0: pad them to buckets
        """
        form = self._form(weight, bias, may_pack, unit)
        self._counts[self._name(self._choice(weight, bias, may_pack))] += 1
        return form

    def of_layers(self, layers: Sequence[nn.Linear]) -> Form:
        """The product of one layer, or of several that share a weight.

        A packed form is made when one of the layers is first called. The layers' weight is then replaced by a meta
        tensor with its shape and dtype; an embedding that shares the weight keeps it. A layer that is never called
        keeps its weight, since some families multiply by a layer's weight directly.
        """
        weight, bias = layers[0].weight, layers[0].bias
        why = why_not_compiled(weight)
        if (weight.dtype not in PACKED_LAYERS and why) or not self.packs(weight, bias):
            self._why_library = self._why_library or why
            return self.of(weight, bias)
        self._counts[self._name(self._choice(weight, bias, may_pack=True))] += 1

        def make() -> Form:
            form = self._form(layers[0].weight, bias, may_pack=True)
            remains = nn.Parameter(layers[0].weight.to("meta"), requires_grad=False)
            for layer in layers:
                layer.weight = remains
            return form

        return _MadeLater(make)

    def joined(self, weight: Tensor, bias: Tensor | None, layers: Sequence[nn.Linear]) -> Form | None:
        """The product with a weight that has those of several layers one after another; None where it fails the check,
        or passes it in another form than each of theirs."""
        choice = self._choice(weight, bias, may_pack=False)
        if choice is None or any(self._choice(each.weight, each.bias, may_pack=False) != choice for each in layers):
            return None
        self._counts[f"{choice.name}, joined"] += 1
        return self._form(weight, bias, may_pack=False)

    def in_float32(self, weight: Tensor, bias: Tensor | None = None) -> Form:
        """The product of rows of the weight's dtype with its sums in float32, not rounded to that dtype. The form holds
        a packed copy, in the weight's dtype where it is this project's own (`kept_dtype`), else in float32; or none, on
        a GPU whose library's product with the weight itself passes the check."""
        if not why_not_compiled(weight):  # our products keep their sums in float32
            rows, like, its_bias = _cancelling(weight, bias, max(self.buckets))
            with torch.inference_mode():
                checked = PackedWeight(like, its_bias, self.threads, torch.float32)
                independent = rows_are_independent(checked, rows, self.buckets)
            if independent:
                self._counts[_Compiled.of(weight).name] += 1
                return _narrowed(self._packed(weight, bias, self.threads, torch.float32), weight)
        if may_widen(weight) and (form := self._widening(weight, bias)) is not None:
            return form
        wide, wide_bias = weight.float(), None if bias is None else bias.float()
        form = self.of(wide, wide_bias, may_pack=True, unit=self.unit(wide, wide_bias, may_pack=True))
        return lambda x: form(x.float())

    def _widening(self, weight: Tensor, bias: Tensor | None) -> Form | None:
        """The first form of the weight itself, with float32 results, that passes the check; None also where the library
        has no such product."""
        rows, like, its_bias = _cancelling(weight, bias, max(self.buckets))
        with torch.inference_mode():
            for ways, split in _row_ways().items():
                choice = _Choice(f"with float32 results{ways}", widening, split)
                try:
                    independent = rows_are_independent(choice.make(like, its_bias), rows, self.buckets)
                except RuntimeError:
                    return None
                if independent:
                    self._counts[choice.name] += 1
                    more = faster_rows(choice.make(like, its_bias), rows, self.buckets)
                    return self._for_any_rows(padded(choice.make(weight, bias), more), weight, self.buckets[0])
        return None

    def unit(self, weight: Tensor, bias: Tensor | None = None, may_pack: bool = False) -> int:
        """An expert's rows are padded to multiples of this: the first of UNITS that passes the check, else the smallest
        bucket."""
        choice = self._choice(weight, bias, may_pack)
        kind = self._kind(weight, bias, may_pack)
        if kind not in self._units:
            found = self.buckets[0]
            if isinstance(choice, _Compiled):
                found = 1
            elif choice is not None:
                found = _smallest_unit(choice, weight, bias, self.buckets, self._threads(weight))
            self._units[kind] = found
        return self._units[kind]

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., rows, inputs] times a weight [outputs, inputs] that is not an `nn.Linear`'s."""
        seen = len(self._chosen)
        form = self._form(weight, bias, may_pack=False)
        if len(self._chosen) > seen:
            self._counts[self._name(self._choice(weight, bias, may_pack=False))] += 1
        return form(x)

    def _form(self, weight: Tensor, bias: Tensor | None, may_pack: bool, unit: int = 0) -> Form:
        choice = self._choice(weight, bias, may_pack)
        threads = self._threads(weight)
        if isinstance(choice, _Compiled):
            return _narrowed(self._packed(weight, bias, self.threads), weight)
        form = choice.make(weight, bias, threads) if choice else in_threads(_plain(weight, bias), threads)
        if choice is not None and weight.device.type in TIMED:
            form = padded(form, self._faster_rows(choice, weight, bias, may_pack))
        return self._for_any_rows(form, weight, unit or self.buckets[0])

    def _faster_rows(self, choice: _Choice, weight: Tensor, bias: Tensor | None, may_pack: bool) -> Mapping[int, int]:
        """Bucket to which each number of rows is padded to save time; all buckets give the same bits."""
        kind = self._kind(weight, bias, may_pack)
        if kind not in self._faster:
            rows, like, bias = _cancelling(weight, bias, max(self.buckets))
            with torch.inference_mode():
                self._faster[kind] = faster_rows(choice.make(like, bias), rows, self.buckets)
        return self._faster[kind]

    def _threads(self, weight: Tensor) -> int:
        return self.threads if weight.numel() >= ALONE else 1

    @staticmethod
    def _name(choice: _Choice | _Compiled | None) -> str:
        return choice.name if choice else "plain"

    def _choice(self, weight: Tensor, bias: Tensor | None, may_pack: bool) -> _Choice | _Compiled | None:
        kind = self._kind(weight, bias, may_pack)
        if kind not in self._chosen:
            found = _first_independent(weight, bias, self.buckets, self._threads(weight), may_pack)
            self._chosen[kind] = found
            if may_pack and not isinstance(found, _Compiled):
                self._why_library = self._why_library or why_not_compiled(weight) or "ours failed the check"
            if leaves_tail(kind.outputs) and not is_narrow(kind.outputs):
                self._tails.add(kind.outputs)
            if found is None:
                self._failed[f"{kind.inputs} x {kind.outputs} {weight.dtype}"] = None
        return self._chosen[kind]

    @staticmethod
    def _kind(weight: Tensor, bias: Tensor | None, may_pack: bool) -> _Kind:
        outputs, inputs = weight.shape
        turned = weight.stride(0) == 1 and inputs > 1 and outputs > 1
        return _Kind(inputs, outputs, bias is not None, weight.dtype, turned, may_pack)

    def _for_any_rows(self, form: Form, weight: Tensor, unit: int) -> Form:
        """The form for any number of rows: padded to buckets, or, up to TILE rows, to multiples of `unit`."""
        buckets = (
            tuple(sorted({*self.buckets, *range(unit, TILE + 1, unit)})) if unit < self.buckets[0] else self.buckets
        )
        known = frozenset(buckets)

        def run(x: Tensor) -> Tensor:
            rows = x.shape[-2] if x.dim() > 1 else 1
            if rows in known and x.numel() == rows * x.shape[-1]:
                made = form(x)
            else:
                made = self._in_pieces(form, x.reshape(-1, x.shape[-1]), buckets)
                made = made.view(*x.shape[:-1], made.shape[-1])  # this form also fits 0 rows, which an expert may get
            return made

        return _narrowed(run, weight)

    def _in_pieces(self, form: Form, x: Tensor, buckets: Sequence[int]) -> Tensor:
        """The form applied to x [rows, inputs] in pieces, each padded to a checked number of rows."""
        key = (len(x), buckets[0])
        if key not in self._pieces:
            self._pieces[key] = tuple(_pieces(len(x), buckets))
        made = []
        for start, stop, bucket in self._pieces[key]:
            piece = x[start:stop]
            missing = bucket - (stop - start)
            made.append(form(F.pad(piece, (0, 0, 0, missing)) if missing else piece)[: stop - start])
        return made[0] if len(made) == 1 else torch.cat(made)


def _narrowed(form: Form, weight: Tensor) -> Form:
    """The form, whose results are marked as narrow where a few rows of them leave a tail."""
    if weight.device.type != "cpu" or not is_narrow(len(weight)):
        return form
    return lambda x: narrow(form(x))


def _pieces(rows: int, buckets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Ranges of rows and the bucket that each is padded to: (start, stop, bucket). The total padding is less than the
    smallest bucket.

    With buckets of 8, 16, 32 and 64: 5 is (0, 5, 8); 100 is (0, 64, 64), (64, 96, 32), (96, 100, 8).
    """
    start = 0
    while True:
        left = rows - start
        above = bisect_left(buckets, left)
        if above < len(buckets) and (buckets[above] - left < buckets[0] or not above):
            yield start, rows, buckets[above]
            return
        stop = start + buckets[above - 1]
        yield start, stop, buckets[above - 1]
        start = stop


def _first_independent(
    weight: Tensor, bias: Tensor | None, buckets: Sequence[int], threads: int = 1, may_pack: bool = True
) -> _Choice | _Compiled | None:
    """The first form for weights of this kind whose rows are independent, checked on numbers whose products cancel;
    None if no form passes."""
    rows, like, bias = _cancelling(weight, bias, max(buckets))
    with torch.inference_mode():
        for choice in _choices(like, may_pack):
            if rows_are_independent(choice.make(like, bias, threads), rows, buckets):
                return choice
    return None


def _smallest_unit(choice: _Choice, weight: Tensor, bias: Tensor | None, buckets: Sequence[int], threads: int) -> int:
    """The first of UNITS whose multiples of rows, up to TILE, give the same bits as a bucket; else the smallest
    bucket."""
    most = max((bucket for bucket in buckets if bucket <= UNIT_ROWS), default=buckets[0])
    rows, like, bias = _cancelling(weight, bias, most)
    with torch.inference_mode():
        form = choice.make(like, bias, threads)
        for unit in UNITS:
            if rows_are_independent(form, rows, range(unit, min(TILE, most) + 1, unit)):
                return unit
    return buckets[0]


def _checked_outputs(weight: Tensor) -> int:
    """Number of outputs of the smaller weight that is checked in place of a large one."""
    outputs, inputs = weight.shape
    return outputs if weight.device.type != "cpu" else min(outputs, max(TILE, MOST_CHECKED // inputs))


def _cancelling(weight: Tensor, bias: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows [count, inputs], a weight and a bias of this kind, such that the products of rows and weight cancel.

    The second half of each sum subtracts the first half, in a random order of inputs, so that only rounding errors
    remain. On ordinary numbers another order of summation changes only one result in thousands, since the last
    rounding hides it.
    """
    inputs, on = weight.shape[1], weight.device
    outputs = _checked_outputs(weight)
    generator = torch.Generator(on).manual_seed(0)
    half = inputs // 2
    order = torch.randperm(inputs, generator=generator, device=on)
    rows = torch.zeros(count, inputs, device=on)
    rows[:, :half] = torch.randn(count, half, generator=generator, device=on)
    rows[:, half : 2 * half] = -rows[:, :half]
    like = torch.zeros(outputs, inputs, device=on)
    like[:, :half] = torch.randn(outputs, half, generator=generator, device=on)
    like[:, half : 2 * half] = like[:, :half]
    rows, like = rows[:, order].to(weight), like[:, order].to(weight)
    if weight.stride(0) == 1:
        like = like.t().contiguous().t()
    return rows, like, None if bias is None else bias[:outputs]
