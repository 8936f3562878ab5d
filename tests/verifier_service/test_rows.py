"""The rows of a step as plain arrays."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from dendro.tree import DraftTree
from tree_kernels.tree_attention import NEAR_CHOICES, PAGE

from verifier_service.rows import NO_ROWS, TextRows, root_rows, text_rows

LENGTHS = [1, 2, *(multiple + more for multiple in (16, 32, 64, 128, 192, 256) for more in (-1, 0, 1, 2)), 1000]


def same(one, other):
    pairs = [(getattr(one, each.name), getattr(other, each.name)) for each in fields(TextRows)]
    return all(
        np.array_equal(a, b) and a.dtype == b.dtype if isinstance(b, np.ndarray) else a == b and type(a) is type(b)
        for a, b in pairs
    )


@pytest.mark.parametrize("window", [None, 1, 70, 128])
@pytest.mark.parametrize("near", NEAR_CHOICES)
def test_roots_of_many_texts_are_the_rows_that_each_text_has_alone(near, window):
    generator = np.random.default_rng(0)
    texts = []
    for length in LENGTHS:
        pages = 1 + generator.permutation(64)[: -(-(length + near) // PAGE)]
        texts.append((generator.integers(0, 100, length).tolist(), pages.tolist()))
    found = root_rows(texts, near, window)
    for (ids, pages), rows in zip(texts, found, strict=True):
        root = DraftTree.of([ids[-1]], [-1])
        assert same(rows, text_rows(ids, NO_ROWS, root, pages, 1, near, window))
