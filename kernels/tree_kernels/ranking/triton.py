"""The best guesses of a drafter's rows on an accelerator, with the noise of their tokens: two launches, one download.

A score and its token are one number, whose order is that of (score descending, token ascending). The first kernel keeps
the best numbers of each part of a row's vocabulary, the second the best of these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.noise.triton import NOISE_TAG, noise_of_word

PART = 512
"""Tokens of a program of the first kernel, which is one warp."""
EMBEDDED = 512
"""Numbers of an embedded token that a program copies."""


class RowOrders(NamedTuple):
    """The order of each row's tokens: by logits / temperature plus noise, or by logits alone. int64, [rows] each."""

    temperature: Tensor  # the bits of a float32; 0: by logits
    seed: Tensor
    position: Tensor
    sample_index: Tensor
    vocabulary: Tensor  # only tokens below it are ranked


def rank_rows(logits: Tensor, orders: RowOrders, width: int, ids: Tensor | None, made: Tensor | None = None) -> Tensor:
    """Rank the tokens of logits [rows, V] of any row stride.

    ids [V] int64: the tokens whose noise the columns get; None: 0, 1, ...
    made [rows, width] int64: the result's memory
    Returns [rows, width] int64, best first, which `ranked_of` reads. A width above a row's vocabulary gives fewer.
    """
    rows, count = logits.shape
    assert logits.stride(1) == 1 and 1 <= width <= PART
    parts = triton.cdiv(count, PART)
    some = torch.empty(rows, parts, width, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, width, dtype=torch.int64, device=logits.device) if made is None else made
    tokens = some if ids is None else ids  # not read without
    _best_of_parts[(rows, parts)](
        logits,
        tokens,
        *orders,
        some,
        logits.stride(0),
        V=count,
        WIDTH=width,
        PART=PART,
        MAPPED=ids is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
    _best[(rows,)](
        some, best, COUNT=parts * width, BLOCK=triton.next_power_of_2(parts * width), WIDTH=width, num_warps=4
    )
    return best


def embed_guesses(best: Tensor, places: Tensor, embedding: Tensor, foreign: int, kind: torch.dtype) -> Tensor:
    """Rows of the embedding [V, d] of guesses, in this type, without a download of the guesses.

    best: result of `rank_rows`   places [rows] int64: which of its numbers each row's guess is
    foreign: the token that a guess from V on is read as
    """
    return _embedded(best, places, embedding, foreign, kind, True)


def embed_tokens(tokens: Tensor, embedding: Tensor, kind: torch.dtype) -> Tensor:
    """Rows of the embedding [V, d] of tokens [rows] int64, in this type."""
    return _embedded(tokens, tokens, embedding, 0, kind, False)


def _embedded(
    best: Tensor, places: Tensor, embedding: Tensor, foreign: int, kind: torch.dtype, guessed: bool
) -> Tensor:
    rows, (vocabulary, count) = len(places), embedding.shape
    assert best.is_contiguous() and places.is_contiguous() and embedding.stride(1) == 1
    hidden = torch.empty(rows, count, dtype=kind, device=embedding.device)
    _embed[(rows, triton.cdiv(count, EMBEDDED))](
        best,
        places,
        embedding,
        hidden,
        embedding.stride(0),
        V=vocabulary,
        COUNT=count,
        FOREIGN=foreign,
        GUESSED=guessed,
        BLOCK=EMBEDDED,
        num_warps=4,
    )
    return hidden


def ranked_of(best: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The tokens and their scores, of numbers of `rank_rows`."""
    bits = (best >> 32).astype(np.int32)
    return ~best & 0xFFFFFFFF, (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(np.float32)


LEAST: tl.constexpr = tl.constexpr(-(2**63))


@triton.jit
def _best_of_parts(
    logits,  # [rows, V], a row logits_row numbers after the one before it
    ids,  # [V]
    temperature,  # [rows]; the next four parameters, too
    seed,
    position,
    sample_index,
    vocabulary,
    some,  # [rows, parts, WIDTH]; written here
    logits_row,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    MAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    inside = token < tl.minimum(tl.load(vocabulary + row), V)
    score = tl.load(logits + row * logits_row + token, mask=inside, other=0.0).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.int32).to(tl.float32, bitcast=True)
    if heat > 0:
        known = token.to(tl.int64)
        if MAPPED:
            known = tl.load(ids + token, mask=inside, other=0)
        zero = tl.zeros([PART], tl.uint32)
        word0, word1, word2, word3 = tl.philox(
            tl.load(seed + row).to(tl.uint64, bitcast=True),
            (known // 4).to(tl.uint32),
            zero + tl.load(position + row).to(tl.uint32),
            zero + tl.load(sample_index + row).to(tl.uint32),
            zero + NOISE_TAG,
        )
        place = known % 4
        word = tl.where(place < 2, tl.where(place == 0, word0, word1), tl.where(place == 2, word2, word3))
        score = tl.div_rn(score, heat) + noise_of_word(word)
    score = tl.where(score == score, score + 0.0, float("nan"))  # no negative zero, which is below zero as bits
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == score, bits, 0x7FC00000)  # a number above infinity, so that the row is noticed
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(inside, (order << 32) | (0xFFFFFFFF - token.to(tl.int64)), LEAST)
    at = some + (row * tl.num_programs(1) + part) * WIDTH
    for place in range(WIDTH):
        best = tl.max(key, 0)
        tl.store(at + place, best)
        key = tl.where(key == best, LEAST, key)


@triton.jit
def _best(
    some,  # [rows, COUNT]
    best,  # [rows, WIDTH]; written here
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    key = tl.load(some + row * COUNT + within, mask=within < COUNT, other=LEAST)
    for place in range(WIDTH):
        found = tl.max(key, 0)
        tl.store(best + row * WIDTH + place, found)
        key = tl.where(key == found, LEAST, key)


@triton.jit
def _embed(
    best,  # numbers of rank_rows
    places,  # [rows] of numbers of rank_rows; without GUESSED, tokens
    embedding,  # [V, COUNT], a row embedding_row numbers after the one before it
    hidden,  # [rows, COUNT]; written here
    embedding_row,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    FOREIGN: tl.constexpr,
    GUESSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(places + row)
    if GUESSED:
        token = 0xFFFFFFFF - (tl.load(best + token) & 0xFFFFFFFF)
        token = tl.where(token < V, token, FOREIGN)
    found = tl.load(embedding + token * embedding_row + i, mask=i < COUNT, other=0.0)
    tl.store(hidden + row * COUNT + i, found.to(hidden.dtype.element_ty), mask=i < COUNT)
