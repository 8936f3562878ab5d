"""Emitted tokens have the target's law, by exact enumeration in fractions where possible.

Lossy rules are tested too, to show that the measure detects a loss.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from tree_kernels.noise import gumbel_noise
from tree_kernels.tree_walk import walk

from tests.support.enumeration import LOSSLESS, LOSSY, context

VOCABULARY = 3
TOKENS = range(VOCABULARY)
Text = tuple[int, ...]
Probs = tuple[Fraction, ...]
Law = dict[Text, Fraction]
Tree = tuple[list[int], list[int]]  # tokens, parents; row 0 is the root


def random_probs(rng: np.random.Generator, vocabulary: int = VOCABULARY) -> Probs:
    """Random probabilities as fractions, so that sums are exact; some are zero."""
    weights = [int(weight) for weight in rng.integers(0, 12, vocabulary)]
    weights[int(rng.integers(vocabulary))] += 1
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


class LawModel:
    """A random law of the next token after each text, fixed by the seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.probs = {text: random_probs(rng) for length in range(4) for text in product(TOKENS, repeat=length)}

    def joint(self, length: int) -> Law:
        law: Law = {(): Fraction(1)}
        for _ in range(length):
            law = {(*text, t): mass * self.probs[text][t] for text, mass in law.items() for t in TOKENS}
        return law


def total_variation(one: Law, other: Law) -> float:
    return float(sum(abs(one.get(text, Fraction(0)) - other.get(text, Fraction(0))) for text in {*one, *other}) / 2)


# --- every tree, every draw of the target ----------------------------------------------------------------------------


def all_trees(guesses: int) -> Iterator[Tree]:
    for parents in product(*(range(row) for row in range(1, guesses + 1))):
        for tokens in product(TOKENS, repeat=guesses):
            if len(set(zip(parents, tokens, strict=True))) == guesses:
                yield [0, *tokens], [-1, *parents]


class NextDraw(Exception):
    def __init__(self, row: int) -> None:
        self.row = row


def emitted_law(tree: Tree, model: LawModel) -> Law:
    """The law of a walk's emitted tokens, over every draw of the target at every visited row."""
    law: Law = defaultdict(Fraction)
    waiting: list[tuple[Text, Fraction]] = [((), Fraction(1))]
    while waiting:
        script, mass = waiting.pop()
        drawn = iter(script)

        def pick(row: int, drawn: Iterator[int] = drawn) -> int:
            for token in drawn:
                return token
            raise NextDraw(row)

        try:
            law[walk(*tree, pick).tokens] += mass
        except NextDraw as draw:
            probs = model.probs[context(tree, draw.row)]
            waiting += [((*script, t), mass * probs[t]) for t in TOKENS if probs[t]]
    return law


def completed(law: Law, model: LawModel, length: int) -> Law:
    """The law of the first `length` tokens; shorter answers are continued by plain decoding."""
    done: Law = defaultdict(Fraction)
    waiting = list(law.items())
    while waiting:
        text, mass = waiting.pop()
        if len(text) >= length:
            done[text[:length]] += mass
        else:
            waiting += [((*text, t), mass * probs) for t, probs in enumerate(model.probs[text])]
    return done


@pytest.mark.parametrize("guesses", [0, 1, 2, 3])
def test_the_walk_keeps_the_joint_law_for_every_tree(guesses):
    model = LawModel(guesses)
    trees = list(all_trees(guesses))
    assert len(trees) == {0: 1, 1: 3, 2: 15, 3: 105}[guesses]
    for tree in trees:
        for length in (1, 2, 3):
            assert total_variation(completed(emitted_law(tree, model), model, length), model.joint(length)) < LOSSLESS


# --- trees made from the noise that the target draws with ------------------------------------------------------------


def cells(laws: list[Probs]) -> list[tuple[Fraction, Fraction]]:
    """The unit interval, cut at every boundary between two tokens of a law: (a point of the cell, the cell's mass)."""
    cuts = sorted({Fraction(0), Fraction(1), *(sum(law[:i], Fraction(0)) for law in laws for i in range(1, len(law)))})
    return [((low + high) / 2, high - low) for low, high in zip(cuts, cuts[1:], strict=False)]


def token_at(probs: Probs, point: Fraction) -> int:
    reached = Fraction(0)
    for token, mass in enumerate(probs):
        reached += mass
        if point < reached:
            return token
    raise AssertionError("a law sums to one")


Points = Sequence[Fraction]  # the noise of each position
Build = Callable[[Text, Points, LawModel, LawModel], Tree]


def guesses_of(drafter: LawModel, text: Text, points: Points, width: int) -> list[int]:
    """The drafter's token under the shared noise, then the others."""
    if len(text) >= len(points):
        return list(TOKENS[:width])
    first = token_at(drafter.probs[text], points[len(text)])
    return [first, *(t for t in TOKENS if t != first)][:width]


def two_levels(text: Text, points: Points, drafter: LawModel, widths: Callable[[Text], int]) -> Tree:
    tree: Tree = [0], [-1]
    for row in range(1 + VOCABULARY):
        if row < len(tree[0]):
            above = context(tree, row)
            for token in guesses_of(drafter, text + above, points, widths(above)):
                tree[0].append(token)
                tree[1].append(row)
    return tree


def off(text, points, drafter, target):
    return [0], [-1]


def chain(text, points, drafter, target):
    return two_levels(text, points, drafter, lambda above: 1 if len(above) < 2 else 0)


def fork(text, points, drafter, target):
    return two_levels(text, points, drafter, lambda above: 2 if len(above) < 2 else 0)


def adaptive(text, points, drafter, target):
    """Widths that depend on the tokens above and on the noise itself."""
    return two_levels(
        text, points, drafter, lambda above: (1 + (sum(above) + int(8 * points[0])) % 3) * (len(above) < 2)
    )


def spiteful(text, points, drafter, target):
    """Guesses the target's next token only if it is 0 or 2: the strongest selection bias."""
    following = token_at(target.probs[text], points[len(text)])
    return ([0, following], [-1, 0]) if following != 1 else ([0, 0, 2], [-1, 0, 0])


def decoded(build: Build, target: LawModel, drafter: LawModel, by_row: bool = False) -> Law:
    """The law of two tokens, over all noise, in as many rounds as needed. by_row: key the noise by row: a bug"""
    drawing = [target.probs[text] for length in range(2) for text in product(TOKENS, repeat=length)]
    guessing = [drafter.probs[text] for length in range(2) for text in product(TOKENS, repeat=length)]
    law: Law = defaultdict(Fraction)
    for (point0, mass0), (point1, mass1) in product(cells(drawing + guessing), repeat=2):
        points = (point0, point1)
        text: Text = ()
        while len(text) < 2:
            tree = build(text, points, drafter, target)

            def pick(row: int, text: Text = text, tree: Tree = tree, points: Points = points) -> int:
                after = text + context(tree, row)
                if len(after) >= 2:
                    return 0  # a third token; unused
                return token_at(target.probs[after], points[min(row, 1) if by_row else len(after)])

            text += walk(*tree, pick).tokens
        law[text[:2]] += mass0 * mass1
    return law


@pytest.mark.parametrize("build", [off, chain, fork, adaptive, spiteful])
@pytest.mark.parametrize("seed", [0, 1])
def test_trees_made_from_the_shared_noise_keep_the_joint_law(build, seed):
    target, drafter = LawModel(seed), LawModel(seed + 100)
    assert total_variation(decoded(build, target, drafter), target.joint(2)) < LOSSLESS


@pytest.mark.parametrize("build", [off, chain, fork])
def test_noise_keyed_by_row_instead_of_position_is_lossy(build):
    """Each round starts at row 0, so the token after a rejection repeats the noise of the one before it."""
    worst = max(
        total_variation(decoded(build, LawModel(s), LawModel(s + 100), by_row=True), LawModel(s).joint(2))
        for s in (0, 1)
    )
    assert worst > LOSSY


# --- acceptance rules for sampled siblings: lossless ones and lossy ones ---------------------------------------------


def normalised(weights: Sequence[Fraction]) -> list[Fraction]:
    total = sum(weights)
    return [weight / total for weight in weights] if total else [Fraction(0) for _ in weights]


def tried_in_turn(target: Probs, draft: Probs, siblings: Sequence[int], rule: str) -> list[Fraction]:
    """The law of the emitted token, given the siblings. Rules: one_hot, replaced (drawn with), removed (without)."""
    out = [Fraction(0) for _ in target]
    alive, residual, proposal = Fraction(1), list(target), list(draft)
    for token in siblings:
        if rule == "one_hot":
            proposal = [Fraction(int(t == token)) for t in range(len(target))]
        accept = min(Fraction(1), residual[token] / proposal[token]) if proposal[token] else Fraction(1)
        out[token] += alive * accept
        alive *= 1 - accept
        if not alive:
            return out
        residual = normalised([max(r - q, Fraction(0)) for r, q in zip(residual, proposal, strict=True)])
        if rule == "removed":
            proposal = normalised([Fraction(0) if t == token else q for t, q in enumerate(proposal)])
    return [mass + alive * r for mass, r in zip(out, residual, strict=True)]


def top_two(draft: Probs) -> Iterator[tuple[list[int], Fraction]]:
    yield sorted(range(len(draft)), key=lambda token: -draft[token])[:2], Fraction(1)


def two_draws(draft: Probs) -> Iterator[tuple[list[int], Fraction]]:
    for pair in product(range(len(draft)), repeat=2):
        yield list(pair), draft[pair[0]] * draft[pair[1]]


def two_draws_merged(draft: Probs) -> Iterator[tuple[list[int], Fraction]]:
    for pair, mass in two_draws(draft):
        yield list(dict.fromkeys(pair)), mass


def two_draws_without_replacement(draft: Probs) -> Iterator[tuple[list[int], Fraction]]:
    if max(draft) == 1:
        yield [draft.index(Fraction(1))], Fraction(1)
        return
    for one, two in permutations(range(len(draft)), 2):
        yield [one, two], draft[one] * draft[two] / (1 - draft[one])


def worst_loss(siblings: Callable[[Probs], Iterator[tuple[list[int], Fraction]]], rule: str) -> float:
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(30):
        target, draft = random_probs(rng, 4), random_probs(rng, 4)
        law = [Fraction(0)] * 4
        for drawn, mass in siblings(draft):
            if mass:
                law = [a + mass * b for a, b in zip(law, tried_in_turn(target, draft, drawn, rule), strict=True)]
        assert sum(law) == 1
        worst = max(worst, float(sum(abs(a - b) for a, b in zip(law, target, strict=True)) / 2))
    return worst


@pytest.mark.parametrize(
    "siblings, rule",
    [
        (top_two, "one_hot"),
        (two_draws, "replaced"),
        (two_draws_merged, "removed"),
        (two_draws_without_replacement, "removed"),
    ],
)
def test_the_lossless_sibling_rules_keep_the_law(siblings, rule):
    assert worst_loss(siblings, rule) < LOSSLESS


@pytest.mark.parametrize(
    "siblings, rule",
    [(top_two, "removed"), (two_draws_merged, "replaced"), (two_draws_without_replacement, "replaced")],
    ids=["top-k as if sampled", "merged draws with the with-replacement rule", "SWOR with the with-replacement rule"],
)
def test_the_lossy_sibling_rules_are_detected(siblings, rule):
    assert worst_loss(siblings, rule) > LOSSY


# --- the noise -------------------------------------------------------------------------------------------------------

EIGHT = torch.tensor([0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.04, 0.01])
DRAWS = 20_000


def drawn_with(noise: torch.Tensor) -> np.ndarray:
    return (EIGHT.log() + noise).argmax(dim=1).numpy()


def chance_of(drawn: np.ndarray) -> float:
    expected = DRAWS * EIGHT.double().numpy()
    return float(chisquare(np.bincount(drawn, minlength=8), expected * DRAWS / expected.sum()).pvalue)


@pytest.mark.parametrize("over", ["seeds", "positions", "samples"])
def test_the_largest_of_log_probability_and_noise_follows_the_law(over):
    """Chi-square over 20,000 draws with fixed seeds; correct noise fails this once in 1,000 choices of seeds."""
    match over:
        case "seeds":
            noise = torch.cat([gumbel_noise(seed, [17], 8) for seed in range(DRAWS)])
        case "positions":
            noise = gumbel_noise(17, range(DRAWS), 8)
        case _:
            noise = torch.cat([gumbel_noise(17, [17], 8, sample) for sample in range(DRAWS)])
    assert chance_of(drawn_with(noise)) > 1e-3


def test_the_chi_square_detects_a_small_error_of_the_law():
    noise = gumbel_noise(17, range(DRAWS), 8)
    noise[:, 0] += 0.15
    assert chance_of(drawn_with(noise)) < 1e-12


@pytest.mark.parametrize("other", ["the next position", "the next sample", "the next seed", "another stream"])
def test_draws_that_share_all_but_one_key_are_independent(other):
    """Chi-square of the 8 by 8 table of pairs; correct noise fails this once in 1,000 choices of seeds."""
    one = gumbel_noise(23, range(DRAWS), 8)
    two = {
        "the next position": lambda: gumbel_noise(23, range(1, DRAWS + 1), 8),
        "the next sample": lambda: gumbel_noise(23, range(DRAWS), 8, sample_index=1),
        "the next seed": lambda: gumbel_noise(24, range(DRAWS), 8),
        "another stream": lambda: gumbel_noise(23, range(DRAWS), 8, stream=1),
    }[other]()
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (drawn_with(one), drawn_with(two)), 1)
    assert chi2_contingency(pairs[:7, :7]).pvalue > 1e-3
