"""The texts' pages in the pool: they grow with the texts and are shared by equal beginnings. Plain numbers.

A page full of committed tokens is published under a hash of these tokens and all before them, salted by tenant; a text
that begins alike holds the same page. Shared pages are never written: a text that is cut inside one releases it and
computes that page's tokens again on a page of its own, which has the same bits.

Where all layers of the model have a sliding window, a text releases the pages that none of its rows will see again.
Where a model has states, a text that holds pages has a place for states too (`recurrent.py`), and shares nothing: a
page does not contain the state after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tree_kernels.tree_attention import PAGE
from tree_layers.memory import PageBook, pages_for

from verifier_service.recurrent import StatePool, TextStates


@dataclass(slots=True)
class TextMemory:
    """What one text holds: pages by position, and the tokens whose keys are on them."""

    salt: bytes
    pages: list[int] = field(default_factory=list)  # 0, the zero page, for one that was released as out of sight
    unseen: int = 0  # number of leading pages that were released as out of sight
    consumed: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # of the leading pages that are published
    place: TextStates | None = None  # of its states, where the target has any


def most_pages(tokens: int, window: int | None, slack: int, rows: int) -> int:
    """The most pages that a text of so many tokens holds at once, where a step computes `rows` of them. window, slack:
    as in `PageTable`."""
    whole = pages_for(tokens)
    return whole if window is None else min(whole, pages_for(window + slack + rows) + 1)


def salt_of(tenant: str) -> bytes:
    """The start of a tenant's hash chains: no tenant shares, or can time, another's pages."""
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
        """share: whether texts that begin alike hold the same pages. window: positions that a row sees, itself among
        them, where every layer has a sliding window; slack: tokens by which a text may be cut and still hold the pages
        that its next rows see. places: for states; as many as texts that hold pages at once."""
        self.book = PageBook(pages)
        self.places = places
        self._share = share and places is None
        self._window = window
        self._slack = slack
        self.shared_tokens = 0  # tokens found on published pages and not computed
        self.peak = 0  # most pages held at once

    @property
    def held(self) -> int:
        """Pages that texts hold now."""
        return self.book.pages - self.book.free

    def adopt(self, text: TextMemory, ids: Sequence[int]) -> int:
        """Give an empty text the published pages of its beginning; returns how many tokens they cover.

        ids: the tokens that may be consumed: all but the root.
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
        self._drop_unseen(text)
        return len(text.consumed)

    def grow(self, text: TextMemory, tokens: int) -> bool:
        """Let a text hold so many tokens; false, without a change, where too few pages are free."""
        lacking = max(pages_for(tokens) - len(text.pages), 0)
        if lacking > self.book.free:
            return False
        text.pages += self.book.allocate(lacking)
        if self.places is not None and text.place is None:
            text.place = self.places.allocate()
        self.peak = max(self.peak, self.held)
        return True

    def restore(self, text: TextMemory, ids: Sequence[int], tokens: int) -> bool:
        """Mark these tokens as consumed by an empty text, the last `tokens` of them as inputs after a checkpoint.
        False, without a change, where there is no room, or where the next row would start from an older checkpoint."""
        assert self.places is not None and not text.consumed
        block, rest = divmod(len(ids) - tokens, self.places.extent.block)
        if rest or not 0 <= block <= self.places.extent.oldest(len(ids)) or not self.grow(text, len(ids)):
            return False
        assert text.place is not None
        text.place.restore(block, len(ids))
        text.consumed = list(ids)
        return True

    def append(self, text: TextMemory, ids: Sequence[int]) -> None:
        """Mark these next tokens, whose keys are now in place, as consumed; full pages are published, and those out of
        sight released."""
        text.consumed += ids
        if text.place is not None:
            text.place.append(len(text.consumed))
        if self._share:
            self._publish(text)
        self._drop_unseen(text)

    def _drop_unseen(self, text: TextMemory) -> None:
        seen = self._seen_from(len(text.consumed) - self._slack)
        if seen > text.unseen:
            self.book.release(text.pages[text.unseen : seen])
            text.pages[:seen] = [0] * seen
            text.unseen = seen

    def _seen_from(self, position: int) -> int:
        """The first page that a row at this position, or after it, sees."""
        return 0 if self._window is None else max(position - self._window + 1, 0) // PAGE

    def _publish(self, text: TextMemory) -> None:
        for index in range(len(text.names), len(text.consumed) // PAGE):
            before = text.names[-1] if text.names else text.salt
            name = _name(before, text.consumed[index * PAGE : (index + 1) * PAGE])
            text.pages[index] = self.book.publish(text.pages[index], name)
            text.names.append(name)

    def cut(self, text: TextMemory, length: int) -> None:
        """Forget what was consumed past `length` tokens.

        The text's own pages are overwritten later. Published pages are released, also the one that `length` lies in,
        whose first tokens are then computed again. Everything is forgotten where the next rows would see a page that
        was released as out of sight, or a state that was overwritten.
        """
        if length >= len(text.consumed):
            return
        published = length < len(text.names) * PAGE
        if published:
            length -= length % PAGE  # the first row that is computed again is here, and sees further back
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
