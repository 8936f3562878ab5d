"""Calls the compiled attention: one call writes a step's keys and values and attends, without the interpreter lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.kernel_cache import load_kernels, why_missing
from tree_kernels.matmul.cpu import PRECISIONS, helpers
from tree_kernels.matmul.shapes import Precision, float_bits
from tree_kernels.tree_attention.rows import LOG2_E, PAGE, FarRows, Layout, RowRotation, TreeRows
from tree_kernels.tree_attention.shapes import (
    BLOCK_ROWS,
    TILE_LINES,
    WEIGHTS_SYMBOL,
    AttentionArgument,
    Block,
    scores_symbol,
    scratch_floats,
    sums_symbol,
    whole_vectors,
)

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

MODULE = "tree_kernels.tree_attention.loops"
NARROW = torch.bfloat16, torch.float16
"""Dtypes whose keys and values stay as they are in a pool."""
MANY_UNITS = 4
"""Units of a thread from which on the last one is a small part of the time."""
THREADED = 1 << 20
"""A call that reads fewer bytes of keys and values runs in one thread: waking a second one takes longer."""


def why_not_compiled() -> str:
    """Reason why attention cannot be compiled here; empty if it can."""
    return why_missing(MODULE)


def why_not_for(layout: Layout) -> str:
    """Reason why layers of this layout are not attended by compiled kernels; empty if they are."""
    if layout.key_dim + whole_vectors(layout.value_dim) > layout.width:
        return f"a slot of {layout.key_dim} and {layout.value_dim} numbers has no room for whole vectors of values"
    return ""


def layout_for(layout: Layout, dtypes: Sequence[torch.dtype]) -> Layout:
    """The layout of pages of a layer with these dtypes of queries, keys and values: the kernels read a head's keys one
    after another, and the fewer bytes the faster."""
    dtype = dtypes[0] if len({*dtypes}) == 1 and dtypes[0] in NARROW else torch.float32
    return replace(layout, dtype=dtype, by_head=True)


def _kernels() -> Kernels:
    return load_kernels(MODULE)


@cache
def attention_kernels() -> tuple[int, int]:
    """The addresses of the kernels that write a step's keys and values, and that attend."""
    return _kernels().address("write_rows"), _kernels().address("units")


@cache
def _tiles() -> npt.NDArray[np.int64]:
    """Addresses, as `AttentionArgument.TILES` lists them."""
    addresses = _kernels().addresses
    every = range(1, TILE_LINES + 1)
    names = [*map(scores_symbol, every), *map(sums_symbol, every), WEIGHTS_SYMBOL]
    return np.array([addresses[name] for name in names], np.int64)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Queries, keys or values [heads, padded, dim] in memory: an address, and bytes from a head and a row to the
    next."""

    address: int
    head: int
    row: int

    @classmethod
    def of(cls, rows: Tensor) -> HeadRows:
        """rows [heads, padded, dim], whose last stride is 1."""
        size = rows.element_size()
        return cls(rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size)


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A step's rows as all layers read them."""

    words: npt.NDArray[np.int64]  # arguments of a call that all layers share
    columns: int
    block_rows: int  # rows of the largest block
    keys: int  # keys of each kv head that the blocks read
    threads: int
    kept: tuple[object, ...]  # owners of the memory to which `words` points


def compiled_step(step: TreeRows, threads: int = 1, kv_heads: int = 1) -> CompiledStep:
    """The rows of a step as `attend_compiled` takes them. threads: threads that attend   kv_heads: kv heads of a
    layer"""
    rows = len(step.positions)
    parts: list[FarRows] = []
    end = 0
    for part in sorted(step.far, key=lambda part: part.start):
        parts += [FarRows(end, part.start, ()), part]
        end = part.stop
    parts.append(FarRows(end, rows, ()))
    shares = _shares([part.stop - part.start for part in parts], kv_heads, threads)
    blocks: list[tuple[int, ...]] = []
    pages: list[int] = []
    for part in parts:
        its = part.stop - part.start
        most = -(-its // max(_block_count(its, shares), 1))
        blocks += [
            (start, min(start + most, part.stop), len(pages), len(part.pages), part.first)
            for start in range(part.start, part.stop, most or 1)
        ]
        pages += part.pages
    table = np.array(blocks, np.int64).reshape(-1, len(Block))
    listed = np.array(pages, np.int64)
    tensors = [each.contiguous() for each in (step.positions, step.slots, step.near)]
    words = np.zeros(len(AttentionArgument), np.int64)
    words[: AttentionArgument.QUERY] = (
        rows,
        step.padded,
        *(each.data_ptr() for each in tensors),
        step.near.shape[1],
        table.ctypes.data,
        len(table),
        listed.ctypes.data,
    )
    largest = max((block[Block.STOP] - block[Block.START] for block in blocks), default=0)
    keys = sum(block[Block.COUNT] for block in blocks) * PAGE + step.near.numel()
    return CompiledStep(words, step.near.shape[1], largest, keys, threads, (table, listed, *tensors))


def _block_count(rows: int, shares: int) -> int:
    """The number of blocks of a text's rows, if every BLOCK_ROWS rows are divided into `shares` blocks."""
    return min(rows, -(-rows // BLOCK_ROWS) * shares)


def _shares(parts: Sequence[int], kv_heads: int, threads: int) -> int:
    """Number of blocks that share BLOCK_ROWS rows: more than one where threads would wait for the last unit.

    parts: the rows of each text

    >>> _shares([8], kv_heads=3, threads=2)  # of 3 units one thread would compute 2
    2
    >>> _shares([8], kv_heads=8, threads=2)
    1
    """
    for shares in range(1, BLOCK_ROWS):
        units = kv_heads * sum(_block_count(rows, shares) for rows in parts)
        if units % threads == 0 or units >= MANY_UNITS * threads:
            return shares
    return BLOCK_ROWS


def attend_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    step: CompiledStep,
    layout: Layout,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rotation: RowRotation | None = None,
) -> Tensor:
    """Rotate queries and keys; write every row's key and value into its slot; then attention of every row over its own
    path. Raises ValueError for a pool or a rotation of another dtype, or a rotation of more numbers than keys have.

    query [heads, padded, key_dim]   key [kv_heads, padded, key_dim]   value [kv_heads, padded, value_dim]
    pool [slots, kv_heads, width] of float32 or the query's dtype, written   sinks [heads]
    returns [padded, heads, value_dim] in the query's dtype; padding rows are zero
    """
    dtype = query.dtype
    if rotation is not None and not (
        dtype == key.dtype == value.dtype and rotation.fits(query.shape[1], dtype, layout.key_dim)
    ):
        raise ValueError(f"a rotation {[*rotation.cos.shape]} of {rotation.cos.dtype} does not fit {dtype} queries")
    if not dtype == key.dtype == value.dtype or dtype not in PRECISIONS:
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    if pool.dtype not in (torch.float32, query.dtype):
        raise ValueError(f"a pool of {pool.dtype} does not fit rows of {query.dtype}")
    heads, padded = query.shape[:2]
    group = heads // layout.kv_heads
    made = torch.empty(padded, heads, layout.value_dim, dtype=dtype if dtype in PRECISIONS else torch.float32)
    sink = None if sinks is None else (sinks.float() * LOG2_E).contiguous()
    cos, sin = (query, query) if rotation is None else (rotation.cos.contiguous(), rotation.sin.contiguous())
    call = step.words.copy()
    call[AttentionArgument.QUERY :] = layer_words(
        (HeadRows.of(query), HeadRows.of(key), HeadRows.of(value)),
        PRECISIONS[query.dtype],
        made.data_ptr(),
        PRECISIONS[made.dtype],
        pool_words(pool),
        layout,
        group,
        scaling,
        window,
        softcap,
        0 if sink is None else sink.data_ptr(),
        (cos.data_ptr(), sin.data_ptr(), 0 if rotation is None else cos.shape[1]),
    )
    each = scratch_floats(step.block_rows * group, layout.key_dim, layout.value_dim, step.columns)
    threads = step.threads if step.keys * layout.token_bytes > THREADED else 1

    def run(memory: int, count: int) -> None:
        scratch = torch.empty((count + 1) * each)
        call[AttentionArgument.SCRATCH], call[AttentionArgument.SCRATCH_BYTES] = scratch.data_ptr(), 4 * each
        _kernels().functions["attend"](call.ctypes.data, *attention_kernels(), memory, count)

    helpers().share(threads, run)
    return made.to(dtype)


def pool_words(pool: Tensor) -> tuple[int, int, int, int]:
    """Address and `Precision` of a pool, and bytes from a slot and a kv head to the next."""
    size = pool.element_size()
    return pool.data_ptr(), PRECISIONS[pool.dtype], pool.stride(0) * size, pool.stride(1) * size


def layer_words(
    given: tuple[HeadRows, HeadRows, HeadRows],
    kind: Precision,
    target: int,
    target_kind: Precision,
    pool: tuple[int, int, int, int],
    layout: Layout,
    group: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: int,
    rotation: tuple[int, int, int],
) -> tuple[int, ...]:
    """The arguments of a layer's call, from `AttentionArgument.QUERY` on; its scratch memory is to be added.

    given: queries, keys and values   rotation: addresses of cosines and sines, and how many numbers of a row they have
    """
    return (
        *(number for each in given for number in (each.address, each.head, each.row)),
        kind,
        target,
        target_kind,
        *pool,
        layout.kv_heads,
        group,
        layout.key_dim,
        layout.value_dim,
        layout.width,
        window or 0,
        sinks,
        float_bits(scaling * LOG2_E if softcap is None else scaling / softcap),
        0 if softcap is None else float_bits(softcap * LOG2_E),
        *rotation,
        _tiles().ctypes.data,
        *[0] * (len(AttentionArgument) - AttentionArgument.SCRATCH),
    )
