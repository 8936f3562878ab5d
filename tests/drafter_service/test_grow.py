"""The rerank of dynamic trees, and the trees that each kind of shape grows."""

from __future__ import annotations

import numpy as np
import pytest
from dendro.shapes import MAX_K, MAX_ROWS, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape
from dendro.tree import DraftTree
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.grow import LEAST_CHANCE, growth_of, most_processed, rerank

SURE = np.float32(0.0)


@st.composite
def candidate_trees(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Values and parents of a tree in any parents-first order; many chances are equal, or exactly 1."""
    usual = st.sampled_from([0.0, 0.0, -0.0, -1e-38, -1e-7, -0.5, -0.5, -3.0, LEAST_CHANCE])
    chance = usual | st.floats(-80, 0, width=32)
    values, parents = [SURE], [-1]
    for row in range(1, draw(st.integers(2, 80))):
        parents.append(draw(st.integers(0, row - 1)))
        values.append(values[parents[-1]] + np.float32(draw(chance)))
    return np.array(values, np.float32), np.array(parents)


def rerank_by_sorting(values: np.ndarray, total: int) -> list[int]:
    order = sorted(range(1, len(values)), key=lambda row: (-float(values[row]), row))
    return sorted([0, *order[:total]])


def has_all_parents(kept: list[int], parents: np.ndarray) -> bool:
    return all(int(parents[row]) in kept for row in kept if row)


@given(candidate_trees(), st.data())
def test_a_rerank_is_the_first_rows_of_the_sorted_order_and_keeps_every_ancestor(tree, data):
    values, parents = tree
    total = data.draw(st.integers(1, len(values) - 1))
    kept = rerank(values, parents, total).tolist()
    assert kept == rerank_by_sorting(values, total)
    assert has_all_parents(kept, parents)


def test_ordering_by_value_alone_would_keep_a_guess_without_its_parent():
    """Three of a chain of six sure guesses; among equal values the last come first, as a top-k may return them."""
    values, parents = np.zeros(7, np.float32), np.arange(7) - 1
    by_value_alone = np.argsort(values, kind="stable")[::-1][:4].tolist()
    assert not has_all_parents(by_value_alone, parents)
    assert rerank(values, parents, 3).tolist() == [0, 1, 2, 3]


def grown(shape: TreeShape, scores: np.ndarray) -> tuple[DraftTree, int]:
    """A tree whose rows all have the candidates 0, 1, ... with these log confidences, and its processed rows."""
    growth = growth_of(99, shape)
    while not growth.finished:
        rows = len(growth.frontier)
        confidences = [scores.astype(np.float32).tolist()] * rows
        growth.extend([list(range(len(scores)))] * rows, confidences, confidences)
    return DraftTree(*growth.arrays()), growth.processed


SHAPES: list[TreeShape] = [
    LevelShape((3, 2, 2, 1, 1)),
    NodeShape((2, 1)),
    NodeShape((3, 0, 2, 1, 0, 2)),
    NodeShape((1, 2, 0, 1)),
    BeamShape(4, 3),
    BeamShape(1, 5),
    BeamShape(7, 9),
    DynamicShape(6, 5, 24),
    DynamicShape(1, 4, 4),
    DynamicShape(10, 6, 59),
    DynamicShape(MAX_K, 1, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sure", [False, True], ids=["graded", "all-sure"])
def test_a_grown_tree_has_the_rows_depth_and_processed_rows_of_its_shape(shape, sure):
    scores = np.zeros(MAX_K) if sure else -0.3 - 0.4 * np.arange(MAX_K)
    tree, processed = grown(shape, scores)
    assert tree.rows == shape.rows
    assert tree.depths.max() <= shape.depth
    assert processed == shape.forwarded
    for row in range(tree.rows):  # each row's guesses are its first candidates, in order
        assert tree.tokens[tree.children(row)].tolist() == list(range(len(tree.children(row))))


def test_a_node_tree_gives_each_row_its_number_of_children():
    tree, _ = grown(NodeShape((3, 0, 2, 1, 0, 2)), -np.arange(1.0, 9.0))
    assert tree.parents.tolist() == [-1, 0, 0, 0, 2, 2, 3, 5, 5]


def test_a_beam_keeps_its_earlier_rows_and_an_abandoned_beam_stays_a_leaf():
    """The first guess is nearly sure: the second level's best are children of the first and of the second guess."""
    tree, _ = grown(BeamShape(2, 3), np.array([-0.1, -2.0, -3.0, -4.0, -5, -6, -7, -8]))
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 1, 2]
    np.testing.assert_allclose(tree.values, [0, -0.1, -2, -3, -0.2, -2.1, -2.1], atol=1e-6)


def test_a_dynamic_tree_is_deep_if_its_guesses_are_sure_and_wide_if_they_are_not():
    sure, unsure = np.array([-0.05, -4, -5, -6]), np.array([-1.4, -1.5, -1.6, -1.7])
    deep, wide = [grown(DynamicShape(4, 4, 6), np.append(scores, [-9.0] * 4))[0] for scores in (sure, unsure)]
    assert (deep.depths.max(), wide.depths.max()) == (4, 2)
    assert (len(deep.children(0)), len(wide.children(0))) == (2, 4)


def test_no_shape_processes_more_rows_than_most_processed():
    for max_rows, max_depth in ((64, 16), (8, 16), (2, 1), (64, 63), (32, 4)):
        most = most_processed(max_rows, max_depth)
        steps = min(max_depth, max_rows - 1)
        assert DynamicShape(MAX_K, steps, min(max_rows - 1, MAX_K + (steps - 1) * MAX_K**2)).forwarded <= most
        assert LevelShape((1,) * steps).forwarded <= most
        assert max_rows - 1 <= most or max_rows > MAX_ROWS
