"""Engines of this process, and texts at them: no router and no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from dendro.calls import (
    CloseCall,
    DraftCall,
    DrafterPeer,
    OpenCall,
    RequestParameters,
    TextUpdate,
    VerifierPeer,
    VerifyCall,
    new_opening,
)
from dendro.engine import started
from dendro.shapes import TreeShape
from dendro.text import Limits, Sampling, Tokens, Verdict
from dendro.tree import DraftTree

from cluster.config import TargetConfig
from cluster.engines import verifier_options
from verifier_service.engine import VerifierEngine

DRAFTER_DTYPE = "float32"
"""Type of drafters. In float32 the order of guesses depends on the text alone, so rounds replay exactly; in bfloat16 it
also depends on how the text was split into forwards. On a CPU both cost the same."""


def verifier_of(name: str, target: TargetConfig, max_length: int) -> AbstractAsyncContextManager[VerifierEngine]:
    """A target's engine for one text, on the CPU."""
    options = replace(verifier_options(name, target), max_length=max_length, max_sessions=1, device="cpu")
    return started(VerifierEngine.load(target.checkpoint, options))


class EngineText:
    """One text at engines of this process. Each is called between two growths of the text."""

    def __init__(self, ids: Sequence[int], sampling: Sampling) -> None:
        self.text = Tokens(ids)
        self.held = len(self.text)  # tokens before the last growth, which the engines have
        self._sampling = sampling
        self._opening = new_opening()

    def grow(self, tokens: Sequence[int]) -> None:
        self.held = len(self.text)
        self.text.extend(tokens)

    def update(self) -> TextUpdate:
        """A call's text: the tokens that the engines lack."""
        return TextUpdate.of(self._opening, self.text, self.held)

    def open_call(self, room: int) -> OpenCall:
        """The call that opens this text, which may grow by `room` tokens."""
        limits = Limits(len(self.text) + room, ignore_end=True)
        whole = TextUpdate.of(self._opening, self.text, 0)
        return OpenCall(whole, RequestParameters(self._sampling, limits, "", ()))

    async def open(self, engine: DrafterPeer | VerifierPeer, room: int) -> None:
        await engine.open(self.open_call(room))

    async def draft(self, drafter: DrafterPeer, shape: TreeShape) -> DraftTree:
        return await drafter.draft(DraftCall(self.update(), shape))

    async def verify(self, verifier: VerifierPeer, tree: DraftTree) -> Verdict:
        return await verifier.verify(VerifyCall(self.update(), tree))

    async def close(self, engine: DrafterPeer | VerifierPeer) -> None:
        await engine.close(CloseCall(self.update()))


def star(root: int, rows: int) -> DraftTree:
    """A tree of `rows` rows: all guesses are children of the root."""
    return DraftTree.of([root, *range(rows - 1)], [-1] + [0] * (rows - 1))
