import math

import numpy as np
import pytest
from dendro.shapes import MAX_ROWS, OFF, LevelShape
from dendro.tree import DraftTree, full_tree
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    rows = draw(st.integers(1, MAX_ROWS))
    return [-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows))]


@given(parent_lists())
def test_ancestor_words_and_depths_agree_with_walking_up(parents):
    tree = DraftTree.of(range(len(parents)), parents)
    for row in range(tree.rows):
        path = tree.path_to(row)
        word = int(tree.ancestors[row]) & (1 << 64) - 1
        assert {bit for bit in range(64) if word >> bit & 1} == set(path)
        assert tree.depths[row] == len(path) - 1
        assert tree.paths[row].tolist() == [*path, *[-1] * (tree.depth + 1 - len(path))]


@pytest.mark.parametrize(
    "tokens, parents, field",
    [
        ([], [], "tokens"),
        (range(MAX_ROWS + 1), range(-1, MAX_ROWS), "tokens"),
        ([1, 2], [-1], "parents"),
        ([1, 2], [0, 0], "parents"),
        ([1, 2], [-1, -1], "parents"),
        ([1, 2, 3], [-1, 2, 0], "parents"),
        ([1, 2], [-1, 1], "parents"),
        ([1, -2], [-1, 0], "tokens"),
        ([1, 5, 5], [-1, 0, 0], "tokens"),
    ],
    ids=["empty", "65 rows", "short", "root", "two roots", "forward", "self", "negative", "twins"],
)
def test_a_malformed_tree_is_refused_by_the_name_of_its_field(tokens, parents, field):
    with pytest.raises(ValueError, match=f"tree.{field}|tree.parents"):
        DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.zeros(len(list(tokens)), np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_values_must_be_logarithms_of_probabilities(value):
    with pytest.raises(ValueError, match="values"):
        DraftTree.of([1, 2], [-1, 0], [0.0, value])


def test_the_same_token_may_have_two_parents():
    assert DraftTree.of([1, 2, 3, 7, 7], [-1, 0, 0, 1, 2]).depths.tolist() == [0, 1, 1, 2, 2]


def test_a_full_tree_keeps_siblings_together_and_in_order_of_rank():
    tree = full_tree(9, LevelShape((2, 2)), [[1, 2], [3, 4, 5, 6]])
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.children(2) == [5, 6]
    assert DraftTree.root_only(9).rows == full_tree(9, OFF, []).rows == 1


def test_a_tree_promises_at_most_one_token_per_depth_and_none_without_values():
    """Two siblings of 0.6 and 0.5, below them 0.3 and 0.2: 1 token at depth 1, 0.5 at depth 2."""
    values = [0.0, *map(math.log, (0.6, 0.5, 0.3, 0.2))]
    assert DraftTree.of([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2], values).promised == pytest.approx(1.5)
    assert DraftTree.of([1, 2, 3], [-1, 0, 0]).promised is None
    assert DraftTree.root_only(1).promised == 0
