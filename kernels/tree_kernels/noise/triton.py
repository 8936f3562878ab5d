"""The noise on an accelerator. Has the reference's bits if its float64 logarithm rounds as the CPU's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.noise.reference import NOISE_VERSION

BLOCK = 256
"""Counters per program; a counter gives the noise of four tokens."""
NOISE_TAG: tl.constexpr = tl.constexpr(NOISE_VERSION << 8)


def gumbel_rows(seeds: Tensor, positions: Tensor, sample_indices: Tensor, vocabulary: int) -> Tensor:
    """Noise [rows, vocabulary] float32 of stream 0.

    seeds [rows] int64, read as 64 unsigned bits   positions [rows] int64, of the tokens being drawn
    sample_indices [rows] int64
    """
    noise = torch.empty(len(seeds), vocabulary, dtype=torch.float32, device=seeds.device)
    _gumbel[(len(seeds), triton.cdiv(vocabulary, 4 * BLOCK))](
        seeds, positions, sample_indices, noise, vocabulary, BLOCK=BLOCK, enable_fp_fusion=False
    )
    return noise


@triton.jit
def _gumbel(seeds, positions, sample_indices, noise, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    counters = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        tl.load(seeds + row).to(tl.uint64, bitcast=True),
        counters.to(tl.uint32),
        zero + tl.load(positions + row).to(tl.uint32),
        zero + tl.load(sample_indices + row).to(tl.uint32),
        zero + NOISE_TAG,
    )
    at = noise + row * vocabulary
    tl.store(at + 4 * counters, noise_of_word(word0), mask=4 * counters < vocabulary)
    tl.store(at + 4 * counters + 1, noise_of_word(word1), mask=4 * counters + 1 < vocabulary)
    tl.store(at + 4 * counters + 2, noise_of_word(word2), mask=4 * counters + 2 < vocabulary)
    tl.store(at + 4 * counters + 3, noise_of_word(word3), mask=4 * counters + 3 < vocabulary)


@triton.jit
def noise_of_word(word):
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return (-tl.log(-tl.log(u))).to(tl.float32)
