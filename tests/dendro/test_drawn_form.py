"""Trees of drawn guesses whose form, or whose arm, depends on what was drawn: which dependence keeps the law of what is
emitted, by enumeration of all draws and all coins."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import tree_kernels.sampled_walk.cpu as served
import tree_kernels.sampled_walk.reference as reference
from dendro.drawn_form import DrawnForm, has_drawn_form, undrawn
from dendro.modes import VerificationMode
from dendro.shapes import DynamicShape, LevelShape, TreeShape
from dendro.text import Sampling
from dendro.tree import ChildLaw, DraftTree
from tree_kernels.sampled_walk import SparseLaw
from tree_kernels.tree_walk import Walk

from drafter_service.sampled import GuessDraws, drawn_growth_of
from tests.support.enumeration import (
    LOSSLESS,
    LOSSY,
    ROOT,
    Law,
    Laws,
    Text,
    Tree,
    Verify,
    add_rest,
    context,
    distance,
    dynamic_trees,
    law_of,
    siblings,
    trees,
    unchanged,
    walks,
)

MULTI_STEP = [
    pytest.param(reference.multi_step, id="reference"),
    pytest.param(served.multi_step, id="served"),
]


def worst_of(shape: DynamicShape, verify: Verify, vocabulary: int, seeds: int, changed=unchanged) -> float:
    """The greatest total variation between emitted tokens and target, over random laws."""
    found = []
    for seed in range(seeds):
        laws = Laws(seed, vocabulary, shape.steps + 1)
        law = law_of(laws, dynamic_trees(laws, shape), verify, changed)
        assert abs(sum(law.values()) - 1) < LOSSLESS
        found.append(distance(law, laws.joint()))
    return max(found)


@pytest.mark.parametrize("verify", MULTI_STEP)
@pytest.mark.parametrize(
    "shape, vocabulary",
    [
        (DynamicShape(2, 2, 3), 3),
        (DynamicShape(2, 2, 4), 3),
        (DynamicShape(3, 2, 4), 4),
        (DynamicShape(2, 3, 4), 3),
        (DynamicShape(1, 3, 3), 3),
    ],
    ids=str,
)
def test_dynamic_trees_of_drawn_guesses_keep_the_joint_law(verify, shape, vocabulary):
    assert worst_of(shape, verify, vocabulary, seeds=3) < LOSSLESS


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("verify", MULTI_STEP)
@pytest.mark.parametrize("shape, vocabulary", [(DynamicShape(2, 3, 5), 3), (DynamicShape(3, 2, 6), 4)], ids=str)
def test_larger_dynamic_trees_of_drawn_guesses_keep_the_joint_law(verify, shape, vocabulary):
    assert worst_of(shape, verify, vocabulary, seeds=3) < LOSSLESS


@pytest.mark.parametrize("shape", [DynamicShape(2, 2, 3), DynamicShape(2, 3, 4), DynamicShape(3, 2, 4)], ids=str)
def test_the_form_of_a_dynamic_tree_depends_on_the_tokens_drawn_above_and_keeps_its_bounds(shape):
    """Only then is there something to prove."""
    forms: set[tuple[int, ...]] = set()
    laws = Laws(0, 4, shape.steps + 1)
    for (tokens, parents), _ in dynamic_trees(laws, shape):
        forms.add(tuple(parents))
        assert len(tokens) <= shape.rows and max(map(parents.count, range(len(tokens)))) <= shape.k
        assert len(context((tokens, parents), len(tokens) - 1)) <= shape.steps
    assert len(forms) > 1


# --- tempting variants, which lose the law ----------------------------------------------------------------------------


def value_of(tree: Tree, laws: Laws, row: int) -> float:
    """The product of the drafter's probabilities of a row's path."""
    value = 1.0
    while row:
        law = laws.draft[context(tree, tree[1][row])]
        value *= float(law.probabilities[law.ids.tolist().index(tree[0][row])])
        row = tree[1][row]
    return value


def only(tree: Tree, kept: list[int]) -> Tree:
    place = {row: index for index, row in enumerate(kept)}
    return [tree[0][row] for row in kept], [place.get(tree[1][row], -1) for row in kept]


def reranked(tree: Tree, laws: Laws) -> Tree:
    """EAGLE-2's last step: the guesses of greatest value are kept, all but one here, in the order of their rows."""
    values = [-math.inf, *(-value_of(tree, laws, row) for row in range(1, len(tree[0])))]
    return only(tree, sorted(sorted(range(len(tree[0])), key=lambda row: (values[row], row))[:-1]))


def best_sibling_first(tree: Tree, laws: Laws) -> Tree:
    """The root's children in the order of their probabilities, each before its own children."""
    children = [row for row, above in enumerate(tree[1]) if above == 0]
    children.sort(key=lambda row: -value_of(tree, laws, row))
    return only(tree, [0, *children, *(row for row, above in enumerate(tree[1]) if above > 0)])


def counted_after_the_draw(tree: Tree, laws: Laws) -> Tree:
    """As a ranked tree grows: of the candidates of a level, those above a bound become rows."""
    kept = [0]
    for row in range(1, len(tree[0])):
        if tree[1][row] in kept and value_of(tree, laws, row) > 0.2:
            kept.append(row)
    return only(tree, kept)


@pytest.mark.parametrize("verify", MULTI_STEP)
@pytest.mark.parametrize("changed", [reranked, best_sibling_first, counted_after_the_draw])
def test_a_dynamic_tree_that_is_pruned_or_sorted_after_its_draws_loses_the_law(verify, changed):
    assert worst_of(DynamicShape(2, 2, 4), verify, 3, seeds=3, changed=changed) > LOSSY


# --- a policy picks the arm of each round -----------------------------------------------------------------------------


class SeenRound(NamedTuple):
    """What a policy sees of a round: all of it."""

    tree: Tree
    walked: Walk


ARMS: list[TreeShape] = [
    LevelShape(()),
    LevelShape((1,)),
    LevelShape((2,)),
    LevelShape((1, 1)),
    DynamicShape(2, 2, 3),
]
Choose = Callable[[SeenRound | None], TreeShape]


def drawn_trees(laws: Laws, shape: TreeShape) -> Iterator[tuple[Tree, float]]:
    if isinstance(shape, DynamicShape):
        return dynamic_trees(laws, shape)
    assert isinstance(shape, LevelShape)
    return trees(laws, shape.widths)


def law_of_two_rounds(laws: Laws, verify: Verify, choose: Choose, second=unchanged) -> Law:
    """The joint law of the first `laws.length` tokens: of two rounds, then the target's own.

    second: what is done to a tree of the second round between draw and verification
    """
    law: Law = defaultdict(float)
    for tree, drawn in drawn_trees(laws, choose(None)):
        for walked, mass in walks(laws, tree, verify):
            text: Text = walked.tokens
            if len(text) == laws.length:
                law[text] += drawn * mass
                continue
            rest = laws.after(text)
            for other, chance in drawn_trees(rest, choose(SeenRound(tree, walked))):
                for again, share in walks(rest, second(other, rest), verify):
                    add_rest(law, laws, (*text, *again.tokens), drawn * mass * chance * share)
    return law


def longer_laws(seed: int) -> Laws:
    """Laws that compare 3 tokens, and are known of all texts that the trees of two rounds reach."""
    laws = Laws(seed, 3, 5)
    laws.length = 3
    return laws


def by_all_it_saw(seen: SeenRound | None) -> TreeShape:
    """An arm for every tree, path and token of the round before, of accepted and of rejected guesses."""
    if seen is None:
        return DynamicShape(2, 2, 3)
    tokens, parents = seen.tree
    return ARMS[(sum(tokens) + 2 * len(tokens) + parents[-1] + 3 * len(seen.walked.path) + seen.walked.tokens[0]) % 5]


@pytest.mark.parametrize("verify", MULTI_STEP)
def test_a_policy_that_chooses_by_all_earlier_rounds_keeps_the_joint_law(verify):
    chosen = set()

    def choose(seen: SeenRound | None) -> TreeShape:
        chosen.add(by_all_it_saw(seen))
        return by_all_it_saw(seen)

    for seed in range(3):
        laws = longer_laws(seed)
        assert distance(law_of_two_rounds(laws, verify, choose), laws.joint()) < LOSSLESS
    assert chosen == set(ARMS)


@pytest.mark.parametrize("verify", [*MULTI_STEP, reference.block, served.block])
def test_a_policy_that_chooses_the_length_of_chains_by_earlier_rounds_keeps_the_joint_law(verify):
    def choose(seen: SeenRound | None) -> TreeShape:
        return LevelShape((1,) * (1 if seen is None else (seen.tree[0][1] + len(seen.walked.path)) % 3))

    for seed in range(3):
        laws = longer_laws(seed)
        assert distance(law_of_two_rounds(laws, verify, choose), laws.joint()) < LOSSLESS


def off_after_all(tree: Tree, laws: Laws) -> Tree:
    """A policy that sees the draws before it chooses: without trees where the first guess is improbable."""
    return tree if value_of(tree, laws, 1) > 0.4 else ROOT


@pytest.mark.parametrize("verify", MULTI_STEP)
def test_a_policy_that_sees_the_rounds_draws_loses_the_law(verify):
    def choose(seen: SeenRound | None) -> TreeShape:
        return LevelShape((1,))

    found = []
    for seed in range(3):
        laws = longer_laws(seed)
        found.append(distance(law_of_two_rounds(laws, verify, choose, off_after_all), laws.joint()))
    assert max(found) > LOSSY


# --- what a drafter draws, and what a router accepts ------------------------------------------------------------------


def drafted(shape: DynamicShape, seed: int, spread: float) -> DraftTree:
    """A tree as a drafter draws it, from random scores."""
    rng, sampling = np.random.default_rng(seed), Sampling(1.0, seed=seed, mode=VerificationMode.MULTI_STEP)
    growth, draws = drawn_growth_of(7, shape), GuessDraws(sampling, 40)
    while not growth.finished:
        scores = -np.sort(-rng.normal(0, spread, (len(growth.frontier), 32)))
        ids = [rng.permutation(100)[:32].tolist() for _ in growth.frontier]
        growth.extend(*draws.drawn(growth, ids, scores.tolist()))
    return DraftTree(*growth.arrays(), laws=tuple(draws.laws))


def less(tree: DraftTree, row: int) -> DraftTree:
    """The tree without a row that has no children."""
    kept = [each for each in range(tree.rows) if each != row]
    parents = np.array([parent - (parent > row) for parent in tree.parents[kept].tolist()])
    above = set(parents[1:].tolist())
    laws = [ChildLaw(law.row - (law.row > row), law.ids, law.probabilities) for law in tree.laws]
    return DraftTree(tree.tokens[kept], parents, tree.values[kept], laws=tuple(law for law in laws if law.row in above))


@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
@pytest.mark.parametrize("shape", [DynamicShape(3, 3, 8), DynamicShape(6, 5, 24), DynamicShape(1, 5, 5)], ids=str)
def test_a_drafters_tree_has_the_form_of_its_laws_and_no_tree_without_one_of_its_guesses_has(shape, spread):
    forms = set()
    for seed in range(12):
        tree = drafted(shape, seed, spread)
        forms.add(tuple(tree.parents.tolist()))
        assert has_drawn_form(tree, shape)
        assert 0 < tree.guesses <= shape.total and tree.depth <= shape.steps and len(tree.laws) <= shape.forwarded
        assert (tree.values[1:] <= tree.values[tree.parents[1:]]).all()
        for row in range(1, tree.rows):
            if not tree.children(row):
                assert not has_drawn_form(less(tree, row), shape)
    assert len(forms) == 1 if shape.k == 1 else len(forms) > 1


def test_a_tree_of_other_tokens_than_its_laws_or_with_a_guess_too_many_has_not_their_form():
    shape = DynamicShape(2, 2, 3)
    law = ChildLaw(0, np.array([4, 5, 6]), np.array([0.5, 0.25, 0.25]))
    wide = DrawnForm(shape).widths([law])[0]
    for tokens in ([7, 9], [7, *[4, 5, 6][: wide + 1]], [7]):
        parents = [-1] + [0] * (len(tokens) - 1)
        tree = DraftTree.of(tokens, parents)
        tree = DraftTree(tree.tokens, tree.parents, tree.values, laws=(law,) if len(tokens) > 1 else ())
        assert not has_drawn_form(tree, shape)


def test_the_mass_that_draws_leave_is_exact_up_to_one_draw_and_not_below_it_for_more():
    for seed in range(20):
        law = Laws(seed, 5, 0).draft[()]
        probs = dict(zip(law.ids.tolist(), law.probabilities.tolist(), strict=True))
        masses = undrawn(law, 3)
        for draws, mass in enumerate(masses):
            left = sum(chance * (1 - sum(map(probs.__getitem__, drawn))) for drawn, chance in siblings(law, draws))
            assert mass >= left - 1e-12 and (draws > 1 or mass == pytest.approx(left, abs=1e-12))
        assert masses[0] == pytest.approx(1) and masses == sorted(masses, reverse=True)


def test_a_law_of_few_tokens_gives_no_more_children_than_it_has():
    law = SparseLaw(np.array([3, 5, 8]), np.array([0.5, 0.5, 0.0]))
    assert len(undrawn(law, 16)) == 3
    assert DrawnForm(DynamicShape(4, 1, 4)).widths([law]) == [2]


def test_likely_tokens_make_deep_trees_and_even_laws_wide_ones():
    peaked = SparseLaw(np.arange(8), np.array([0.93, *[0.01] * 7]))
    even = SparseLaw(np.arange(8), np.full(8, 0.125))
    depths = []
    for law in (peaked, even):
        form, levels, frontier = DrawnForm(DynamicShape(4, 4, 8)), 0, [0]
        while frontier:
            widths = form.widths([law] * len(frontier))
            frontier = form.descend([law.ids[:width].tolist() for width in widths])
            levels += 1
        depths.append(levels)
    assert depths == [4, 2]
