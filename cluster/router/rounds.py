"""The loop of draft, verification and commit that produces an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from dendro.text import Text, Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm


class Drafter(Protocol):
    """Called once per round, after the policy. Returns a tree of the arm's shape from the arm's drafter; the root alone
    if the arm has no drafter, or the draft is late or lost. Never raises for that."""

    async def draft(self, text: Text, arm: Arm) -> DraftTree: ...


class Verifier(Protocol):
    """Called once per round with its tree. Returns the target's tokens, which do not depend on the tree."""

    async def verify(self, text: Text, tree: DraftTree) -> Verdict: ...


class Policy(Protocol):
    """`choose` is called first in each round and returns its arm; `learn` is called last, with the round's outcome.
    Arithmetic only: no clock, no store."""

    def choose(self) -> Arm: ...
    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None: ...


async def rounds(text: Text, drafter: Drafter, verifier: Verifier, policy: Policy) -> AsyncGenerator[Verdict, None]:
    """Choose an arm, draft, verify, commit and yield the verdict; repeat until a verdict is finished."""
    while True:
        arm = policy.choose()
        tree = await drafter.draft(text, arm)  # the root alone when off, late or lost
        verdict = await verifier.verify(text, tree)
        verdict = text.commit(verdict)  # precedes the client's copy; cut at a stop string
        policy.learn(arm, tree, verdict)  # tree and verdict carry their costs
        yield verdict
        if verdict.finished:
            return
