"""Texts with random trees, and the plans of their forwards."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drafter_service.plan import EMPTY_TEXT, Chains, Level, Nodes


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@dataclass
class TextCase:
    """A text and its tree."""

    slot: int
    ids: list[int]
    covers: int = 0
    tokens: list[int] = field(default_factory=list)  # of the tree's nodes
    slots: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=list)  # the newest nodes

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        return [*(self.path(self.parents[node]) if self.parents[node] >= 0 else []), node]

    def text(self, node: int) -> list[int]:
        return self.ids[: self.covers] + [self.tokens[each] for each in self.path(node)]

    def grow(self, rng: np.random.Generator, free: list[int], vocabulary: int) -> None:
        """Add the root, or one to three children of nodes of the newest level, in any slots."""
        above = [int(node) for node in rng.choice(self.level, rng.integers(1, 4))] if self.slots else [-1]
        self.level = list(range(len(self.slots), len(self.slots) + len(above)))
        self.parents += above
        self.tokens += rng.integers(0, vocabulary, len(above)).tolist() if self.level[0] else [self.ids[self.covers]]
        self.slots += [free.pop(int(rng.integers(0, len(free)))) for _ in above]


def level_of(cases: list[TextCase]) -> Level:
    rows = [(case, node) for case in cases for node in case.level]
    return Level(
        tokens=ints(*(case.tokens[node] for case, node in rows)),
        counts=[len(case.level) for case in cases],
        texts=[case.slot for case in cases],
        starts=[case.covers for case in cases],
        depths=[len(case.path(case.level[0])) - 1 for case in cases],
        trees=[Nodes(case.slots[:], case.parents[:]) for case in cases],
    )


def chains_of(cases: list[TextCase], lengths: list[int], roots: list[int]) -> Chains:
    tokens = np.zeros((len(cases), max(lengths)), np.int64)
    for row, (case, length) in enumerate(zip(cases, lengths, strict=True)):
        tokens[row, :length] = case.ids[case.covers : case.covers + length]
    source = ints(*(case.slot if case.covers else EMPTY_TEXT for case in cases))
    target = ints(*(case.slot for case in cases))
    return Chains(tokens, ints(*lengths), ints(*(case.covers for case in cases)), source, target, ints(*roots))
