"""Pages: none is allocated twice, none is lost, and paths are committed in every layer."""

from __future__ import annotations

import pytest
import torch
from tree_kernels.tree_attention import PAGE, Layout
from tree_layers.memory import PageBook, Pages, PagesFull, pages_for


def test_pages_are_allocated_once_and_can_be_released():
    book = PageBook(5)
    first, second = book.allocate(2), book.allocate(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]  # never 0, the zero page
    with pytest.raises(PagesFull, match="1 pages of 64 tokens wanted, 0 of 5 free"):
        book.allocate(1)
    book.release(first)
    assert book.free == 2
    with pytest.raises(ValueError, match="is not allocated"):
        book.release(first[:1])
    with pytest.raises(PagesFull):
        book.allocate(3)
    assert book.free == 2


def test_tokens_need_whole_pages():
    assert [pages_for(tokens) for tokens in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("by_head", [False, True])
def test_a_commit_copies_its_rows_and_not_the_pool(by_head):
    pages = Pages([Layout(2, 16, 16, by_head=by_head)] * 3, 100, 10, torch.device("cpu"))
    slots = torch.arange(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        pages.append(pages.scratch + slots, 70 + slots)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in found.events())
    assert 0 < allocated < pages.nbytes / 50


def test_a_path_is_committed_in_every_layer_of_any_layout():
    by_head = Layout(2, 16, 16, torch.bfloat16, by_head=True)
    layouts = [Layout(2, 16, 16), Layout(1, 8, 24), Layout(2, 16, 16), by_head, by_head]
    pages = Pages(layouts, 2, 10, torch.device("cpu"))
    assert pages.scratch == 3 * PAGE
    assert [tuple(layer.shape[1:]) for layer in pages.layers] == [(2, 48), (1, 48), (2, 48), (2, 32), (2, 32)]
    for number, layer in enumerate(pages.layers):
        layer[pages.scratch : pages.scratch + 4] = torch.arange(4.0)[:, None, None] + 10 * number
    pages.append(pages.scratch + torch.tensor([1, 3]), torch.tensor([70, 71]))
    for number, layer in enumerate(pages.layers):
        assert layer[70:72, 0, 0].tolist() == [10 * number + 1, 10 * number + 3]
        assert not layer[:70].any()
