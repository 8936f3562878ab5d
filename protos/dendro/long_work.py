"""Work on long texts, kept off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG = 8192
"""Tokens of a text from which on work goes to a thread. On fewer it takes less than a millisecond, a hop to a thread
some tenths of one."""
PART = 8192
"""Tokens that one call of C code handles: such a call keeps other threads, and so the loop, from running."""

Result = TypeVar("Result")


async def off_loop(tokens: int, work: Callable[[], Result]) -> Result:
    """The result of `work`, which runs in a thread if it is about LONG tokens or more."""
    return work() if tokens < LONG else await asyncio.to_thread(work)
