"""Rounds that wait for their drafter's opening: a tiny target may otherwise end its answer before the drafter's text is
open, and the answer has no tree to test. The fixture `opened_drafters` of tests/conftest.py is a test's way to it."""

from __future__ import annotations

import asyncio

import pytest
from dendro.text import Text
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.peers.drafter import DrafterHandle


def wait_for_openings(patch: pytest.MonkeyPatch) -> None:
    """Let rounds wait for the openings of their drafters, however long these take."""
    draft = DrafterHandle.draft

    async def when_open(self: DrafterHandle, text: Text, arm: Arm) -> DraftTree:
        self.prepare(text)
        if self._opening_task is not None:
            await asyncio.wait({self._opening_task})
        return await draft(self, text, arm)

    patch.setattr(DrafterHandle, "draft", when_open)
