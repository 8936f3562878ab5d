"""The sampled walks keep the target's law, and variants that are known to be lossy do not: by enumeration of all drafts
and all coins of tiny vocabularies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import tree_kernels.sampled_walk.cpu as served
import tree_kernels.sampled_walk.reference as reference
from tree_kernels.sampled_walk import NoiseCoins, SparseLaw, drawn_order, law_of_scores, lenient_greedy
from tree_kernels.tree_walk import Walk

from tests.support.enumeration import (
    LOSSLESS,
    LOSSY,
    Law,
    Laws,
    Tree,
    Verify,
    context,
    law_of,
    siblings,
    trees,
    walks,
    worst,
)

MULTI_STEP = [
    pytest.param(reference.multi_step, id="reference"),
    pytest.param(served.multi_step, id="served"),
]
BLOCK = [pytest.param(reference.block, id="reference"), pytest.param(served.block, id="served")]


@pytest.mark.parametrize("verify", MULTI_STEP)
@pytest.mark.parametrize(
    "widths, vocabulary, known",
    [
        ((1,), 5, None),
        ((2,), 5, None),
        ((4,), 5, None),
        ((4,), 5, 4),
        ((2,), 5, 2),
        ((1, 1, 1), 3, None),
        ((1, 1), 4, 2),
        ((2, 1), 3, None),
        ((2, 2), 3, None),
        ((1, 2), 4, 3),
    ],
    ids=str,
)
def test_multi_step_sampling_keeps_the_joint_law(verify, widths, vocabulary, known):
    """known: tokens of the drafter's law, of which the others are not guessed."""
    assert worst(widths, verify, vocabulary, seeds=2, known=known) < LOSSLESS


@pytest.mark.long
@pytest.mark.parametrize("verify", MULTI_STEP)
@pytest.mark.parametrize("widths, vocabulary", [((4,), 6), ((2, 2), 3), ((4, 1), 4), ((1, 1, 1), 4)], ids=str)
def test_multi_step_sampling_keeps_the_joint_law_over_more_laws(verify, widths, vocabulary):
    assert worst(widths, verify, vocabulary, seeds=6) < LOSSLESS


@pytest.mark.parametrize("verify", BLOCK)
@pytest.mark.parametrize(
    "guesses, vocabulary, known",
    [(1, 5, None), (2, 4, None), (2, 4, 2), (3, 3, None), (3, 3, 2), (4, 2, None)],
    ids=str,
)
def test_block_verification_keeps_the_joint_law(verify, guesses, vocabulary, known):
    assert worst((1,) * guesses, verify, vocabulary, seeds=3, known=known) < LOSSLESS


def accepted(laws: Laws, guesses: int, verify: Verify) -> float:
    """Mean number of accepted guesses of a chain."""
    mean = 0.0
    for tree, chance in trees(laws, (1,) * guesses):
        mean += sum(chance * mass * (len(walked.tokens) - 1) for walked, mass in walks(laws, tree, verify))
    return mean


def test_block_verification_accepts_at_least_as_many_guesses_as_one_by_one():
    means = [
        (accepted(laws, 3, served.block), accepted(laws, 3, served.multi_step))
        for laws in (Laws(seed, 3, 4) for seed in range(8))
    ]
    assert all(together > one_by_one - LOSSLESS for together, one_by_one in means)
    assert any(together > 1.01 * one_by_one for together, one_by_one in means)


# --- variants that are known to be lossy: docs/design/verification.md#what-a-decision-may-depend-on -------------------


def rows_kept(tree: Tree, kept: Sequence[int]) -> Tree:
    """The tree of these rows, in this order."""
    place = {row: index for index, row in enumerate(kept)}
    return [tree[0][row] for row in kept], [place.get(tree[1][row], -1) for row in kept]


def sorted_by_probability(tree: Tree, laws: Laws) -> Tree:
    """STree's static tree at temperature 1: draws without replacement, then sorted by the drafter's logits."""

    def chance(row: int) -> float:
        law = laws.draft[context(tree, tree[1][row])]
        return float(law.probabilities[law.ids.tolist().index(tree[0][row])])

    return rows_kept(tree, [0, *sorted(range(1, len(tree[0])), key=chance, reverse=True)])


def more_probable_alone(tree: Tree, laws: Laws) -> Tree:
    """Pruning by value: of the siblings that were drawn, the likeliest is kept."""
    return ([each[:2] for each in sorted_by_probability(tree, laws)][0], [-1, 0])


def unlikely_left_out(tree: Tree, laws: Laws) -> Tree:
    """Draws of low probability are discarded, and the target's law is used as if there had been none."""
    law = laws.draft[()]
    probs = dict(zip(law.ids.tolist(), law.probabilities.tolist(), strict=True))
    return rows_kept(tree, [0, *(row for row in range(1, len(tree[0])) if probs[tree[0][row]] >= 0.25)])


def most_likely_as_if_drawn(tree: Tree, laws: Laws) -> Tree:
    """The drafter's two likeliest tokens, tested as if they had been drawn."""
    law = laws.draft[()]
    return [0, *law.ids[np.argsort(-law.probabilities)[:2]].tolist()], [-1, 0, 0]


def best_of_a_drawn_tree(tree: Tree, laws: Laws) -> Tree:
    """EAGLE-2's rerank of a sampled tree: the three rows of greatest value."""

    def value(row: int) -> float:
        if not row:
            return 1.0
        law = laws.draft[context(tree, tree[1][row])]
        own = float(law.probabilities[law.ids.tolist().index(tree[0][row])])
        return value(tree[1][row]) * own

    return rows_kept(tree, sorted(sorted(range(len(tree[0])), key=lambda row: (-value(row), row))[:4]))


@pytest.mark.parametrize("verify", MULTI_STEP)
@pytest.mark.parametrize(
    "widths, vocabulary, changed",
    [
        ((2,), 4, sorted_by_probability),
        ((2,), 4, more_probable_alone),
        ((1,), 4, unlikely_left_out),
        ((2,), 4, most_likely_as_if_drawn),
        ((2, 2), 3, best_of_a_drawn_tree),
    ],
)
def test_a_drawn_tree_that_is_sorted_pruned_or_not_drawn_loses_the_law(verify, widths, vocabulary, changed):
    assert worst(widths, verify, vocabulary, seeds=3, changed=changed) > LOSSY


def with_replacement(tokens, parents, target_probs, draft_laws, coins) -> Walk:
    """The rule for siblings drawn with replacement: the proposal stays as it was."""
    residual = target_probs(0)
    proposal = reference.dense(draft_laws[0], len(residual))
    for row in range(1, len(tokens)):
        if coins.accept(row, residual[tokens[row]] / proposal[tokens[row]]):
            return Walk((0, row), (tokens[row], coins.draw(row, target_probs(row))), (row - 1,))
        residual = np.maximum(residual - proposal, 0)
        residual /= residual.sum() or 1.0
    return Walk((0,), (coins.draw(0, residual if residual.any() else target_probs(0)),), ())


def without_residual(tokens, parents, target_probs, draft_laws, coins) -> Walk:
    """The guess is tested as it should be; after a rejection the token is drawn from the target's law."""
    proposal = reference.dense(draft_laws[0], len(target_probs(0)))
    if coins.accept(1, target_probs(0)[tokens[1]] / proposal[tokens[1]]):
        return Walk((0, 1), (tokens[1], coins.draw(1, target_probs(1))), (0,))
    return Walk((0,), (coins.draw(0, target_probs(0)),), ())


def lenient(verify: Verify) -> Verify:
    return lambda *given: verify(*given, lenience=0.7)


@pytest.mark.parametrize(
    "widths, verify",
    [
        ((2,), with_replacement),
        ((1,), without_residual),
        ((1,), lenient(reference.multi_step)),
        ((2,), lenient(served.multi_step)),
    ],
    ids=["rule for draws with replacement", "no residual", "lenience, reference", "lenience, served"],
)
def test_rules_that_are_known_to_be_lossy_are_detected(widths, verify):
    assert worst(widths, verify, vocabulary=4, seeds=3) > LOSSY


@pytest.mark.parametrize("verify", MULTI_STEP)
def test_lenience_raises_no_token_above_its_probability_divided_by_the_lenience(verify):
    for seed in range(6):
        laws = Laws(seed, 4, 1)
        first: Law = defaultdict(float)
        for text, mass in law_of(laws, trees(laws, (1,)), lenient(verify)).items():
            first[text[:1]] += mass
        assert all(mass <= laws.target[()][text[0]] / 0.7 + LOSSLESS for text, mass in first.items())


# --- served decisions equal those of the reference, on real coins -----------------------------------------------------


def drawn_tree(rng: np.random.Generator, widths: Sequence[int], vocabulary: int, known: int, base: int):
    """A tree drawn as a drafter draws it, its laws, and the target's law of each row."""
    tokens, parents, frontier, laws = [0], [-1], [0], dict[int, SparseLaw]()
    for width in widths:
        below = list[int]()
        for row in frontier:
            laws[row] = law_of_scores(rng.permutation(vocabulary)[:known], rng.normal(0, 3, known))
            below += range(len(tokens), len(tokens) + width)
            tokens += laws[row].ids[drawn_order(laws[row], 5, base, row)[:width]].tolist()
            parents += [row] * width
        frontier = below
    return tokens, parents, laws, rng.dirichlet(np.full(vocabulary, 0.3), len(tokens))


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 2, 1), (4, 1), (4, 4)], ids=str)
def test_served_decisions_equal_the_references_on_the_same_coins(widths):
    rng, lengths = np.random.default_rng(0), set()
    for base in range(300):
        tokens, parents, laws, target = drawn_tree(rng, widths, 50, 8, base)
        target *= 1.0 + 1e-7  # the sum of float32 probabilities is not exactly 1
        given = tokens, parents, lambda row, target=target: target[row], laws
        pairs = [(reference.multi_step, served.multi_step)]
        if set(widths) == {1}:
            pairs.append((reference.block, served.block))
        for plain, fast in pairs:
            walked = plain(*given, NoiseCoins(3, base))
            assert fast(*given, NoiseCoins(3, base)) == walked
            lengths.add(len(walked.tokens))
    assert len(lengths) > 1


def test_draws_of_a_sparse_law_follow_it_without_replacement():
    """Chi-square over 6,000 rounds with a fixed seed; correct draws fail this once in 1,000 choices of the seed."""
    from scipy.stats import chisquare

    law = SparseLaw(np.array([7, 2, 9, 4]), np.array([0.5, 0.25, 0.25, 0.0]))
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for base in range(6_000):
        order = law.ids[drawn_order(law, 11, base, 3)].tolist()
        assert sorted(order) == [2, 7, 9]
        counts[tuple(order[:2])] += 1
    expected = dict(siblings(law, 2))
    observed = [counts[pair] for pair in expected]
    assert chisquare(observed, [6_000 * chance for chance in expected.values()]).pvalue > 1e-3


@pytest.mark.parametrize("other", ["base", "row", "seed", "sample index"])
def test_draws_that_share_all_but_one_key_differ(other):
    law = law_of_scores(np.arange(32), np.zeros(32))
    keys = {"base": (1, 6, 2, 0), "row": (1, 5, 3, 0), "seed": (2, 5, 2, 0), "sample index": (1, 5, 2, 1)}
    assert drawn_order(law, *keys[other]) != drawn_order(law, 1, 5, 2, 0) == drawn_order(law, 1, 5, 2, 0)


def test_a_law_of_scores_has_no_probability_of_zero_and_follows_the_scores():
    law = law_of_scores(np.array([3, 1, 2]), np.array([0.0, -1.0, -np.inf]))
    assert law.probabilities.sum() == pytest.approx(1, abs=1e-6)
    assert law.probabilities[2] == pytest.approx(1e-6, rel=1e-3)
    assert law.probabilities[0] / law.probabilities[1] == pytest.approx(math.e, rel=1e-4)


def test_a_guess_of_probability_zero_is_never_accepted():
    target, law = np.array([0.5, 0.5, 0.0]), {0: SparseLaw(np.array([2]), np.array([1.0]))}
    for base in range(200):
        for verify in (reference.multi_step, served.multi_step, reference.block, served.block):
            walked = verify([0, 2], [-1, 0], lambda row: target, law, NoiseCoins(0, base))
            assert len(walked.tokens) == 1 and walked.tokens[0] != 2


def test_where_drafter_and_target_agree_every_first_draw_is_accepted():
    law = SparseLaw(np.arange(4), np.array([0.5, 0.25, 0.125, 0.125]))
    for base in range(200):
        tokens = [0, *law.ids[drawn_order(law, 9, base, 0)[:1]], *law.ids[drawn_order(law, 9, base, 1)[:1]]]
        for verify in (reference.multi_step, served.multi_step, reference.block, served.block):
            walked = verify(tokens, [-1, 0, 1], lambda row: law.probabilities, {0: law, 1: law}, NoiseCoins(1, base))
            assert walked.path == (0, 1, 2)


def test_block_verification_refuses_a_tree():
    for verify in (reference.block, served.block):
        with pytest.raises(ValueError, match="^parents: block verification needs a chain"):
            verify([0, 1, 2], [-1, 0, 0], lambda row: np.ones(3), {}, NoiseCoins(0, 1))


def test_the_lenient_greedy_walk_takes_a_guess_that_is_nearly_the_likeliest():
    scores = np.log(np.array([0.5, 0.4, 0.1]))
    walked = {
        lenience: lenient_greedy([0, 2, 1], [-1, 0, 0], lambda row: scores, lenience).tokens
        for lenience in (1.0, 0.7, 0.1)
    }
    assert walked == {1.0: (0,), 0.7: (1, 0), 0.1: (2, 0)}
    assert lenient_greedy([0, 1, 0], [-1, 0, 0], lambda row: scores, 0.5).tokens == (0, 0)  # the likeliest comes first
