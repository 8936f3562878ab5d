"""The rerank of dynamic trees, and the trees that each kind of shape grows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dendro.shapes import MAX_K, MAX_ROWS, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape, UntilShape
from dendro.tree import DraftTree
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.confidence import Calibration
from drafter_service.grow import LEAST_CHANCE, growth_of, most_processed, rerank
from drafter_service.texts import DraftRound

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
    assert processed <= shape.forwarded if isinstance(shape, DynamicShape) else processed == shape.forwarded
    for row in range(tree.rows):  # each row's guesses are its first candidates, in order
        assert tree.tokens[tree.children(row)].tolist() == list(range(len(tree.children(row))))


def paths(shape: TreeShape, candidates: Callable[[tuple[int, ...]], int]) -> set[tuple[int, ...]]:
    """The paths of a tree whose rows have so many candidates, 0, 1, ..., by their paths."""
    growth, found = growth_of(99, shape), {0: ()}
    while not growth.finished:
        counts = [candidates(found[row]) for row in growth.frontier]
        chances = [(-0.3 - 0.4 * np.arange(count)).tolist() for count in counts]
        growth.extend([list(range(count)) for count in counts], chances, chances)
        for row in range(len(found), len(growth.tokens)):
            found[row] = (*found[growth.parents[row]], growth.tokens[row])
    tree = DraftTree(*growth.arrays())
    assert tree.rows <= shape.rows and growth.processed <= shape.forwarded
    return set(found.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_with_few_candidates_has_as_many_children_and_others_have_those_of_the_shape(shape):
    def few(path: tuple[int, ...]) -> int:
        return (3 + sum(path) + len(path)) % 4

    found, whole = paths(shape, few), paths(shape, lambda path: MAX_K)
    assert all(rank < few(path[:at]) for path in found for at, rank in enumerate(path))
    if isinstance(shape, LevelShape | NodeShape):  # the others give the room to other rows
        assert found == {path for path in whole if all(rank < few(path[:at]) for at, rank in enumerate(path))}


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


Path = tuple[int, ...]
"""The ranks of a guess and its ancestors among their siblings."""


def eagle2(shape: DynamicShape, chances: Callable[[Path], list[float]]) -> list[tuple[Path, float]]:
    """EAGLE-2's growth in full: each level's k best rows get k children, then the best `total` guesses are kept.

    Returns paths with their values, level by level. chances: log confidences of a path's candidates.
    """
    values, frontier, guesses = {Path(): 0.0}, [Path()], list[Path]()
    for _ in range(shape.steps):
        level = [(*path, rank) for path in frontier for rank in range(shape.k)]
        values |= {path: values[path[:-1]] + max(chances(path[:-1])[path[-1]], LEAST_CHANCE) for path in level}
        guesses += level
        best = sorted(range(len(level)), key=lambda at: -values[level[at]])[: shape.k]
        frontier = [level[at] for at in sorted(best)]
    order = sorted(range(len(guesses)), key=lambda at: (-np.float32(values[guesses[at]]), at))
    return [(guesses[at], values[guesses[at]]) for at in sorted(order[: shape.total])]


@given(st.data())
def test_a_dynamic_tree_that_stops_growing_early_equals_the_tree_grown_to_its_last_level(data):
    k, steps = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    most = min(k + (steps - 1) * k**2, MAX_ROWS - 1)
    shape = DynamicShape(k, steps, data.draw(st.integers(min(steps, most), most)))
    sharpness = data.draw(st.sampled_from([0.0, 0.5, 2.0, 6.0]))  # 0: all guesses are sure, so all values are equal
    seed = data.draw(st.integers(0, 2**16))

    def chances(path: Path) -> list[float]:
        return sorted((-sharpness * np.random.default_rng((seed, *path)).integers(0, 4, k)).tolist(), reverse=True)

    growth, paths = growth_of(99, shape), {0: ()}
    while not growth.finished:
        first, rows = len(growth.tokens), growth.frontier
        confidences = [chances(paths[row]) for row in rows]
        growth.extend([list(range(k))] * len(rows), confidences, confidences)
        new = range(first, len(growth.tokens))
        paths |= {row: (*paths[growth.parents[row]], growth.tokens[row]) for row in new}
    tree = DraftTree(*growth.arrays())
    found: list[Path] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        found.append((*found[parent], int(token)))
    expected = eagle2(shape, chances)
    assert found[1:] == [path for path, _ in expected]
    np.testing.assert_allclose(tree.values[1:], [value for _, value in expected], rtol=1e-6)


def test_a_dynamic_tree_stops_growing_once_no_row_is_above_its_least_guess():
    """The best 12 guesses are on the first two levels: the second's rows have children, all below these 12."""
    shape = DynamicShape(4, 12, 12)
    tree, processed = grown(shape, np.array([-2.0, -2.1, -2.2, -2.3]))
    assert tree.depths.max() == 2
    assert processed == 1 + 4 + 4
    assert shape.forwarded == 1 + 11 * 4


@pytest.mark.timeout(10)
def test_scores_of_more_rows_than_a_tree_has_are_an_error():
    """Of two levels, of which the second has no row as nothing may follow the root: once a loop without an end."""
    draft_round = DraftRound(None, LevelShape((2, 1)), 3, growth_of(99, LevelShape((2, 1))), Calibration())
    scores = [[-0.5, -0.7]] * 2
    with pytest.raises(ValueError, match="scores of 2 rows more than the tree has"):
        draft_round.extend([[], [5, 6], [5, 6]], [[], *scores], [[], *scores])


def until(h: float, k: int, steps: int, total: int, least: float = 0.0) -> UntilShape:
    return UntilShape(DynamicShape(k, steps, total), h, least)


def grown_by_paths(shape: TreeShape, chances: Callable[[Path], list[float]]) -> tuple[DraftTree, list[Path], int]:
    """A tree by the drafter's growth, the path of each row, and the number of levels that were drafted."""
    growth, paths, levels = growth_of(99, shape), {0: ()}, 0
    while not growth.finished:
        first, rows = len(growth.tokens), growth.frontier
        confidences = [chances(paths[row]) for row in rows]
        growth.extend([list(range(shape.width))] * len(rows), confidences, confidences)
        paths |= {row: (*paths[growth.parents[row]], growth.tokens[row]) for row in range(first, len(growth.tokens))}
        levels += 1
    tree = DraftTree(*growth.arrays())
    found: list[Path] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        found.append((*found[parent], int(token)))
    return tree, found, levels


def until_in_full(shape: UntilShape, chances: Callable[[Path], list[float]]) -> tuple[list[Path], int]:
    """The rule of `until` on full levels: a level is drafted below the k best rows of the one before, while these are
    on the text's path with a chance above 1 - h; then the best `total` guesses of value above `least` are kept.

    Rows that cannot be among the kept guesses get no children, and do not count. Returns the paths of the guesses,
    level by level, and the number of levels.
    """
    tree, values, frontier, guesses, levels = shape.tree, {Path(): 0.0}, [Path()], list[Path](), 0
    while True:
        levels += 1
        level = [(*path, rank) for path in frontier for rank in range(tree.k)]
        values |= {path: values[path[:-1]] + max(chances(path[:-1])[path[-1]], LEAST_CHANCE) for path in level}
        guesses += [path for path in level if math.exp(values[path]) > shape.least]
        ranked = sorted(guesses, key=lambda path: -values[path])  # stable: of equals the earlier first
        bound = values[ranked[tree.total - 1]] if len(ranked) >= tree.total else -math.inf
        worth = [path for path in level if path in guesses and values[path] > bound]
        best = sorted(range(len(worth)), key=lambda at: -values[worth[at]])[: tree.k]
        frontier = [worth[at] for at in sorted(best)]
        leaves = 1 - sum(math.exp(values[path]) for path in frontier)
        if levels == tree.steps or not frontier or not leaves < shape.h:
            break
    order = sorted(range(len(guesses)), key=lambda at: (-np.float32(values[guesses[at]]), at))
    return [guesses[at] for at in sorted(order[: tree.total])], levels


@given(st.data())
def test_a_tree_that_stops_in_time_equals_the_rule_on_full_levels(data):
    k, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    most = min(k + (steps - 1) * k**2, MAX_ROWS - 1)
    total = data.draw(st.integers(min(steps, most), most))
    h, least = data.draw(st.integers(1, 999)) / 1000, data.draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5]))
    shape = until(h, k, steps, total, least)
    sharpness = data.draw(st.sampled_from([0.0, 0.2, 0.5, 2.0]))  # 0: every first guess is sure
    seed = data.draw(st.integers(0, 2**16))

    def chances(path: Path) -> list[float]:
        """A distribution over the candidates and `none of them`."""
        weights = np.sort(np.random.default_rng((seed, *path)).exponential(sharpness, k + 1))[::-1]
        return (-np.cumsum(weights)[:k]).tolist()

    tree, found, levels = grown_by_paths(shape, chances)
    expected, drafted = until_in_full(shape, chances)
    assert found[1:] == expected
    assert levels == drafted
    assert tree.rows <= shape.rows and tree.depth <= shape.depth


CHAIN_CHANCES = (0.9, 0.8, 0.9, 0.5, 0.9, 0.9)
"""Of the guesses of a chain; all before and with them: 0.9, 0.72, 0.648, 0.324, 0.2916, 0.26244."""


def chain_chances(path: Path) -> list[float]:
    return [math.log(CHAIN_CHANCES[len(path)])]


@pytest.mark.parametrize(
    "h, guesses",
    [(0.05, 1), (0.0999, 1), (0.1001, 2), (0.2799, 2), (0.2801, 3), (0.35, 3), (0.36, 4), (0.7, 5), (0.72, 6)],
)
def test_a_chain_stops_after_the_guess_at_which_the_chance_of_a_rejection_reaches_h(h, guesses):
    tree, _, levels = grown_by_paths(until(h, 1, 6, 6), chain_chances)
    assert (tree.guesses, levels) == (guesses, guesses)
    np.testing.assert_allclose(np.exp(tree.values), np.cumprod([1.0, *CHAIN_CHANCES[:guesses]]), rtol=1e-6)


def test_a_guess_not_worth_its_verification_is_left_out_and_ends_a_chain():
    """The fourth guess is reached with 0.324: it is drafted, as its parent has 0.648, and left out."""
    tree, _, levels = grown_by_paths(until(0.6, 1, 6, 6, least=0.33), chain_chances)
    assert (tree.guesses, levels) == (3, 4)
    tree, _, levels = grown_by_paths(until(0.6, 1, 6, 6, least=0.95), chain_chances)
    assert (tree.guesses, levels) == (0, 1)  # the root alone: a round of plain decoding


def test_a_tree_stops_by_the_rows_that_would_get_children_together():
    """Two rows of 0.5 and 0.3 leave 0.2: a chain of the first alone would leave 0.5."""
    level = [math.log(0.5), math.log(0.3), math.log(0.1)]
    assert grown_by_paths(until(0.19, 2, 2, 6), lambda path: level[:2])[2] == 1
    assert grown_by_paths(until(0.21, 2, 2, 6), lambda path: level[:2])[2] == 2
    assert grown_by_paths(until(0.21, 1, 2, 2), lambda path: level[:1])[2] == 1


def test_no_shape_processes_more_rows_than_most_processed():
    for max_rows, max_depth in ((64, 16), (8, 16), (2, 1), (64, 63), (32, 4)):
        most = most_processed(max_rows, max_depth)
        steps = min(max_depth, max_rows - 1)
        assert DynamicShape(MAX_K, steps, min(max_rows - 1, MAX_K + (steps - 1) * MAX_K**2)).forwarded <= most
        assert LevelShape((1,) * steps).forwarded <= most
        assert max_rows - 1 <= most or max_rows > MAX_ROWS
