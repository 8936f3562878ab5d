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
    """Which pages are free. Plain numbers: it knows of no tensor. Page 0 is the zero page and is never given out."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages, 0, -1))  # the lowest is given out first
        self._out: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages of undefined, finite contents. Raises PagesFull, taking none, where there are not as many."""
        if count > len(self._free):
            raise PagesFull(f"{count} pages of {PAGE} tokens wanted, {len(self._free)} of {self.pages} free")
        taken = [self._free.pop() for _ in range(count)]
        self._out.update(taken)
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back. A page is given back once."""
        for page in pages:
            if page not in self._out:
                raise ValueError(f"page {page} was not out")
            self._out.remove(page)
            self._free.append(page)


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
        return sum(layout.kv_heads * layout.width * 4 for layout in self.layouts)

    def append(self, source: Tensor, target: Tensor) -> None:
        """Keep guesses: copy slots [rows] to slots [rows], in every layer."""
        for store in self._stores.values():
            commit(store, source, target)
