"""Sequoia's program against all trees, and Leviathan's formulas against all outcomes of a round."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest
from dendro.shapes import BeamShape, LevelShape, NodeShape, TreeShape, child_counts

from cluster.policies.sequoia import (
    best_tree,
    chances,
    expected_tokens,
    forwarded_rows,
    longest_trees,
)
from cluster.policies.step_time import TargetSteps
from cluster.tune import leviathan

FLAT = (0.5, 0.2, 0.1)
PADDED = TargetSteps((1, 2, 3, 4, 5, 6, 8)).padded
DEEPENING = ((0.4, 0.25, 0.1), (0.55, 0.15, 0.05), (0.3, 0.3, 0.3), (0.8, 0.1, 0.0))
Nested = tuple["Nested", ...]
"""A tree as the tuple of its subtrees."""


@cache
def trees(rows: int) -> tuple[Nested, ...]:
    """All ordered trees of so many rows."""
    return forests(rows - 1)


@cache
def forests(rows: int) -> tuple[Nested, ...]:
    if rows == 0:
        return ((),)
    return tuple(
        (first, *others) for size in range(1, rows + 1) for first, others in product(trees(size), forests(rows - size))
    )


def height(tree: Nested) -> int:
    return max((1 + height(child) for child in tree), default=0)


def widest(tree: Nested) -> int:
    return max([len(tree), *map(widest, tree)])


def emitted(tree: Nested, accept, depth: int = 0) -> float:
    """E[N] by its definition: one for the row, and for each child its chance times the E[N] of its subtree."""
    row = accept[min(depth, len(accept) - 1)]
    return 1 + sum(row[place] * emitted(child, accept, depth + 1) for place, child in enumerate(tree))


def rows_of(tree: Nested) -> int:
    return 1 + sum(map(rows_of, tree))


def parents_by_level(tree: Nested) -> list[int]:
    """Rows with children by level, which are those of the drafter's forwards."""
    counts, level = [], [tree]
    while level := [each for each in level if each]:
        counts.append(len(level))
        level = [child for each in level for child in each]
    return counts


def fitting(most: int, depth: int, width: int) -> Iterator[Nested]:
    for rows in range(2, most + 1):
        yield from (tree for tree in trees(rows) if height(tree) <= depth and widest(tree) <= width)


def nested(shape: TreeShape) -> Nested:
    """A shape as a tree, by its own numbering: rows level by level, a row's children side by side."""
    counts = child_counts(shape)
    first = np.cumsum([1, *counts])

    def under(row: int) -> Nested:
        return tuple(under(child) for child in range(first[row], first[row] + counts[row]))

    return under(0)


def table(accept) -> tuple[tuple[float, ...], ...]:
    return accept if isinstance(accept[0], tuple) else (accept,)


@pytest.mark.parametrize("accept", [FLAT, DEEPENING], ids=["by sibling", "by depth and sibling"])
@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_no_tree_with_as_many_rows_emits_more(accept, depth):
    found: dict[tuple[int, int], float] = {}
    for shape, predicted in longest_trees(accept, 8, depth, 3):
        assert shape.depth <= depth and shape.width <= 3
        assert predicted == pytest.approx(emitted(nested(shape), table(accept)), abs=1e-12, rel=0)
        assert predicted == pytest.approx(expected_tokens(shape, accept), abs=1e-12, rel=0)
        found[shape.rows, shape.depth] = predicted
    for rows in range(2, 9):
        for most in range(1, depth + 1):
            values = [
                emitted(tree, table(accept)) for tree in trees(rows) if height(tree) <= most and widest(tree) <= 3
            ]
            ours = [value for (count, deep), value in found.items() if count == rows and deep <= most]
            assert bool(values) == bool(ours)
            assert max(ours, default=0) == pytest.approx(max(values, default=0), abs=1e-12, rel=0)


@pytest.mark.parametrize("accept", [FLAT, DEEPENING], ids=["by sibling", "by depth and sibling"])
@pytest.mark.parametrize("level", [0.0, 30.0, 120.0, 900.0])
def test_no_tree_takes_less_time_per_token(accept, level):
    """Among all 625 trees of 2 to 8 rows, whose steps are padded to one size."""

    def time_of(tree: Nested) -> float:
        return 50 + level * height(tree) + 600 + 10 * PADDED(rows_of(tree))

    step_us = lambda rows: 600 + 10 * PADDED(rows)  # noqa: E731
    found = best_tree(accept, lambda _: level, step_us, fixed_us=50, max_rows=8, max_children=3)
    least = min(time_of(tree) / emitted(tree, table(accept)) for tree in fitting(8, 7, 3))
    assert found.round_us / found.emitted == pytest.approx(least, rel=1e-12)
    assert found.round_us == pytest.approx(time_of(nested(found.shape)), rel=1e-12)
    assert found.emitted == pytest.approx(emitted(nested(found.shape), table(accept)), abs=1e-12)
    assert found.tokens_per_second == pytest.approx(1e6 / least)


def round_us(tree: Nested) -> float:
    return 800 + sum(100 + 40 * rows for rows in parents_by_level(tree))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("deepening", [False, True], ids=["by sibling", "by depth and sibling"])
def test_draft_times_that_grow_with_rows_are_weighed(deepening, seed):
    """Where chances depend on the sibling alone, no tree takes less time per token; else none takes 1 % less."""
    rng = np.random.default_rng(seed)
    accept = tuple(tuple(row) for row in -np.sort(-rng.dirichlet((3, 1, 1, 2), 7 if deepening else 1)[:, :3]))
    found = best_tree(accept, lambda rows: 100 + 40 * rows, lambda _: 800, max_rows=8, max_children=3)
    assert found.round_us == pytest.approx(round_us(nested(found.shape)), rel=1e-12)
    assert found.emitted == pytest.approx(emitted(nested(found.shape), accept), abs=1e-12)
    least = min(round_us(tree) / emitted(tree, accept) for tree in fitting(8, 7, 3))
    slack = 1.01 if deepening else 1 + 1e-12
    assert least * (1 - 1e-12) <= found.round_us / found.emitted <= least * slack


def test_trees_have_fewer_forwarded_rows_where_these_cost_time():
    costs = {row_us: best_tree(FLAT, lambda rows, us=row_us: 100 + us * rows, lambda _: 5000.0) for row_us in (0, 500)}
    forwarded = {row_us: sum(forwarded_rows(found.shape)) for row_us, found in costs.items()}
    assert forwarded[500] < forwarded[0] / 2
    assert costs[500].shape.depth > 1


@pytest.mark.parametrize("row", [(0.48, 0.0, 0.23), (0.4, 0.04, 0.36)])
def test_a_likely_sibling_requires_the_unlikely_ones_before_it(row):
    """A row's children are its first candidates, without gaps."""
    found = best_tree(row, lambda rows: 20 + 100 * rows, lambda _: 800, max_rows=8, max_children=3)

    def per_token(tree: Nested) -> float:
        return (800 + sum(20 + 100 * rows for rows in parents_by_level(tree))) / emitted(tree, (row,))

    assert found.round_us / found.emitted == pytest.approx(per_token(nested(found.shape)), rel=1e-12)
    assert per_token(nested(found.shape)) <= 1.01 * min(map(per_token, fitting(8, 7, 3)))


def test_more_rows_more_levels_and_better_guesses_never_emit_less():
    longest = {rows: max(e for s, e in longest_trees(DEEPENING, 20, 6, 3) if s.rows == rows) for rows in range(2, 21)}
    assert all(longest[rows] < longest[rows + 1] for rows in range(2, 20))
    by_depth = [max(e for _, e in longest_trees(FLAT, 20, depth, 3)) for depth in range(1, 7)]
    assert by_depth == sorted(by_depth)
    by_width = [max(e for _, e in longest_trees(FLAT, 20, 6, width)) for width in range(1, 4)]
    assert by_width == sorted(by_width)
    better = max(e for _, e in longest_trees([(0.6, 0.2, 0.1)], 20, 6, 3))
    assert better > by_depth[-1]


def test_depth_and_rows_depend_on_costs():
    free = best_tree(FLAT, lambda _: 0.0, lambda rows: 1000.0)
    assert free.shape.rows == 64, "where rows are free, all are used"
    assert best_tree(FLAT, lambda _: 0.0, lambda rows: float(rows)).shape.rows <= 8
    shallow, deep = (best_tree(FLAT, lambda _, us=us: us, lambda _: 1000.0).shape.depth for us in (700.0, 20.0))
    assert shallow < deep
    assert best_tree([[1.0]], lambda _: 1.0, lambda _: 1000.0, max_depth=9).shape == NodeShape((1,) * 9)


def test_the_best_tree_keeps_the_limits_of_messages():
    rng = np.random.default_rng(1)
    accept = -np.sort(-rng.dirichlet([4] + [1] * 8, 10)[:, :8])
    found = best_tree(accept, lambda rows: 900 + 40.0 * rows, lambda rows: 8000 + 90.0 * rows, fixed_us=500)
    assert found.shape.rows <= 64 and found.shape.depth <= 10 and found.shape.width <= 8
    assert found.emitted == pytest.approx(expected_tokens(found.shape, accept), abs=1e-12)
    assert TreeShape.parse(str(found.shape)) == found.shape


def test_level_and_node_shapes_number_rows_alike():
    assert child_counts(LevelShape((2, 1))) == (2, 1, 1, 0, 0) == child_counts(NodeShape((2, 1, 1)))
    assert child_counts(LevelShape(())) == (0,)
    assert forwarded_rows(LevelShape((3, 2, 1))) == (1, 3, 6) == forwarded_rows(NodeShape((3, 2, 2, 2) + (1,) * 6))
    assert forwarded_rows(NodeShape((3, 0, 1))) == (1, 1), "rows without children are not forwarded"
    assert forwarded_rows(LevelShape(())) == ()
    assert expected_tokens(LevelShape(()), FLAT) == 1
    assert expected_tokens(LevelShape((1, 2)), FLAT) == 1 + 0.5 * (1 + 0.5 + 0.2)
    with pytest.raises(ValueError, match="is not static"):
        child_counts(BeamShape(3, 2))


def test_depths_without_chances_have_those_of_the_deepest_one_given():
    assert chances(((0.5, 0.2), (0.4, 0.1)), 4)[:, 0].tolist() == [0.5, 0.4, 0.4, 0.4]
    assert chances(FLAT, 2).tolist() == [list(FLAT)] * 2


@pytest.mark.parametrize(
    "given, message",
    [
        ({"accept": (0.9, 0.2)}, "accept: .* together at most 1"),
        ({"accept": (-0.1,)}, "accept: "),
        ({"accept": (float("nan"),)}, "accept: "),
        ({"accept": ()}, "accept: has the shape"),
        ({"max_rows": 65}, "max_rows: 65; 2 to 64"),
        ({"max_rows": 1}, "max_rows: "),
        ({"max_depth": 0}, "max_depth: "),
        ({"max_children": 0}, "max_children: "),
    ],
)
def test_invalid_arguments_are_refused_by_name(given, message):
    call = {"accept": FLAT} | given
    with pytest.raises(ValueError, match=message):
        best_tree(call.pop("accept"), lambda _: 1.0, lambda _: 1.0, **call)
    with pytest.raises(ValueError, match="chances of 3 siblings"):
        expected_tokens(LevelShape((4,)), FLAT)


# Chains


def outcomes(acceptance: float, guesses: int) -> Iterator[tuple[float, int]]:
    """All ways in which guesses can be right and wrong: the chance of each, and its emitted tokens."""
    for right in product((True, False), repeat=guesses):
        chance = float(np.prod([acceptance if each else 1 - acceptance for each in right]))
        yield chance, 1 + next((place for place, each in enumerate(right) if not each), guesses)


@pytest.mark.parametrize("guesses", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.75, 1.0])
def test_a_chains_emitted_tokens_equal_those_by_enumeration(acceptance, guesses):
    expected = sum(chance * tokens for chance, tokens in outcomes(acceptance, guesses))
    assert leviathan.emitted(acceptance, guesses) == pytest.approx(expected, abs=1e-12)
    chain = LevelShape((1,) * guesses)
    assert expected_tokens(chain, (acceptance,)) == pytest.approx(expected, abs=1e-12)
    # Time and operations of a round by their definitions, over what it emits.
    assert leviathan.gain(acceptance, guesses, 0.2) == pytest.approx(expected / (1 + 0.2 * guesses), abs=1e-12)
    spent = guesses * 0.1 + (guesses + 1)
    assert leviathan.operations(acceptance, guesses, 0.1) == pytest.approx(spent / expected, abs=1e-12)


def test_the_numbers_of_the_paper_are_reproduced():
    """Table 1 of arXiv 2211.17192, c = chat = 0: tokens at a = 0.8, g = 5 and the operations; g = 2 at a = 0.6."""
    assert leviathan.emitted(0.6, 2) == pytest.approx(1.96) == leviathan.gain(0.6, 2, 0.0)
    assert leviathan.operations(0.6, 2, 0.0) == pytest.approx(1.53, abs=5e-3)
    assert leviathan.gain(0.8, 5, 0.0) == pytest.approx(3.69, abs=5e-3)
    assert leviathan.operations(0.8, 5, 0.0) == pytest.approx(1.63, abs=5e-3)


@pytest.mark.parametrize("given, named", [((1.5, 1), "acceptance"), ((0.5, -1), "guesses"), ((0.5, 1, -1.0), "cost")])
def test_impossible_chains_are_refused(given, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        leviathan.gain(*given) if len(given) == 3 else leviathan.emitted(*given)
