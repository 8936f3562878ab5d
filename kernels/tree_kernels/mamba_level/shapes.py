"""The arguments of the kernels: which word of which table holds what. Words are int64 numbers,
addresses among them, except for a few float32 numbers, each in the lower half of its word."""

from __future__ import annotations

from tree_kernels.processor import lanes

SCAN_TOKENS = 8 if lanes() == 16 else 4
"""Most tokens of a tile of Mamba-2's recurrence: each has three vectors in registers."""


def scan_symbol(tokens: int) -> str:
    """The name of the tile that takes a state through `tokens` tokens."""
    return f"dendro_scan_{tokens}"


PARENT, TEXT = range(2)
"""A node's words: its parent's slot, 0 for a root, and its text's slot."""
NODE_WORDS = 2

SOURCE, TARGET, FIRST, KEPT, COUNT, END = range(6)
"""A sequence's words: the slot that it starts from, the slot that holds the memory after its first KEPT rows, its first
row, KEPT, its number of rows, and the slot that holds the memory after all rows, -1 for none."""
SEQUENCE_WORDS = 6

NEW_WORDS = 3
"""A new node's words: its slot, its parent's slot, 0 for a root, and its text's slot."""

WEIGHTS, ENTRY, TILES, TILE_ROWS, PANELS, BIAS, DOTS, DOT_ROWS = range(8)
"""A product's words: address of packed panels, bytes of an input's weights in a panel, address of the tiles' table, the
most rows of a tile, number of panels, address of the bias, float32 padded to whole panels, or 0. DOTS, DOT_ROWS: as
TILES and TILE_ROWS, of dot products of bfloat16; 0 without these."""
PRODUCT_WORDS = 8

(
    ROWS,
    TOKENS,  # [rows]
    EMBEDDING,  # [known, d] of EMBEDDING_KIND
    EMBEDDING_KIND,
    KNOWN,
    LAYERS,
    LAYER_TABLE,  # [layers, LAYER_WORDS]
    SEQUENCES,
    SEQUENCE_TABLE,  # [sequences, SEQUENCE_WORDS]
    NEW_NODES,  # number of the last rows, which are new nodes of a Mamba-2
    NEW_TABLE,  # [new nodes, NEW_WORDS]
    NODE_TABLE,  # [node slots, NODE_WORDS]
    WIDTH,  # d
    CHANNELS,  # I
    HEADS,  # H
    GROUPS,  # G
    SIZE,  # N
    TAPS,  # W
    RANK,  # R of Mamba-1's dt
    HIDDEN,  # [rows, HIDDEN_STEP / 4] float32; the result
    HIDDEN_STEP,  # bytes of a row
    NORMED,  # [rows, d] scratch
    INNER,  # [rows, INNER_STEP / 4] scratch: the results of in_proj
    INNER_STEP,
    MIXED,  # [rows, MIXED_STEP / 4] scratch: the convolution's results
    MIXED_STEP,
    PICKED,  # [rows, PICKED_STEP / 4] scratch: Mamba-1's dt, B and C before dt_proj
    PICKED_STEP,
    STEPS,  # [rows, STEPS_STEP / 4] scratch: dt
    STEPS_STEP,
    READ,  # [rows, I] scratch: the recurrence's results
    SPARE,  # [2 SCAN_TOKENS, channels] scratch
    ROUNDED_KIND,  # the kind of numbers to which the convolution's inputs are rounded
    STORED_KIND,  # the kind of numbers that texts' last inputs are stored as
    FINAL_NORM,  # [d] float32
    HEAD,  # a product
    LOGITS,  # [rows, LOGITS_STEP / 4] float32; the result
    LOGITS_STEP,
    FOLDS,
    FOLD_TABLE,  # [folds, FOLD_WORDS]
    PATHS,  # [nodes of all paths] node slots, each path from its root on
    EPS,  # epsilon of the layers' norms and the final one, a float32 as are the next three
    GATE_EPS,  # epsilon of Mamba-2's gated norms
    LEAST_DT,  # limits of Mamba-2's dt
    MOST_DT,
    SCANS,  # Mamba-2's tiles of the recurrence, for one token, two, ...
    ROUNDS,  # 1: inputs of layers' products are rounded to bfloat16 and go through dot products; 0: they are float32
    TEAM,  # address of the memory of the threads that share the call's products (`team_shapes`); 0: one thread runs it
) = range(48)
CALL_WORDS = 48

BEGIN, END_TEXT, PATH, LENGTH = range(4)
"""A fold's words: text slots that it starts from and ends in, its path's first place in PATHS, its number of nodes."""
FOLD_WORDS = 4

(
    NORM,  # [d] float32
    IN_PROJ,  # a product
    CONV_WEIGHT,  # [W, channels] float32
    CONV_BIAS,  # [channels]
    PICK,  # Mamba-1's x_proj, a product
    DT_PROJ,  # Mamba-1's, a product
    DT_BIAS,  # Mamba-2's [H]
    A,  # [H], or Mamba-1's [N, I]
    D,  # [H], or Mamba-1's [I]
    GATE_NORM,  # Mamba-2's [I]
    OUT_PROJ,  # a product
    STATES,  # [texts, N, I] float32
    TAILS,  # [texts, W - 1, channels]
    NODE_INPUTS,  # [nodes, channels] before the convolution
    NODE_X,  # [nodes, I]
    NODE_B,  # [nodes, G, N]
    NODE_DT,  # [nodes, H]
) = range(17)
LAYER_WORDS = 17
