"""Assigns KV cache pages to texts: texts take pages as they grow, and share pages of equal prefixes. Plain numbers.

A page full of committed tokens is published under a hash of these tokens and all before them, salted by tenant; a text
with the same prefix holds the same page. Shared pages are never written: a text that is cut inside one releases it and
computes the page's tokens again on a page of its own, with the same bits.

If all layers of the model have a sliding window, a text releases the pages that none of its rows will see again. If the
model has states, a text that holds pages also has a place for states (`recurrent.py`) and shares nothing, since a page
does not contain the state after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tree_kernels.tree_attention import PAGE
from tree_kernels.warp.batched import PART_ROWS
from tree_layers.memory import PageBook, pages_for

from verifier_service.recurrent import StatePool, TextStates


@dataclass(slots=True)
class TextMemory:
    """Memory of one text: pages by position, and the tokens whose keys are on them."""

    salt: bytes  # start of the tenant's hash chains
    pages: list[int] = field(default_factory=list)  # page numbers; 0, the zero page, for pages released as out of sight
    unseen: int = 0  # number of leading pages that were released as out of sight
    consumed: list[int] = field(default_factory=list)  # tokens whose keys are in place
    names: list[bytes] = field(default_factory=list)  # hash names of the leading pages that are published
    place: TextStates | None = None  # place of the text's states; None for targets without states


def most_pages(tokens: int, window: int | None, slack: int, rows: int) -> int:
    """Most pages that a text of `tokens` tokens holds at once. rows: most rows of a step   window, slack: see
    `PageTable`"""
    whole = pages_for(tokens)
    return whole if window is None else min(whole, pages_for(window + slack + rows) + 1)


def working_bytes(vocabulary: int, rows: int, splits: int, widest: int) -> int:
    """Most bytes of the results of a step of `rows` rows on an accelerator, which are allocated after the pages.

    splits: splits of the longest text   widest: most numbers that a layer's heads store for a row and a split; 0
    without attention on tensor cores
    """
    drawn = 4 * 5 * vocabulary * rows  # logits, noise, and three of the scores
    filtered = 80 * vocabulary * min(rows, PART_ROWS)
    return drawn + filtered + 4 * splits * rows * widest


def salt_of(tenant: str) -> bytes:
    """Start of a tenant's hash chains, so that no tenant shares, or can time, another's pages."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"dendro.pages").digest()


class PageTable:
    """Assigns the pool's pages to texts."""

    def __init__(
        self,
        pages: int,
        share: bool = True,
        window: int | None = None,
        slack: int = 0,
        places: StatePool | None = None,
    ) -> None:
        """share: True if texts with equal prefixes hold the same pages   window: positions that a row sees, itself
        among them, if every layer has a sliding window; else None   slack: tokens by which a text may be cut and still
        hold the pages that its next rows see   places: pool of places for states, one for each text that may hold
        pages; None for targets without states"""
        self.book = PageBook(pages)
        self.places = places
        self._share = share and places is None
        self._window = window
        self._slack = slack
        self.shared_tokens = 0  # tokens found on published pages and not computed
        self.peak = 0  # most pages held at once

    @property
    def held(self) -> int:
        """Number of pages that texts hold now."""
        return self.book.pages - self.book.free

    def adopt(self, text: TextMemory, ids: Sequence[int]) -> int:
        """Give an empty text the published pages of its prefix. Returns the number of tokens that they cover.

        ids: tokens that may be consumed, all but the root
        """
        assert not text.pages and not text.consumed
        if not self._share:
            return 0
        before = text.salt
        for start in range(0, len(ids) - PAGE + 1, PAGE):
            before = _name(before, ids[start : start + PAGE])
            page = self.book.find(before)
            if page is None:
                break
            text.pages.append(page)
            text.names.append(before)
            text.consumed += ids[start : start + PAGE]
        self.shared_tokens += len(text.consumed)
        self.peak = max(self.peak, self.held)
        if self._window is not None:
            self._drop_unseen(text)
        return len(text.consumed)

    def grow(self, text: TextMemory, tokens: int) -> bool:
        """Let a text hold `tokens` tokens. False, without a change, if too few pages are free."""
        lacking = max(pages_for(tokens) - len(text.pages), 0)
        if lacking > self.book.free:
            return False
        text.pages += self.book.allocate(lacking)
        if self.places is not None and text.place is None:
            text.place = self.places.allocate()
        self.peak = max(self.peak, self.held)
        return True

    def restore(self, text: TextMemory, ids: Sequence[int], tokens: int) -> bool:
        """Mark these ids as consumed by an empty text, the last `tokens` of them as inputs after a checkpoint. False,
        without a change, if there is no room, or if the next row would start from an older checkpoint."""
        assert self.places is not None and not text.consumed
        block, rest = divmod(len(ids) - tokens, self.places.extent.block)
        if rest or not 0 <= block <= self.places.extent.oldest(len(ids)) or not self.grow(text, len(ids)):
            return False
        assert text.place is not None
        text.place.restore(block, len(ids))
        text.consumed = list(ids)
        return True

    def append(self, text: TextMemory, ids: Sequence[int]) -> None:
        """Mark the next tokens, whose keys are now in place, as consumed. Publishes full pages, and releases pages out
        of sight."""
        text.consumed += ids
        if text.place is not None:
            text.place.append(len(text.consumed))
        if self._share:
            self._publish(text)
        if self._window is not None:
            self._drop_unseen(text)

    def _drop_unseen(self, text: TextMemory) -> None:
        seen = self._seen_from(len(text.consumed) - self._slack)
        if seen > text.unseen:
            self.book.release(text.pages[text.unseen : seen])
            text.pages[:seen] = [0] * seen
            text.unseen = seen

    def _seen_from(self, position: int) -> int:
        """Index of the first page that a row at this position, or after it, sees."""
        return 0 if self._window is None else max(position - self._window + 1, 0) // PAGE

    def _publish(self, text: TextMemory) -> None:
        for index in range(len(text.names), len(text.consumed) // PAGE):
            before = text.names[-1] if text.names else text.salt
            name = _name(before, text.consumed[index * PAGE : (index + 1) * PAGE])
            text.pages[index] = self.book.publish(text.pages[index], name)
            text.names.append(name)

    def cut(self, text: TextMemory, length: int) -> None:
        """Forget the tokens consumed past the first `length`.

        The text's own pages are overwritten later. Published pages are released, also the one in which `length` lies,
        whose first tokens are then computed again. Everything is forgotten if the next rows would see a page that was
        released as out of sight, or a state that was overwritten.
        """
        if length >= len(text.consumed):
            return
        published = length < len(text.names) * PAGE
        if published:
            length -= length % PAGE  # tokens of the cut page are computed again on a page of the text's own
        if self._seen_from(length) < text.unseen or (text.place is not None and not text.place.can_cut(length)):
            self.release(text)
        elif published:
            keep = length // PAGE
            self.book.release(text.pages[keep:])
            del text.pages[keep:], text.names[keep:]
        del text.consumed[length:]
        if text.place is not None:
            text.place.cut(length)

    def release(self, text: TextMemory) -> None:
        """Release all pages. Published ones keep their contents until they are reused."""
        self.book.release(text.pages[text.unseen :])
        text.pages, text.consumed, text.names, text.unseen = [], [], [], 0
        if text.place is not None and self.places is not None:
            self.places.release(text.place)
            text.place = None


def _name(before: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + np.array(ids, np.int32).tobytes(), digest_size=16).digest()
