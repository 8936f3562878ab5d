"""Drafters that are served, and texts opened at them, as a router opens them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dendro.calls import CloseCall, Closed, DraftCall, OpenCall, Opened, RequestParameters, TextUpdate, new_opening
from dendro.shapes import TreeShape
from dendro.state import NoStates, StateStore
from dendro.structure import Structure
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree

from drafter_service.engine import DrafterEngine, node_slots, text_slots
from drafter_service.options import DrafterOptions

SESSIONS = 9
"""Texts that a drafter has room for, unless a test says otherwise."""


@asynccontextmanager
async def drafter_of(
    path: Path,
    states: StateStore | None = None,
    token_bytes: Callable[[], Mapping[int, bytes]] | None = None,
    closed: bool = True,
    **options: Any,
) -> AsyncIterator[DrafterEngine]:
    """A running drafter with small chunks, so that prompts take several forwards. closed: the test closes its texts, so
    all slots must be free at the end"""
    given = DrafterOptions(name="tiny", **{"prefill_chunk": 8, "max_sessions": SESSIONS} | options)
    engine = DrafterEngine.load(path, given, states=states or NoStates(), token_bytes=token_bytes)
    await engine.start()
    try:
        yield engine
        if closed:
            assert engine.sessions == 0
            assert engine.free_slots == text_slots(given.max_sessions) - 1
            assert engine.free_nodes == node_slots(given.max_rows, 16) - 1
    finally:
        await engine.stop()


@dataclass
class OpenedText:
    """One opening of a text at a drafter. A test changes `ids` between its drafts."""

    engine: DrafterEngine
    ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    vocabulary: int = 0  # of the target; 0: of the drafter
    structure: Structure | None = None
    prompt_length: int = 0
    ignore_end: bool = False
    opening: bytes = field(default_factory=new_opening)
    held: int = 0

    def update(self) -> TextUpdate:
        start, self.held = min(self.held, len(self.ids)), len(self.ids)
        return TextUpdate.of(self.opening, Tokens(self.ids), start)

    async def open(self) -> Opened:
        limits = Limits(10_000, self.ignore_end)
        given = RequestParameters(
            self.sampling, limits, "", (), self.vocabulary, prompt_length=self.prompt_length, structure=self.structure
        )
        return await self.engine.open(OpenCall(self.update(), given))

    async def draft(self, shape: TreeShape, **options: Any) -> DraftTree:
        return await self.engine.draft(DraftCall(self.update(), shape, **options))

    async def close(self) -> Closed:
        return await self.engine.close(CloseCall(self.update()))
