"""Rows of noise, of all tokens or of some, and those that a request keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tree_kernels.noise.cpu import uniforms
from tree_kernels.noise.reference import Counters, check, gumbel_of_uniforms

TILE_BLOCKS = 8192
"""Blocks computed at a time: 256 KiB of numbers, which stay in the cache."""


def gumbel_noise(
    seed: int, positions: Sequence[int], vocabulary: int, sample_index: int = 0, stream: int = 0, row: int = 0
) -> torch.Tensor:
    """Noise of every token at each position: [len(positions), vocabulary] float32, in the order of `positions`."""
    check(seed, vocabulary, sample_index, stream, row)
    counters = Counters(seed, positions, sample_index, stream, row)
    blocks = np.arange(-(-vocabulary // 4), dtype=np.uint64)
    noise = np.empty((len(positions), 4 * len(blocks)), np.float32)
    for tile in _tiles(len(blocks), len(positions)):
        noise[:, 4 * tile.start : 4 * tile.stop] = gumbel_of_uniforms(uniforms(counters, blocks[tile]))
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
        check(seed, self.largest + 1, sample_index, stream=0, row=0)
        counters = Counters(seed, positions, sample_index, stream=0, row=0)
        noise = np.empty((len(positions), len(self._words)), np.float32)
        for tile in _tiles(len(self._blocks), len(positions)):
            first, last = np.searchsorted(self._words, (4 * tile.start, 4 * tile.stop))
            found = uniforms(counters, self._blocks[tile])[:, self._words[first:last] - 4 * tile.start]
            noise[:, first:last] = gumbel_of_uniforms(found)
        return torch.from_numpy(noise)


def _tiles(blocks: int, positions: int) -> Iterator[slice]:
    """Slices of `blocks` blocks of four tokens, so small that their numbers for all positions stay in the cache."""
    size = max(1, TILE_BLOCKS // max(1, positions))
    for start in range(0, blocks, size):
        yield slice(start, min(start + size, blocks))


class NoiseRows:
    """The noise rows of one request: each is computed once and kept until its position is committed.

    `prepare` computes rows ahead, in time that would be spent waiting. Returned rows must not be written to.
    """

    def __init__(self, seed: int, vocabulary: int, sample_index: int = 0, tokens: NoiseTokens | None = None) -> None:
        """tokens: of a row, `vocabulary` in number; None: the first ones"""
        check(seed, vocabulary, sample_index, stream=0, row=0)
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
