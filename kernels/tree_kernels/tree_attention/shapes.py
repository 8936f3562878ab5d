"""What the compiled attention and its caller agree on: sizes of blocks, and the layout of a call in memory."""

from __future__ import annotations

from enum import IntEnum

from tree_kernels.tree_attention.rows import PAGE

LANES = 8
"""float32 numbers of a vector, on every processor, so that sums have one order on all of them."""
TILE_LINES = 3
"""The most lines of a tile. A line is one head's query of one row."""
BLOCK_ROWS = 16
"""Rows of one text that read its far keys together."""


def whole_vectors(count: int) -> int:
    """A number of float32, rounded up to whole vectors."""
    return -(-count // LANES) * LANES


class AttentionArgument(IntEnum):
    """Places of a call's arguments in an array of int64. Arrays are given by their addresses, steps in bytes."""

    # Arguments that all layers of a step share
    ROWS = 0
    PADDED = 1  # rows of queries and results
    POSITIONS = 2  # [ROWS] int64
    SLOTS = 3  # [ROWS] int64
    NEAR = 4  # [ROWS, COLUMNS] int64
    COLUMNS = 5
    BLOCKS = 6  # [blocks, Block] int64
    BLOCK_COUNT = 7
    PAGES = 8  # int64
    # Arguments of a layer
    QUERY = 9  # [heads, PADDED, KEY_DIM] of KIND
    QUERY_HEAD = 10  # the step from one head to the next
    QUERY_ROW = 11
    KEY = 12  # [KV_HEADS, PADDED, KEY_DIM]
    KEY_HEAD = 13
    KEY_ROW = 14
    VALUE = 15  # [KV_HEADS, PADDED, VALUE_DIM]
    VALUE_HEAD = 16
    VALUE_ROW = 17
    KIND = 18  # the `Precision` of query, key and value
    TARGET = 19  # [PADDED, heads, VALUE_DIM] of TARGET_KIND; written
    TARGET_KIND = 20
    POOL = 21  # [slots, KV_HEADS, WIDTH] of POOL_KIND; written
    POOL_KIND = 22  # F32, or KIND
    POOL_SLOT = 23  # the step from one slot to the next
    POOL_HEAD = 24
    KV_HEADS = 25
    GROUP = 26  # heads of a kv head
    KEY_DIM = 27
    VALUE_DIM = 28
    WIDTH = 29
    WINDOW = 30  # 0: every key is seen
    SINKS = 31  # [heads] float32 in units of log 2, or 0
    SCALE = 32  # the bits of a float32: what queries are multiplied by
    CAP = 33  # the bits of a float32: the largest score, in units of log 2; 0: scores have no cap
    COSINES = 34  # [ROWS, ROTATED] of KIND
    SINES = 35
    ROTATED = 36  # leading numbers of queries and keys that are rotated; 0: none are
    TILES = 37  # addresses of the tiles: scores of 1 to TILE_LINES lines, sums of as many, weights
    SCRATCH = 38  # [threads, SCRATCH_BYTES]
    SCRATCH_BYTES = 39
    NEXT = 40  # the next unit that no thread has taken: a block and a kv head
    WRITERS = 41  # number of threads that have come to write keys and values; the first one writes them


class Block(IntEnum):
    """Places of a block's numbers: rows [START, STOP), and the pages of their text."""

    START = 0
    STOP = 1
    PAGES = 2  # the place of the first in the call's PAGES
    COUNT = 3
    FIRST = 4  # the first page's index in the text


def scratch_floats(lines: int, key_dim: int, value_dim: int, columns: int) -> int:
    """float32 numbers of scratch memory that a thread needs for a block: queries, sums, weights and states of its
    lines, offsets of keys, keys or values that are widened, and a row's cosines and sines."""
    keys, key, value = max(columns, PAGE), whole_vectors(key_dim), whole_vectors(value_dim)
    of_lines = lines * (key + value + keys + 2)
    return of_lines + 2 * (columns + PAGE + 2 * keys) + keys * max(key, value) + 2 * key


def scores_symbol(lines: int) -> str:
    """Name of the tile that computes scores of `lines` lines."""
    return f"dendro_scores_{lines}"


def sums_symbol(lines: int) -> str:
    """Name of the tile that adds weighted values of `lines` lines."""
    return f"dendro_sums_{lines}"


WEIGHTS_SYMBOL = "dendro_weights"
