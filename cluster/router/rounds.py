"""The loop of draft, verification and commit that produces an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from dendro.text import Text, Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm


class Drafter(Protocol):
    """Drafts a tree of an arm's shape by the arm's drafter. Returns the root alone where the arm has none, or the draft
    is late or lost; never raises for that."""

    async def draft(self, text: Text, arm: Arm) -> DraftTree: ...


class Verifier(Protocol):
    """Verifies a tree with the target. The emitted tokens do not depend on the tree."""

    async def verify(self, text: Text, tree: DraftTree) -> Verdict: ...


class Policy(Protocol):
    """Picks an arm for every round. Arithmetic only: no clock, no store."""

    def choose(self) -> Arm: ...
    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None: ...


async def rounds(text: Text, drafter: Drafter, verifier: Verifier, policy: Policy) -> AsyncGenerator[Verdict, None]:
    """Choose an arm, draft, verify, commit and yield the verdict; repeat until a verdict is finished."""
    while True:
        arm = policy.choose()
        tree = await drafter.draft(text, arm)  # the root alone when off, late or lost
        verdict = await verifier.verify(text, tree)
        verdict = text.commit(verdict)  # before the client sees it; cut at a stop string
        policy.learn(arm, tree, verdict)  # tree and verdict carry their costs
        yield verdict
        if verdict.finished:
            return
