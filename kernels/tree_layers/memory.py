"""The attention memory of a model: pages of 64 positions, allocated to texts, and the slots of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tree_kernels.commit import commit
from tree_kernels.tree_attention import PAGE, Layout


class PagesFull(RuntimeError):
    """Too few pages are free."""


class PageBook:
    """Allocates page numbers; has no tensors. Page 0 is the zero page and is never allocated.

    A page may be published under a name; each `find` of it adds a holder. A published page without holders keeps its
    contents until it is reallocated; the one released longest ago goes first.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._blank = list(range(pages, 0, -1))  # the lowest is allocated first
        self._holders: dict[int, int] = {}
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # published pages without holders

    @property
    def free(self) -> int:
        """The number of pages without holders."""
        return len(self._blank) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Pages with undefined, finite contents. Raises PagesFull, allocating none, if fewer are free."""
        if count > self.free:
            raise PagesFull(f"{count} pages of {PAGE} tokens wanted, {self.free} of {self.pages} free")
        taken = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page = next(iter(self._idle))
                del self._idle[page], self._named[self._names.pop(page)]
            self._holders[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Release pages, given in the order of their text. Each holder releases a page once.

        Raises ValueError for a page without holders.
        """
        for page in reversed(pages):  # a text's last page is the least useful to other texts: reallocated first
            if page not in self._holders:
                raise ValueError(f"page {page} is not allocated")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._names:
                self._idle[page] = None
            else:
                self._blank.append(page)

    def publish(self, page: int, name: bytes) -> int:
        """Name a page whose contents are final, so that `find` returns it. If another page has that name, and so the
        same contents, this page is released and the caller holds the other. Returns the page that is held."""
        known = self.find(name)
        if known is None:
            self._named[name] = page
            self._names[page] = name
            return page
        self.release([page])
        return known

    def find(self, name: bytes) -> int | None:
        """The page of this name, now held by the caller too; None if there is none."""
        page = self._named.get(name)
        if page is not None:
            self._holders[page] = self._holders.get(page, 0) + 1
            self._idle.pop(page, None)
        return page


def pages_for(tokens: int) -> int:
    """The number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class Pages:
    """The slots of every layer: the zero page, `pages` pages for texts, then scratch slots for guesses.

    `layers[i]` is [slots, kv_heads, width] in its layout's dtype. Layers of one layout share one tensor, so that one
    copy commits a path in all of them.
    """

    def __init__(self, layouts: Sequence[Layout], pages: int, scratch_rows: int, device: torch.device) -> None:
        self.layouts = tuple(layouts)
        self.device = device
        self.scratch = (1 + pages) * PAGE  # the first scratch slot
        slots = self.scratch + pages_for(scratch_rows) * PAGE
        self._stores: dict[Layout, Tensor] = {}  # [layers of that layout, slots, kv_heads, width]
        for layout in dict.fromkeys(layouts):
            self._stores[layout] = layout.pools(self.layouts.count(layout), slots, device)
        rest = {layout: iter(store) for layout, store in self._stores.items()}
        self.layers = [next(rest[layout]) for layout in layouts]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(layout.token_bytes for layout in self.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """The slots of each layout: [layers, slots, kv_heads, width]."""
        return tuple(self._stores.values())

    def append(self, source: Tensor, target: Tensor) -> None:
        """Commit guesses: copy slots [rows] to slots [rows], in every layer."""
        for store in self._stores.values():
            commit(store, source, target)
