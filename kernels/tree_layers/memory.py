"""The attention memory of a model: pages of 64 positions, given to texts, and the slots of every layer behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tree_kernels.commit import commit
from tree_kernels.tree_attention import PAGE, Layout


class PagesFull(RuntimeError):
    """Not as many pages are free."""


class PageBook:
    """Which pages are free. Plain numbers: it knows of no tensor. Page 0 is the zero page and is never given out.

    A page may be published under a name and is then held by everybody who finds it. One that nobody holds keeps its
    contents until it is wanted for something else, the one given back longest ago first.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._blank = list(range(pages, 0, -1))  # the lowest is given out first
        self._holders: dict[int, int] = {}
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # published, and held by nobody

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Pages of undefined, finite contents. Raises PagesFull, taking none, where there are not as many."""
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

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back, in the order of their text. A holder gives a page back once."""
        for page in reversed(pages):  # a text's last page is of the least use to others: it goes first
            if page not in self._holders:
                raise ValueError(f"page {page} was not out")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._names:
                self._idle[page] = None
            else:
                self._blank.append(page)

    def publish(self, page: int, name: bytes) -> int:
        """Let others find a page whose contents are final. Where another has that name already, the caller holds that
        one instead, and this one is given back: their contents are the same. Returns the page that is held."""
        known = self.find(name)
        if known is None:
            self._named[name] = page
            self._names[page] = name
            return page
        self.give([page])
        return known

    def find(self, name: bytes) -> int | None:
        """Hold the page of this name, where there is one."""
        page = self._named.get(name)
        if page is not None:
            self._holders[page] = self._holders.get(page, 0) + 1
            self._idle.pop(page, None)
        return page


def pages_for(tokens: int) -> int:
    """How many pages so many tokens lie on."""
    return -(-tokens // PAGE)


class Pages:
    """The slots of every layer: the zero page, `pages` pages for texts, and scratch slots for guesses after them.

    `layers[i]` is [slots, kv_heads, width] float32. Layers of one layout lie in one tensor, so that a path is kept
    by one copy for all of them.
    """

    def __init__(self, layouts: Sequence[Layout], pages: int, scratch_rows: int, device: torch.device) -> None:
        self.layouts = tuple(layouts)
        self.device = device
        self.scratch = (1 + pages) * PAGE  # the first scratch slot
        slots = self.scratch + pages_for(scratch_rows) * PAGE
        self._stores: dict[Layout, Tensor] = {}  # [layers of that layout, slots, kv_heads, width]
        for layout in dict.fromkeys(layouts):
            shape = (self.layouts.count(layout), slots, layout.kv_heads, layout.width)
            self._stores[layout] = torch.zeros(shape, device=device)  # a CPU takes the memory when it is written
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
        """Keep guesses: copy slots [rows] to slots [rows], in every layer."""
        for store in self._stores.values():
            commit(store, source, target)
