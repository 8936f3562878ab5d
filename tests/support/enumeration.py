"""Enumeration of everything that a round with drawn guesses can do, over random laws of tiny vocabularies."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations, product

import numpy as np
from dendro.drawn_form import DrawnForm
from dendro.shapes import DynamicShape
from tree_kernels.sampled_walk import SparseLaw
from tree_kernels.tree_walk import Walk

LOSSLESS = 1e-9
LOSSY = 1e-2
Text = tuple[int, ...]
Law = dict[Text, float]
Tree = tuple[list[int], list[int]]  # tokens, parents
Verify = Callable[..., Walk]
ROOT: Tree = ([0], [-1])


class Laws:
    """A random law of target and drafter after every short text; some probabilities are 0. The drafter's are those of
    `known` tokens."""

    def __init__(self, seed: int, vocabulary: int, length: int, known: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.vocabulary, self.length, known = vocabulary, length, known or vocabulary
        self.target, self.draft = dict[Text, np.ndarray](), dict[Text, SparseLaw]()
        for text in (text for each in range(length + 1) for text in product(range(vocabulary), repeat=each)):
            weights = rng.dirichlet(np.full(vocabulary, 0.7))
            weights[rng.integers(vocabulary)] *= rng.integers(2)
            self.target[text] = weights / weights.sum()
            ids = rng.permutation(vocabulary)[:known]
            self.draft[text] = SparseLaw(ids, rng.dirichlet(np.full(known, 0.7)))

    def after(self, before: Text) -> Laws:
        """The laws of the texts that begin with `before`, which is left out."""
        rest, count = copy.copy(self), len(before)
        rest.length -= count
        rest.target = {text[count:]: law for text, law in self.target.items() if text[:count] == before}
        rest.draft = {text[count:]: law for text, law in self.draft.items() if text[:count] == before}
        return rest

    def joint(self) -> Law:
        law: Law = {(): 1.0}
        for _ in range(self.length):
            law = {
                (*text, t): mass * self.target[text][t] for text, mass in law.items() for t in range(self.vocabulary)
            }
        return law


class ScriptedCoins:
    """Takes the first outcome of each decision, after a given prefix of outcomes; records what each could have been."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self.prefix = prefix
        self.taken: list[tuple[int, list[float]]] = []  # the outcome, and the probability of each

    def accept(self, row: int, chance: float) -> bool:
        chance = min(chance, 1.0)
        return self._take([1.0 - chance, chance]) == 1

    def draw(self, row: int, weights: np.ndarray) -> int:
        return self._take((weights / weights.sum()).tolist())

    def _take(self, chances: list[float]) -> int:
        at = len(self.taken)
        outcome = self.prefix[at] if at < len(self.prefix) else next(i for i, c in enumerate(chances) if c > 0)
        self.taken.append((outcome, chances))
        return outcome


def outcomes(run: Callable[[ScriptedCoins], Walk]) -> Iterator[tuple[Walk, float]]:
    """Every outcome of a verification that has a probability, and this probability."""
    prefix: list[int] | None = []
    while prefix is not None:
        coins = ScriptedCoins(prefix)
        found = run(coins)
        yield found, math.prod(chances[outcome] for outcome, chances in coins.taken)
        taken, prefix = coins.taken, None
        while taken:
            outcome, chances = taken.pop()
            following = next((i for i, c in enumerate(chances) if i > outcome and c > 0), None)
            if following is not None:
                prefix = [*(each for each, _ in taken), following]
                break


def context(tree: Tree, row: int) -> Text:
    tokens, parents = tree
    above: Text = ()
    while row > 0:
        above, row = (tokens[row], *above), parents[row]
    return above


def siblings(law: SparseLaw, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every list of tokens drawn without replacement, shorter where fewer can be drawn, and its probability."""
    probs = {token: p for token, p in zip(law.ids.tolist(), law.probabilities.tolist(), strict=True) if p > 0}
    for drawn in permutations(probs, min(count, len(probs))):
        chance, left = 1.0, 1.0
        for token in drawn:
            chance *= probs[token] / left
            left -= probs[token]
        yield drawn, chance


def trees(laws: Laws, widths: Sequence[int]) -> Iterator[tuple[Tree, float]]:
    """Every tree of these widths that the drafter can draw, and its probability."""

    def grown(tree: Tree, frontier: list[int], level: int) -> Iterator[tuple[Tree, float]]:
        if level == len(widths):
            yield tree, 1.0
            return
        for wider, drawn, chance in levels(laws, tree, frontier, [widths[level]] * len(frontier)):
            below = list(range(len(tree[0]), len(tree[0]) + sum(map(len, drawn))))
            for whole, rest in grown(wider, below, level + 1):
                yield whole, chance * rest

    return grown(ROOT, [0], 0)


def dynamic_trees(laws: Laws, shape: DynamicShape) -> Iterator[tuple[Tree, float]]:
    """Every dynamic tree that the drafter can draw, and its probability."""

    def grown(tree: Tree, frontier: list[int], form: DrawnForm) -> Iterator[tuple[Tree, float]]:
        widths = form.widths([laws.draft[context(tree, row)] for row in frontier])
        for wider, drawn, chance in levels(laws, tree, frontier, widths):
            assert [len(each) for each in drawn] == widths
            below = copy.copy(form)
            following = [len(tree[0]) + place for place in below.descend(drawn)]
            for whole, rest in grown(wider, following, below) if following else [(wider, 1.0)]:
                yield whole, chance * rest

    return grown(ROOT, [0], DrawnForm(shape))


def levels(
    laws: Laws, tree: Tree, frontier: Sequence[int], widths: Sequence[int]
) -> Iterator[tuple[Tree, list[tuple[int, ...]], float]]:
    """Every tree with a further level, the tokens drawn below each row of the frontier, and their probability."""
    choices = [
        list(siblings(laws.draft[context(tree, row)], width)) for row, width in zip(frontier, widths, strict=True)
    ]
    for chosen in product(*choices):
        drawn = [tokens for tokens, _ in chosen]
        tokens = [*tree[0], *(token for each in drawn for token in each)]
        parents = [*tree[1], *(row for row, each in zip(frontier, drawn, strict=True) for _ in each)]
        yield (tokens, parents), drawn, math.prod(chance for _, chance in chosen)


def walks(laws: Laws, tree: Tree, verify: Verify) -> Iterator[tuple[Walk, float]]:
    """Every outcome of a tree's verification, and its probability."""

    def run(coins: ScriptedCoins) -> Walk:
        drafts = {row: laws.draft[context(tree, row)] for row in range(len(tree[0])) if row in tree[1]}
        return verify(*tree, lambda row: laws.target[context(tree, row)], drafts, coins)

    return outcomes(run)


def add_rest(law: Law, laws: Laws, text: Text, mass: float) -> None:
    """Add a text's probability to a law of `laws.length` tokens: of each way in which the target goes on."""
    texts: Law = {text: mass}
    for _ in range(laws.length - len(text)):
        texts = {(*text, t): m * p for text, m in texts.items() for t, p in enumerate(laws.target[text].tolist())}
    for whole, m in texts.items():
        law[whole[: laws.length]] += m


def unchanged(tree: Tree, laws: Laws) -> Tree:
    return tree


def law_of(
    laws: Laws, drawn: Iterable[tuple[Tree, float]], verify: Verify, changed: Callable[[Tree, Laws], Tree] = unchanged
) -> Law:
    """The joint law of the first `laws.length` tokens: a round's, then the target's own.

    drawn: every tree and its probability   changed: what is done to a tree between draw and verification
    """
    law: Law = defaultdict(float)
    for tree, chance in drawn:
        for walked, mass in walks(laws, changed(tree, laws), verify):
            add_rest(law, laws, walked.tokens, chance * mass)
    return law


def distance(one: Law, other: Law) -> float:
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other}) / 2


def worst(
    widths: Sequence[int],
    verify: Verify,
    vocabulary: int,
    seeds: int,
    known: int | None = None,
    changed: Callable[[Tree, Laws], Tree] = unchanged,
) -> float:
    """The greatest total variation between emitted tokens and target, over random laws."""
    found = []
    for seed in range(seeds):
        laws = Laws(seed, vocabulary, len(widths) + 1, known)
        law = law_of(laws, trees(laws, widths), verify, changed)
        assert abs(sum(law.values()) - 1) < LOSSLESS
        found.append(distance(law, laws.joint()))
    return max(found)
