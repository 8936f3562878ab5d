"""Engines of tiny checkpoints, as most tests load and run them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from dendro.engine import started
from dendro.state import StateStore
from dendro.tree import DraftTree

from tests.support import tiny_mamba, tiny_models
from tests.support.exactness import bitwise_or_skip
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

BOUNDS = {"max_length": 512, "max_sessions": 8, "prefill_chunk": 128, "max_depth": 8}


TINY_TARGETS = ("llama", "mamba2")
"""A target with attention, and one whose layers all have states."""


def make_target(kind: str, folder: Path) -> Path:
    """Write the checkpoint of one of TINY_TARGETS. Returns the folder."""
    if kind == "llama":
        tiny_models.make_checkpoint(folder)
    else:
        tiny_mamba.make_checkpoint(folder, "mamba2")
    return folder


def engine_of(folder: Path, dtype=torch.float32, states: StateStore | None = None, **options) -> VerifierEngine:
    """A verifier's engine of a checkpoint, with BOUNDS where `options` has no others."""
    given = VerifierOptions(name="tiny", dtype=dtype, **BOUNDS | options)
    return VerifierEngine.load(folder, given, states=states)


def bitwise_engine_of(folder: Path, **options) -> VerifierEngine:
    """An engine for a test that compares bits; the test is skipped where this processor cannot keep them."""
    engine = engine_of(folder, **options)
    bitwise_or_skip(engine)
    return engine


def tree_logits(engine: VerifierEngine) -> list[torch.Tensor]:
    """Logits after a short text: of a root alone, and of a tree of five rows."""
    trees = DraftTree.of([7], [-1]), DraftTree.of([7, 8, 9, 10, 11], [-1, 0, 0, 1, 3])
    return [engine.logits_of([5, 6, 7], tree).as_subclass(torch.Tensor) for tree in trees]


@asynccontextmanager
async def running(engine: VerifierEngine) -> AsyncIterator[VerifierEngine]:
    """A loaded engine that answers in this event loop, once more if one of it was stopped. At the end all its pages
    must be free."""
    async with started(VerifierEngine(engine.scheduler, engine.runner, await engine.hello())) as again:
        yield again
    assert again.scheduler.memory.held == 0
    assert not again.scheduler.sessions
