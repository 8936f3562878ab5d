"""Threads that share the products of a call, for numba. Imported only while kernels are compiled.

The thread that makes the call runs everything. It opens each large product to its helpers, takes blocks of outputs as
they do, closes the product, and waits until no helper is inside. A helper that joins late finds the product closed.
"""

from __future__ import annotations

from numba import njit, types

from tree_kernels.mamba_level import shapes, team_shapes
from tree_kernels.mamba_level.team_shapes import ENDED, SPINS
from tree_kernels.matmul.loops import SUMS, begin_sharing, blocks, end_sharing
from tree_kernels.matmul.shapes import WIDEST
from tree_kernels.translating import INLINED
from tree_kernels.vectors import atomic_load, atomic_store, call_words, fetch_add, longs, pause

_called = njit(**INLINED)
OPEN, ENTERED, LEFT, NEXT = (
    8 * place for place in (team_shapes.OPEN, team_shapes.ENTERED, team_shapes.LEFT, team_shapes.NEXT)
)
"""Bytes from a team's address on."""

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@_called
def wait_a_little(looks: int) -> None:
    """looks: times that this thread has looked in vain"""
    if looks < SPINS:
        pause()
    else:
        _sched_yield()


@_called
def take_blocks(team: int) -> None:
    """Computes blocks of the open product until none is left."""
    its = longs(team)
    words = longs(its[team_shapes.WORDS])
    entry, weights = words[shapes.ENTRY], words[shapes.WEIGHTS]
    step, width = entry * its[team_shapes.INPUTS], its[team_shapes.BLOCK_PANELS]
    number = fetch_add(team + NEXT, 1)
    while number < its[team_shapes.BLOCKS]:
        first = number * width
        blocks(
            its[team_shapes.ROWS],
            min(width, its[team_shapes.PANELS] - first),
            its[team_shapes.TILES],
            its[team_shapes.X],
            its[team_shapes.X_STEP],
            weights + first * step,
            step,
            its[team_shapes.SUMS] + first * SUMS,
            its[team_shapes.SUMS_STEP],
            its[team_shapes.INPUTS],
            its[team_shapes.BEGIN],
            entry,
            weights + (first + width) * step,
            its[team_shapes.TILE_ROWS],
        )
        number = fetch_add(team + NEXT, 1)


@_called
def share_product(
    team: int,
    x: int,
    x_step: int,
    rows: int,
    inputs: int,
    words: int,
    sums: int,
    sums_step: int,
    begin: int,
    tiles: int,
    most: int,
) -> None:
    """A product without its bias, by all threads of a team; see `product`. Every output is computed by one thread, as
    alone."""
    its = longs(team)
    panels = longs(words)[shapes.PANELS]
    width = max(1, min(WIDEST, panels // its[team_shapes.THREADS]))
    its[team_shapes.X], its[team_shapes.X_STEP], its[team_shapes.ROWS], its[team_shapes.INPUTS] = (
        x,
        x_step,
        rows,
        inputs,
    )
    its[team_shapes.WORDS], its[team_shapes.SUMS], its[team_shapes.SUMS_STEP], its[team_shapes.BEGIN] = (
        words,
        sums,
        sums_step,
        begin,
    )
    its[team_shapes.TILES], its[team_shapes.TILE_ROWS] = tiles, most
    its[team_shapes.PANELS], its[team_shapes.BLOCK_PANELS], its[team_shapes.BLOCKS] = (
        panels,
        width,
        (panels + width - 1) // width,
    )
    its[team_shapes.COUNT] += 1
    atomic_store(team + NEXT, 0)
    atomic_store(team + OPEN, its[team_shapes.COUNT])
    take_blocks(team)
    atomic_store(team + OPEN, 0)
    looks = 0
    while atomic_load(team + LEFT) != atomic_load(team + ENTERED):
        looks += 1
        wait_a_little(looks)


def join(team: int, thread: int) -> None:
    """Takes part in the products that are opened, until the call has ended."""
    done = looks = 0
    while True:
        number = atomic_load(team + OPEN)
        if number == ENDED:
            return
        if number == 0 or number == done:
            looks += 1
            wait_a_little(looks)
            continue
        fetch_add(team + ENTERED, 1)
        if atomic_load(team + OPEN) == number:  # else its arguments may change
            take_blocks(team)
            done, looks = number, 0
        fetch_add(team + LEFT, 1)


def lead(function: int, words: int, team: int, joining: int, helpers: int, count: int) -> None:
    """Call a kernel, whose model's TEAM is this team, with `count` helpers.

    function, words: address of the kernel and of its words   joining: address of `join`   helpers: of their memory
    """
    its = longs(team)
    its[team_shapes.THREADS], its[team_shapes.COUNT] = count + 1, 0
    its[team_shapes.OPEN] = its[team_shapes.ENTERED] = its[team_shapes.LEFT] = 0
    begin_sharing(team, joining, helpers, count)
    call_words(function, words)
    atomic_store(team + OPEN, ENDED)
    end_sharing(helpers, count)
