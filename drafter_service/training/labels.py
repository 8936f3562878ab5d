"""Labels of a teacher: log-probabilities of the likeliest next tokens, along streams of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter_service.training.losses import TeacherRows
from drafter_service.training.rows import ALONE, Share
from drafter_service.training.saving import replacing


@dataclass(frozen=True, slots=True)
class Chunk:
    """Concatenated texts with the teacher's log-probabilities of the token after each token."""

    tokens: np.ndarray  # [tokens]
    ids: np.ndarray  # [tokens, K]
    log_probs: np.ndarray  # [tokens, K] float16; minus infinity after a token without labels


ARRAYS = ("tokens", "ids", "log_probs")


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Join the texts of several chunks in one."""
    return Chunk(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ARRAYS))


class TeacherFolder:
    """A folder of chunks with the teacher's outputs: folders `00000` and so on, each whole or absent.

    A chunk has the arrays of `Chunk`; ids are uint16, or uint32 for a large vocabulary. The chunk's `facts.json` says
    whether the teacher generated the text (`own`), how many tokens are labelled, and how many seconds the chunk took,
    which a resumed run counts as spent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._chunks())

    def seconds(self, counted: Callable[[int], bool] = lambda chunk: True) -> float:
        """Seconds that the chunks took. counted: True for the numbers of chunks that count"""
        return float(sum(facts["seconds"] for chunk, facts in self._facts().items() if counted(chunk)))

    def own_share(self) -> float:
        """Share of the chunks that the teacher generated."""
        return float(np.mean([facts["own"] for facts in self._facts().values()]))

    def labelled(self) -> int:
        """Number of labelled tokens."""
        return int(sum(facts["labelled"] for facts in self._facts().values()))

    def has(self, chunk: int) -> bool:
        return self._path(chunk).exists()

    def add(self, chunk: int, labelled: Chunk, own: bool, seconds: float) -> None:
        """Write a chunk. own: True if the teacher generated it   seconds: time that it took. Raises NotSaved on a full
        disk."""
        count = int(np.isfinite(labelled.log_probs[:, 0]).sum())
        with replacing(self._path(chunk)) as partial:
            partial.mkdir()
            for name in ARRAYS:
                np.save(partial / f"{name}.npy", getattr(labelled, name))
            (partial / "facts.json").write_text(json.dumps({"own": own, "labelled": count, "seconds": seconds}))

    def read(self) -> list[Chunk]:
        """Map all chunks from the disk. Raises ValueError if there is none."""
        if not len(self):
            raise ValueError(f"no teacher outputs in {self.folder}")
        return [Chunk(*(np.load(path / f"{name}.npy", mmap_mode="r") for name in ARRAYS)) for path in self._chunks()]

    def _path(self, chunk: int) -> Path:
        return self.folder / f"{chunk:05d}"

    def _chunks(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.isdigit())

    def _facts(self) -> dict[int, dict[str, Any]]:
        """Facts of each chunk, by number."""
        return {int(chunk.name): json.loads((chunk / "facts.json").read_text()) for chunk in self._chunks()}


class LabelledRows:
    """Windows of equal length over a teacher's chunks. Their beginnings and order depend on the seed and the epoch."""

    def __init__(self, chunks: Sequence[Chunk], length: int, apart: int, share: Share = ALONE) -> None:
        """length: tokens of a window   apart: tokens from the start of a window to the start of the next: `length` in a
        stream of texts, `length` + 1 if each text of a chunk is a window. Raises ValueError if no chunk has more than
        `length` tokens."""
        self._chunks = chunks
        self._length = length
        self._apart = apart
        self._share = share
        self._windows = [max(0, (len(chunk.tokens) - length - 1) // apart + 1) for chunk in chunks]
        self._ends = np.cumsum(self._windows)
        if not self._ends[-1]:
            raise ValueError(f"no chunk has more than {length} tokens")
        self._epoch: tuple[int, int] | None = None
        self._order = self._shifts = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Number of windows of an epoch."""
        return int(self._ends[-1])

    def batch(self, step: int, rows: int, seed: int) -> tuple[Tensor, Tensor, TeacherRows]:
        """This process's share of a step's batch: inputs and labels [rows, length] int64, and the teacher's outputs for
        the labels."""
        epoch, place = divmod(step, max(1, len(self) // rows))
        if self._epoch != (seed, epoch):
            self._begin(seed, epoch)
        numbers = np.arange(place * rows, (place + 1) * rows) % len(self)
        own = np.sort(self._order[numbers])[self._share.of(rows)]
        windows = [self._window(int(number)) for number in own]
        tokens, ids, log_probs = (
            torch.from_numpy(np.stack(parts).astype(dtype))
            for parts, dtype in zip(zip(*windows, strict=True), (np.int64, np.int64, np.float16), strict=True)
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), TeacherRows(ids, log_probs)

    def _begin(self, seed: int, epoch: int) -> None:
        rng = np.random.default_rng((seed, epoch))
        self._epoch, self._order = (seed, epoch), rng.permutation(len(self))
        ends = [max(0, windows - 1) * self._apart + self._length + 1 for windows in self._windows]
        both = zip(self._chunks, ends, strict=True)
        self._shifts = rng.integers(0, [max(1, len(chunk.tokens) - end + 1) for chunk, end in both])

    def _window(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = int(np.searchsorted(self._ends, number, side="right"))
        chunk, before = self._chunks[at], int(self._ends[at]) - self._windows[at]
        start = int(self._shifts[at]) + (number - before) * self._apart
        stop = start + self._length
        return chunk.tokens[start : stop + 1], chunk.ids[start:stop], chunk.log_probs[start:stop]
