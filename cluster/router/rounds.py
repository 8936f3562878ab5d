"""The loop. Everything else in this project exists to serve it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from dendro.shapes import TreeShape
from dendro.text import Text, Verdict
from dendro.tree import DraftTree


class Drafter(Protocol):
    """Guesses how the text goes on. Answers with the root alone when off, late or lost; never raises for it."""

    async def draft(self, text: Text, shape: TreeShape) -> DraftTree: ...


class Verifier(Protocol):
    """Says what the target makes of a tree. The tokens it emits do not depend on the tree."""

    async def verify(self, text: Text, tree: DraftTree) -> Verdict: ...


class Policy(Protocol):
    """Picks a shape for every round. Arithmetic only: no clock, no store."""

    def choose(self) -> TreeShape: ...
    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None: ...


async def rounds(text: Text, drafter: Drafter, verifier: Verifier, policy: Policy) -> AsyncIterator[Verdict]:
    """Draft a tree, keep what the target agrees with, write it down, hand it on; until the verifier says stop."""
    while True:
        shape = policy.choose()
        tree = await drafter.draft(text, shape)  # the root alone when off, late or lost
        verdict = await verifier.verify(text, tree)
        policy.learn(shape, tree, verdict)  # tree and verdict carry what they cost
        verdict = text.commit(verdict)  # the journal first, ...
        yield verdict  # ... then the client
        if verdict.finished:
            return
