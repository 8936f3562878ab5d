"""`processed` for the rows of a tree: a text's tokens are counted once, and each row adds those of its own path."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.warp.processors import Processors

Counts = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


class History:
    """Counts of each token in a text and in its answer. It follows the text as that grows or is cut; a token is read
    once, however many rounds follow."""

    def __init__(self, processors: Processors, vocabulary: int, prompt_length: int) -> None:
        """prompt_length: tokens of the text before the answer"""
        self.processors = processors
        self._prompt_length = prompt_length
        self._ids: list[int] = []
        self._in_text: Counts = np.zeros(vocabulary, np.int32)
        self._in_answer: Counts = np.zeros(vocabulary, np.int32)
        always = set(processors.banned) | {word[0] for word in processors.bad_words if len(word) == 1}
        if processors.allowed:
            always |= set(range(vocabulary)) - set(processors.allowed)
        self._always = torch.tensor(sorted(always), dtype=torch.int64)
        self._biased = torch.tensor([token for token, _ in processors.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in processors.logit_bias], dtype=torch.float32)
        self._words: dict[int, list[tuple[list[int], int]]] = {}  # key: the token before the one that is removed
        for *start, last in processors.bad_words:
            if start:
                self._words.setdefault(start[-1], []).append((start, last))
        self._longest = max((len(word) - 1 for word in processors.bad_words), default=0)

    def __len__(self) -> int:
        return len(self._ids)

    def follow(self, ids: Sequence[int], common: int) -> None:
        """Set the text to `ids`, whose first `common` tokens it had before. Of those, only tokens that were not yet
        counted are read."""
        self._count(self._ids[common:], common, -1)
        del self._ids[common:]
        new = ids[len(self._ids) :]
        self._count(new, len(self._ids), 1)
        self._ids += new

    def _count(self, tokens: Sequence[int], start: int, by: int) -> None:
        """Count tokens at positions from `start` on, or, with -1, no longer."""
        if self.processors.counts and tokens:
            ids = np.array(tokens, np.int64)
            np.add.at(self._in_text, ids, by)
            np.add.at(self._in_answer, ids[max(self._prompt_length - start, 0) :], by)

    def scores(self, logits: Tensor, paths: Sequence[Sequence[int]], structure: Sequence[Flags | None] = ()) -> Tensor:
        """logits [rows, V] -> scores [rows, V] float32, as `processed` has them for the text and each row's path.

        paths: of each row, the tokens of its guesses, the row's own included; empty for the root. A row's result does
        not depend on the others. `logits` is not modified. structure: of each row, [V] whether the answer's structure
        allows a token; None: all are allowed. Empty: there is no structure.
        """
        device = logits.device
        scores = logits.to(torch.float32, copy=True)
        if len(self._biased):
            scores.index_add_(1, self._biased.to(device), self._bias.to(device).expand(len(paths), -1))
        if self.processors.counts:
            counted = [self._on(device, counts) for counts in (self._in_text, self._in_answer)]
            found = [(row, *each) for row, path in enumerate(paths) for each in Counter(path).items()]
            rows, tokens, times = torch.tensor(found, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
            on_path = self._penalised(scores[rows, tokens], *(counts[tokens] + times for counts in counted))
            scores = self._penalised(scores, *counted)
            scores[rows, tokens] = on_path
        # The formulas remove tokens before the last two penalties. A removed token stays so: -inf less a finite number.
        scores.index_fill_(1, self._always.to(device), -math.inf)
        for row, path in enumerate(paths):
            if removed := self._removed(path):
                scores[row, removed] = -math.inf
        for row, allowed in enumerate(structure):
            if allowed is not None:
                scores[row].masked_fill_(~torch.from_numpy(allowed).to(device), -math.inf)
        return scores

    def _penalised(self, scores: Tensor, in_text: Tensor, in_answer: Tensor) -> Tensor:
        """Apply the penalties to scores of any shape. in_text, in_answer: how often a row's text and answer have each
        token, in the same shape"""
        its = self.processors
        repeated = torch.where(scores < 0, scores * its.repetition_penalty, scores / its.repetition_penalty)
        scores = torch.where(in_text > 0, repeated, scores)
        scores = scores - in_answer.float() * its.frequency_penalty
        return scores - (in_answer > 0).float() * its.presence_penalty

    def _removed(self, path: Sequence[int]) -> list[int]:
        """The tokens that are removed for a row's own text."""
        length = len(self._ids) + len(path)
        removed = list(self.processors.ending) if length < self.processors.min_length else []
        if self._words and length:
            before = self._longest
            tail = [*(self._ids[-before:] if before else ()), *path][-before:]
            for start, last in self._words.get(tail[-1], ()):
                if tail[-len(start) :] == start:
                    removed.append(last)
        return removed

    def _on(self, device: torch.device, counts: Counts) -> Tensor:
        return torch.from_numpy(counts).to(device)
