"""Saves an engine's states in the store under names derived from their texts, and finds them when a text is opened.

For drafters and for verifiers of state-space targets. A state with any fault counts as missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from dendro.calls import OpenCall
from dendro.failures import described
from dendro.state import StateHeader, StateStore, most_blob_bytes, pack_state, unpack_state
from dendro.tasks import off_loop
from dendro.text import Tokens, state_name

log = logging.getLogger("dendro.states")

LOOKUPS = 64
"""The most names that are looked up when a text is opened, the longest text first. Each lookup is a round trip."""

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(slots=True)
class ShelfCounters:
    """Counters since the start."""

    states_restored: int = 0
    states_missed: int = 0  # openings for which no valid state was found
    states_refused: int = 0  # blobs that were not the expected state
    states_saved: int = 0


class Shelf:
    """The states of one model in one layout."""

    def __init__(
        self,
        store: StateStore,
        fingerprint: str,
        tokenizer: str,
        layout: str,
        check: Callable[[Arrays, int], None],
        most_bytes: Callable[[int], int],
    ) -> None:
        """check: raises ValueError or TypeError unless the engine can load these arrays for this number of tokens
        most_bytes: most bytes of the arrays for a number of tokens; no more are read of a blob in the store"""
        self.counters = ShelfCounters()
        self._store = store
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._layout = layout
        self._check = check
        self._most_bytes = most_bytes

    async def find(self, call: OpenCall) -> tuple[int, Arrays | None]:
        """The longest saved state of this text, after the number of tokens that it covers; (0, None) if there is none.

        A turn that ended at a mark may have saved the state before its last token, so both lengths are looked up.
        """
        ids, longest = call.update.tokens, call.update.base - 1
        lengths = {longest, *call.parameters.marks, *(mark - 1 for mark in call.parameters.marks)}
        tokens = Tokens(ids)
        for length in sorted((length for length in lengths if 1 <= length <= longest), reverse=True)[:LOOKUPS]:
            part = partial(self._name, call.parameters.tenant, ids[:length])
            name = await off_loop(length, part)
            blob = await self._store.load(name, most_blob_bytes(self._most_bytes(length)))
            if blob is not None and (arrays := await self._read(blob, tokens, length)) is not None:
                self.counters.states_restored += 1
                return length, arrays
        self.counters.states_missed += 1
        return 0, None

    async def put(self, tenant: str, ids: Sequence[int], digest: int, arrays: Arrays) -> int:
        """Save the state after these tokens, whose chained digest is `digest`. Returns the number of tokens, 0 if the
        store did not keep it."""
        # Packing hashes megabytes, so it runs off the event loop.
        blob = await asyncio.to_thread(pack_state, self._header(len(ids), digest), arrays)
        kept = await self._store.save(await off_loop(len(ids), partial(self._name, tenant, ids)), blob)
        self.counters.states_saved += kept
        return len(ids) if kept else 0

    async def _read(self, blob: bytes, tokens: Tokens, length: int) -> Arrays | None:
        """The arrays of a stored state of these tokens; None, which is counted, if it is another state or damaged."""
        try:
            arrays = await asyncio.to_thread(self._unpacked, blob, tokens, length)
            self._check(arrays, length)
        except (ValueError, TypeError, LookupError) as error:
            self.counters.states_refused += 1
            log.warning("a saved state of %d tokens is refused: %s", length, described(error))
            return None
        return arrays

    def _unpacked(self, blob: bytes, tokens: Tokens, length: int) -> Arrays:
        return unpack_state(blob, self._header(length, tokens.digest(length)))

    def _name(self, tenant: str, ids: Sequence[int]) -> str:
        return state_name(tenant, self._fingerprint, self._layout, ids)

    def _header(self, tokens: int, digest: int) -> StateHeader:
        return StateHeader(self._fingerprint, self._tokenizer, self._layout, tokens, digest)
