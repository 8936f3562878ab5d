"""Rows of tokens for training, in an order that depends on the seed and the step alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """One process of several that train a model together, and its share of the rows of a step.

    >>> Share(process=1, processes=4).of(8)
    slice(2, 4, None)
    """

    process: int = 0
    processes: int = 1

    def of(self, rows: int) -> slice:
        """The process's part of `rows` rows. Raises ValueError for a number that cannot be shared equally."""
        if rows % self.processes:
            raise ValueError(f"{rows} rows cannot be shared by {self.processes} processes")
        own = rows // self.processes
        return slice(self.process * own, (self.process + 1) * own)


ALONE = Share()


def token_dtype(vocabulary: int) -> type[np.unsignedinteger]:
    """The dtype in which ids of a vocabulary are stored."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


class TokenRows:
    """Fixed-length windows of one long token stream.

    Each epoch cuts the stream at another offset and visits the windows in another order; step `s` always gets the same
    rows, so a resumed run sees the same rows as an uninterrupted one.
    """

    def __init__(self, tokens: np.ndarray, rows: int, length: int, seed: int, share: Share = ALONE) -> None:
        self.tokens = tokens  # [tokens] of token_dtype
        self.rows = rows
        self.length = length
        self.seed = seed
        self.own = share.of(rows)
        self.windows = (len(tokens) - 1) // length - 1
        if self.windows < rows:
            raise ValueError(f"{len(tokens)} tokens are too few for {rows} rows of {length}")
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._shift = 0

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This process's share of a step's inputs and labels: two [rows, length] int64 tensors, the second one token
        ahead."""
        steps_per_epoch = self.windows // self.rows
        epoch, place = divmod(step, steps_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._epoch, self._order = epoch, rng.permutation(self.windows)
            self._shift = int(rng.integers(self.length))
        chosen = self._order[place * self.rows : (place + 1) * self.rows][self.own]
        starts = chosen * self.length + self._shift
        window = np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)
        pieces = torch.from_numpy(window)
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
