"""Gumbel noise, a function of (seed, position, sample index, stream, row, token id), in NumPy.

    key      (seed's low word, seed's high word)
    counter  (token // 4, position, sample index, row << 16 | version << 8 | stream)
    word     number token % 4 of Philox4x32-10(counter, key)
    noise    -log(-log((word + 0.5) * 2**-32)), in float64, rounded to float32 at the end

`position` is the absolute position, over the session, of the token *being drawn*. Stream 0, row 0 is the noise that
target and drafter share; the sampled modes use the other streams with the rows of a tree (`sampled_walk`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NOISE_VERSION = 1

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_WORD = np.uint64(0xFFFF_FFFF)
WORD_BITS = np.uint64(32)
Words = npt.NDArray[np.uint32]
Wide = npt.NDArray[np.uint64]  # 32-bit words, with room for their products
Uniforms = npt.NDArray[np.float64]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 of Salmon et al. 2011, as in Random123. counter [n, 4] uint32, returns [n, 4] uint32.

    NumPy's `Philox` is Philox4x64, a different generator.
    """
    if counter.ndim != 2 or counter.shape[1] != 4 or counter.dtype != np.uint32:
        raise ValueError(f"counter: must be [n, 4] uint32, got {list(counter.shape)} {counter.dtype}")
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    return np.stack(_ten_rounds(c0, c1, c2, c3, key), axis=1).astype(np.uint32)


def _ten_rounds(c0: Wide, c1: Wide, c2: Wide, c3: Wide, key: tuple[int, int]) -> tuple[Wide, Wide, Wide, Wide]:
    """The counter's four words after ten rounds. The arguments may have shapes that broadcast: the first two rounds
    then compute words that are the same for all positions, or for all tokens, only once.

    c1 and c3 have undefined bits above 32 inside the loop: they are only xored into a word that is masked next.
    """
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product1 >> WORD_BITS) ^ c1 ^ np.uint64(k0)) & LOW_WORD
        c2 = ((product0 >> WORD_BITS) ^ c3 ^ np.uint64(k1)) & LOW_WORD
        c1, c3 = product1, product0
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFF_FFFF, (k1 + KEY_STEPS[1]) & 0xFFFF_FFFF
    return c0, c1 & LOW_WORD, c2, c3 & LOW_WORD


def gumbel_of_words(words: Words) -> npt.NDArray[np.float32]:
    """The noise of 32-bit words, any shape. In float32 the word 2**32 - 1 would give infinity."""
    return gumbel_of_uniforms(_uniforms_of(words))


def _uniforms_of(words: Words | Wide) -> Uniforms:
    """(word + 0.5) * 2**-32, which is exact."""
    u = words.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    return u


def gumbel_of_uniforms(u: Uniforms) -> npt.NDArray[np.float32]:
    """The noise of these numbers, any shape. Overwrites them."""
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    return u.astype(np.float32)


def uniform_words(
    seed: int, position: int, tokens: npt.NDArray[np.int64], sample_index: int = 0, stream: int = 0, row: int = 0
) -> npt.NDArray[np.uint32]:
    """The words of these tokens alone at one position, [tokens]. (word + 0.5) * 2**-32 is uniform in (0, 1)."""
    check(seed, int(tokens.max()) + 1, sample_index, stream, row)
    counter = np.empty((len(tokens), 4), np.uint32)
    counter[:, 0] = tokens // 4
    counter[:, 1:] = position, sample_index, row << 16 | NOISE_VERSION << 8 | stream
    words = philox4x32(counter, (seed & 0xFFFF_FFFF, seed >> 32))
    return np.take_along_axis(words, (tokens % 4)[:, None], 1)[:, 0]


class Counters:
    """What the words of a request's positions have in common."""

    def __init__(self, seed: int, positions: Sequence[int], sample_index: int, stream: int, row: int) -> None:
        """Raises ValueError, naming the argument."""
        check(seed, 1, sample_index, stream, row)
        if any(not 0 <= position < 2**32 for position in positions):
            raise ValueError(f"positions: must be 0 to 2**32 - 1, got {list(positions)}")
        self.key = (seed & 0xFFFF_FFFF, seed >> 32)
        self.positions = positions
        self.sample_index = sample_index
        self.tag = row << 16 | NOISE_VERSION << 8 | stream


def uniforms(counters: Counters, blocks: Wide) -> Uniforms:
    """The numbers of these blocks of four tokens, uniform in (0, 1): [positions, 4 * blocks]."""
    position = np.asarray(counters.positions, np.uint64).reshape(-1, 1)
    sample, tag = (np.full((1, 1), each, np.uint64) for each in (counters.sample_index, counters.tag))
    found = np.empty((len(position), len(blocks), 4))
    for lane, words in enumerate(_ten_rounds(blocks.reshape(1, -1), position, sample, tag, counters.key)):
        found[:, :, lane] = _uniforms_of(words)
    return found.reshape(len(position), -1)


def check(seed: int, vocabulary: int, sample_index: int, stream: int, row: int) -> None:
    """Raise ValueError, naming the argument, for one that no noise has."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: must be 0 to 2**64 - 1, got {seed}")
    if vocabulary < 1:
        raise ValueError(f"vocabulary: must be at least 1, got {vocabulary}")
    if not 0 <= sample_index < 2**32:
        raise ValueError(f"sample_index: must be 0 to 2**32 - 1, got {sample_index}")
    if not 0 <= stream < 2**8:
        raise ValueError(f"stream: must be 0 to 255, got {stream}")
    if not 0 <= row < 2**16:
        raise ValueError(f"row: must be 0 to 65535, got {row}")
