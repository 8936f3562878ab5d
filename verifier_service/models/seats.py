"""This project's attention function for transformers. It reads the step's rows from an attribute of its module, the
seat, as some models drop keyword arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from tree_kernels.elementwise import threads_of
from tree_kernels.tree_attention import Layout, Prepared, TreeRows, attend, prepare, write
from tree_kernels.tree_attention.compiled import CompiledStep, attend_compiled, compiled_step
from tree_layers.device_mixers import TabledStep
from tree_layers.memory import Pages
from tree_layers.tree_mixers import RecurrentMemory, RecurrentStep

if TYPE_CHECKING:
    from tree_kernels.tree_attention.triton import TableRows

ATTENTION = "dendro_tree"
"""Name of our attention. No mask function is registered under it, so models pass no mask and do not look for packed
sequences."""


SMALL_STEP = 64
"""Rows up to which torch's attention and scans run in one thread: waking other threads takes longer than the work. The
check at start compares such steps with larger ones."""


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """What the probe recorded about an attention layer."""

    layout: Layout
    window: int | None
    group: int  # query heads of a kv head
    dtypes: tuple[torch.dtype, ...]  # types of queries, keys and values


@dataclass(slots=True)
class ForwardContext:
    """State shared by all seats of a model: its pages, and the rows of the current forward."""

    threads: int = 1  # threads of large products, and of attention and scans of many rows, on a CPU
    pages: Pages | None = None
    step: TreeRows | TableRows | None = None
    probed: list[ProbedLayer] = field(default_factory=list)
    recurrent: RecurrentMemory | None = None  # None for a target without states
    recurrent_step: RecurrentStep | TabledStep | None = None
    compiled: bool = False  # attention runs in this project's compiled kernels
    _prepared: dict[tuple[int, int | None], Prepared] = field(default_factory=dict)
    _compiled_step: CompiledStep | None = None

    def begin(self, step: TreeRows | TableRows) -> None:
        """Set the rows of the next forward."""
        self.step = step
        self._prepared.clear()
        self._compiled_step = None

    def threads_for(self, rows: int) -> AbstractContextManager[None]:
        """Context in which attention and scans of `rows` rows use all threads; no change up to SMALL_STEP rows."""
        return threads_of(self.threads) if self.threads > 1 and rows > SMALL_STEP else nullcontext()

    def prepared(self, kv_heads: int, window: int | None) -> Prepared:
        key = (kv_heads, window)
        if key not in self._prepared:
            assert isinstance(self.step, TreeRows)
            self._prepared[key] = prepare(self.step, kv_heads, window)
        return self._prepared[key]

    @property
    def compiled_step(self) -> CompiledStep:
        """The rows of the current forward, as compiled attention reads them."""
        if self._compiled_step is None:
            assert isinstance(self.step, TreeRows)
            kv_heads = min(layer.layout.kv_heads for layer in self.probed)
            self._compiled_step = compiled_step(self.step, self.threads, kv_heads)
        return self._compiled_step


class Seat:
    """Seat of an attention module: its layer number, which the probe sets, and the context of its forwards."""

    __slots__ = ("index", "run")

    def __init__(self, run: ForwardContext) -> None:
        self.run = run
        self.index = -1


def seat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Attend to the texts' pages and the step's own rows. Called by transformers for each attention layer of a forward.

    query [1, heads, rows, dim], key and value [1, kv heads, rows, dim]: of the step's rows only
    Returns [1, rows, heads, dim]. Dropout and other arguments that models pass are ignored.
    """
    seat: Seat = module.dendro_seat  # type: ignore[assignment]  # `_take_seats` sets it
    run = seat.run
    assert run.pages is not None
    layout = run.pages.layouts[seat.index]
    pool = run.pages.layers[seat.index]
    scale = layout.key_dim**-0.5 if scaling is None else scaling
    if not isinstance(run.step, TreeRows):  # the rows of an accelerator's kernels
        from tree_kernels.tree_attention.tensor_cores import SplitRows, attend_pages, write_pages
        from tree_kernels.tree_attention.triton import attend_table, write_table

        assert run.step is not None
        if layout.dtype != torch.float32:
            assert isinstance(run.step, SplitRows)
            write_pages(pool, key[0], value[0], run.step, layout)
            return attend_pages(query[0], pool, run.step, layout, scale, sliding_window, softcap, s_aux)[None], None
        write_table(pool, key[0], value[0], run.step)
        return attend_table(query[0], pool, run.step, layout, scale, sliding_window, softcap, s_aux)[None], None
    if run.compiled:
        given = query[0], key[0], value[0], pool, run.compiled_step, layout
        return attend_compiled(*given, scale, sliding_window, softcap, s_aux)[None], None
    step = run.prepared(layout.kv_heads, sliding_window)
    with run.threads_for(step.padded):
        write(pool, key[0], value[0], step)
        return attend(query[0], pool, step, layout, scale, softcap, s_aux)[None], None


AttentionInterface.register(ATTENTION, seat_attention)
