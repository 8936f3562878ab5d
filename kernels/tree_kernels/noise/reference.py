"""Gumbel noise, a function of (seed, position, sample index, stream, row, token id). The reference: NumPy on a CPU.

    key      (seed's low word, seed's high word)
    counter  (token // 4, position, sample index, row << 16 | version << 8 | stream)
    word     number token % 4 of Philox4x32-10(counter, key)
    noise    -log(-log((word + 0.5) * 2**-32)), in float64, rounded to float32 at the end

`position` is the absolute position, over the session, of the token *being drawn*. Stream 0, row 0 is the noise that
target and drafter share; the sampled modes use the other streams with the rows of a tree (`sampled_walk`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

NOISE_VERSION = 1

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_WORD = np.uint64(0xFFFF_FFFF)
WORD_BITS = np.uint64(32)
TILE_BLOCKS = 8192
"""Counter blocks computed at a time: temporaries of 64 KiB, which stay in the cache for a row of 128k tokens."""

Words = npt.NDArray[np.uint32]
Wide = npt.NDArray[np.uint64]  # 32-bit words, with room for their products


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


def gumbel_of_words(words: npt.NDArray[np.uint32] | npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """The noise of 32-bit words, any shape. In float32 the word 2**32 - 1 would give infinity."""
    u = words.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    return u.astype(np.float32)


def uniform_words(
    seed: int, position: int, tokens: npt.NDArray[np.int64], sample_index: int = 0, stream: int = 0, row: int = 0
) -> npt.NDArray[np.uint32]:
    """The words of these tokens alone at one position, [tokens]. (word + 0.5) * 2**-32 is uniform in (0, 1)."""
    _check(seed, int(tokens.max()) + 1, sample_index, stream, row)
    counter = np.empty((len(tokens), 4), np.uint32)
    counter[:, 0] = tokens // 4
    counter[:, 1:] = position, sample_index, row << 16 | NOISE_VERSION << 8 | stream
    words = philox4x32(counter, (seed & 0xFFFF_FFFF, seed >> 32))
    return np.take_along_axis(words, (tokens % 4)[:, None], 1)[:, 0]


def gumbel_noise(
    seed: int, positions: Sequence[int], vocabulary: int, sample_index: int = 0, stream: int = 0, row: int = 0
) -> torch.Tensor:
    """Noise of every token at each position: [len(positions), vocabulary] float32, in the order of `positions`."""
    _check(seed, vocabulary, sample_index, stream, row)
    words_of = _Counters(seed, positions, sample_index, stream, row)
    blocks = np.arange(-(-vocabulary // 4), dtype=np.uint64)
    noise = np.empty((len(positions), 4 * len(blocks)), np.float32)
    for tile in words_of.tiles(len(blocks)):
        noise[:, 4 * tile.start : 4 * tile.stop] = gumbel_of_words(words_of.blocks(blocks[tile]))
    return torch.from_numpy(noise)[:, :vocabulary]


class NoiseTokens:
    """Some tokens, whose noise is computed without that of all others."""

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        """ids: ascending, each once, at least one"""
        blocks, block_of = np.unique(ids // 4, return_inverse=True)
        self.largest = int(ids[-1])
        self._blocks = blocks.astype(np.uint64)
        self._words = 4 * block_of.reshape(-1) + ids % 4  # [tokens] ascending: places among the words of all blocks

    def noise(self, seed: int, positions: Sequence[int], sample_index: int = 0) -> torch.Tensor:
        """Columns of `gumbel_noise` for these tokens only: [len(positions), tokens]."""
        _check(seed, self.largest + 1, sample_index, stream=0, row=0)
        words_of = _Counters(seed, positions, sample_index, stream=0, row=0)
        noise = np.empty((len(positions), len(self._words)), np.float32)
        for tile in words_of.tiles(len(self._blocks)):
            first, last = np.searchsorted(self._words, (4 * tile.start, 4 * tile.stop))
            words = words_of.blocks(self._blocks[tile])[:, self._words[first:last] - 4 * tile.start]
            noise[:, first:last] = gumbel_of_words(words)
        return torch.from_numpy(noise)


class _Counters:
    """The words of some positions."""

    def __init__(self, seed: int, positions: Sequence[int], sample_index: int, stream: int, row: int) -> None:
        if any(not 0 <= position < 2**32 for position in positions):
            raise ValueError(f"positions: must be 0 to 2**32 - 1, got {list(positions)}")
        self._key = (seed & 0xFFFF_FFFF, seed >> 32)
        self._position = np.asarray(positions, dtype=np.uint64).reshape(-1, 1)  # [positions, 1]
        self._sample = np.full((1, 1), sample_index, np.uint64)
        self._tag = np.full((1, 1), row << 16 | NOISE_VERSION << 8 | stream, np.uint64)

    def tiles(self, blocks: int) -> Iterator[slice]:
        """Parts of so many blocks that stay in the cache."""
        size = max(1, TILE_BLOCKS // max(1, len(self._position)))
        for start in range(0, blocks, size):
            yield slice(start, min(start + size, blocks))

    def blocks(self, blocks: Wide) -> Words:
        """The words of these blocks of four tokens: [positions, 4 * blocks]."""
        words = np.empty((len(self._position), len(blocks), 4), np.uint32)
        given = blocks.reshape(1, -1), self._position, self._sample, self._tag, self._key
        for lane, word in enumerate(_ten_rounds(*given)):
            words[:, :, lane] = word
        return words.reshape(len(self._position), -1)


def _check(seed: int, vocabulary: int, sample_index: int, stream: int, row: int) -> None:
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


class NoiseRows:
    """The noise rows of one request: each is computed once and kept until its position is committed.

    `prepare` computes rows ahead, in time that would be spent waiting. Returned rows must not be written to.
    """

    def __init__(self, seed: int, vocabulary: int, sample_index: int = 0, tokens: NoiseTokens | None = None) -> None:
        """tokens: of a row, `vocabulary` in number; None: the first ones"""
        _check(seed, vocabulary, sample_index, stream=0, row=0)
        self.seed = seed
        self.vocabulary = vocabulary
        self.sample_index = sample_index
        self._tokens = tokens
        self._rows: dict[int, torch.Tensor] = {}  # position -> [vocabulary]

    def __len__(self) -> int:
        return len(self._rows)

    def prepare(self, positions: Iterable[int]) -> None:
        """Fill the cache for positions that are not cached yet, in one call."""
        missing = [position for position in dict.fromkeys(positions) if position not in self._rows]
        if missing:
            if self._tokens is None:
                computed = gumbel_noise(self.seed, missing, self.vocabulary, self.sample_index)
            else:
                computed = self._tokens.noise(self.seed, missing, self.sample_index)
            self._rows.update(zip(missing, computed, strict=True))

    def row(self, position: int) -> torch.Tensor:
        """The row of one position, [vocabulary], without a copy."""
        if position not in self._rows:
            self.prepare([position])
        return self._rows[position]

    def rows(self, positions: Sequence[int]) -> torch.Tensor:
        """Rows of noise of these positions, which may repeat: [len(positions), vocabulary]."""
        self.prepare(positions)
        if not len(positions):
            return torch.empty(0, self.vocabulary)
        return torch.stack([self._rows[position] for position in positions])

    def forget_before(self, position: int) -> None:
        """Drop the rows of all positions below this one: their tokens are committed."""
        self._rows = {kept: row for kept, row in self._rows.items() if kept >= position}
