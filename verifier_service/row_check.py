"""Finds the module whose rows depend on their neighbours, by tracing the same rows through a model twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verifier_service.models.experts import is_experts

HEAD = "the head"
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Seen(NamedTuple):
    """An input or output tensor of a module."""

    place: str  # the module's name, or that of its input
    rows: Tensor | None  # [rows] int64, a digest of each row's bits; None if the tensor does not have the step's rows


class RowTrace:
    """Digests of each row of every module's inputs and outputs in one forward, in the order of the calls."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    @contextmanager
    def of(self, model: nn.Module, rows: int) -> Iterator[None]:
        """Trace the forwards inside the context, whose steps have `rows` rows."""

        def note(place: str, found: Any) -> None:
            for each in found if isinstance(found, tuple | list) else (found,):
                if isinstance(each, Tensor):
                    self._seen.append(_Seen(place, _digests(each, rows)))

        with ExitStack() as hooks:
            for name, module in _traced(model):

                def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    note(f"{name}'s input", (*args, *kwargs.values()))

                def leave(module: nn.Module, args: Any, made: Any, name: str = name) -> None:
                    note(name, made)

                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave).remove)
            yield

    def first_difference(self, other: RowTrace, rows: Tensor) -> str:
        """Name of the first place where this trace's rows [k] differ from the other's first k rows.

        If the place is a module's input, the results of all modules before it are equal, so the computation between
        the modules, by their parent, differs.
        """
        for mine, its in zip(self._seen, other._seen, strict=False):
            if mine.place != its.place:
                break
            if mine.rows is None or its.rows is None:
                continue
            if not torch.equal(mine.rows[rows], its.rows[: len(rows)]):
                return mine.place
        return HEAD


def _traced(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules except the model itself and the parts of experts, whose rows are in another order."""
    apart = {
        id(part) for module in model.modules() if is_experts(module) for part in module.modules() if part is not module
    }
    return ((name, module) for name, module in model.named_modules() if name and id(module) not in apart)


def _digests(x: Tensor, rows: int) -> Tensor | None:
    """Digests [rows] int64 of the rows of x [rows, ...] or [1, rows, ...]; equal bits have equal digests. None for
    other shapes."""
    if x.dim() > 1 and len(x) == 1 != rows:
        x = x[0]
    if not x.dim() or len(x) != rows or not x.numel():
        return None
    bits = x.detach().reshape(rows, -1)
    bits = bits.long() if bits.dtype == torch.bool else bits.contiguous().view(_SIGNED[bits.element_size()]).long()
    odd = torch.arange(1, 2 * bits.shape[1], 2, device=x.device) * 0x1E3779B97F4A7C15
    return (bits * odd).sum(1)
