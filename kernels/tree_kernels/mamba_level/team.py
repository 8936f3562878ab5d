"""Threads that share the products of a call, for numba. Imported only while kernels are compiled.

The thread that makes the call runs everything. It opens each large product to its helpers, takes blocks of outputs as
they do, closes the product, and waits until no helper is inside. A helper that joins late finds the product closed.
"""

from __future__ import annotations

from numba import njit

from tree_kernels.mamba_level import shapes, team_shapes
from tree_kernels.mamba_level.team_shapes import ENDED
from tree_kernels.matmul.loops import SUMS, begin_sharing, blocks, end_sharing, wait_a_little
from tree_kernels.matmul.shapes import WIDEST
from tree_kernels.translating import INLINED
from tree_kernels.vectors import atomic_load, atomic_store, call_words, fetch_add, longs

_called = njit(**INLINED)
OPEN, ENTERED, LEFT, NEXT = (
    8 * place for place in (team_shapes.OPEN, team_shapes.ENTERED, team_shapes.LEFT, team_shapes.NEXT)
)
"""Bytes from a team's address on."""


@_called
def few_panels(
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
    first: int,
    count: int,
) -> None:
    """Multiply by `count` panels, at most WIDEST, from the panel `first` on; see `product`.

    begin: 1: the results replace the sums; 0: they are added   tiles, most: the table of tiles, and its most rows
    """
    its = longs(words)
    step = its[shapes.ENTRY] * inputs
    weights = its[shapes.WEIGHTS] + first * step
    # A tile reads its panels side by side, and each has only some 16 KiB: loading a fixed distance ahead would come too
    # late for the beginning of every panel.
    following = weights + count * step
    blocks(
        rows,
        count,
        tiles,
        x,
        x_step,
        weights,
        step,
        sums + first * SUMS,
        sums_step,
        inputs,
        begin,
        its[shapes.ENTRY],
        following,
        following,
        most,
    )


@_called
def take_blocks(team: int) -> None:
    """Computes blocks of the open product until none is left."""
    its = longs(team)
    number = fetch_add(team + NEXT, 1)
    while number < its[team_shapes.BLOCKS]:
        first = number * its[team_shapes.BLOCK_PANELS]
        few_panels(
            its[team_shapes.X],
            its[team_shapes.X_STEP],
            its[team_shapes.ROWS],
            its[team_shapes.INPUTS],
            its[team_shapes.WORDS],
            its[team_shapes.SUMS],
            its[team_shapes.SUMS_STEP],
            its[team_shapes.BEGIN],
            its[team_shapes.TILES],
            its[team_shapes.TILE_ROWS],
            first,
            min(its[team_shapes.BLOCK_PANELS], its[team_shapes.PANELS] - first),
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
    its[team_shapes.X], its[team_shapes.X_STEP] = x, x_step
    its[team_shapes.ROWS], its[team_shapes.INPUTS] = rows, inputs
    its[team_shapes.WORDS], its[team_shapes.BEGIN] = words, begin
    its[team_shapes.SUMS], its[team_shapes.SUMS_STEP] = sums, sums_step
    its[team_shapes.TILES], its[team_shapes.TILE_ROWS] = tiles, most
    its[team_shapes.PANELS], its[team_shapes.BLOCK_PANELS] = panels, width
    its[team_shapes.BLOCKS] = (panels + width - 1) // width
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
