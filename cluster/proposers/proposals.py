"""Proposals for a text's rounds, and the history of each tenant from which they are made.

Proposals for a round are available before its shape is chosen (`offer`), so that the drafter need not be asked where
they suffice. A drafter's tree is merged with them. Any tree is legal (docs/design/noise.md#shared-noise), so this
changes costs but not tokens.

The chance that a proposed token is the target's comes from counts; a proposer's own estimate (hope) is only the prior.
Counts are kept per proposer, class of match lengths, class of hopes and depth, for tokens whose path came true. After
each round all proposals for it, verified or not, are compared with the tokens that came.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from dendro.shapes import MAX_ROWS
from dendro.text import Text
from dendro.tree import DraftTree

from cluster.policies.costs import temperature_class
from cluster.proposers.lookup import Lookup
from cluster.proposers.prediction import PredictedOutput
from cluster.proposers.proposal import LEAST, Proposal, Proposer
from cluster.proposers.suffix import Outputs, Suffix

TEXT_TOKENS = 8192
"""Most tokens of a text in its suffix automaton: some 3 MB."""
OFFERED = 32
"""Most rows of proposals. Paths that are not among the likeliest 32 are hardly ever accepted."""
OUTPUT_TOKENS = 8192
"""Most tokens of past answers kept for a tenant at a target."""
COUNTED_TENANTS = 16
"""Number of most recent tenants from whose counts a new tenant's are made."""
TENANTS = 64
"""Tenants of a target whose past answers and counts are kept; beyond that the least recently used is dropped."""

PRIOR = 2.0
"""Weight of a proposer's own estimate, in proposals."""
MEMORY = 512.0
"""Number of proposals of a kind at which the kind's counts are halved, since texts change."""
TENANT_MOST, BEGUN_MOST = 16.0, 32.0
"""Most proposals of a kind that count from one tenant, and from all tenants, for a new tenant."""
DEEPEST = 8
"""Depth from which on all depths are counted together."""

Kind = tuple[str, int, int, int]
"""Kind of a proposal: proposer, class of match length (1, 2 to 3, 4 to 7, and so on), class of hope (by quarters),
depth."""


@dataclass(slots=True)
class Count:
    """Proposals of a kind, and how many of them came true."""

    right: float = 0.0  # proposals that came true
    of: float = 0.0  # proposals

    def learn(self, right: bool) -> None:
        if self.of >= MEMORY:
            self.right, self.of = self.right / 2, self.of / 2
        self.right += right
        self.of += 1

    def add(self, other: Count) -> None:
        self.right, self.of = self.right + other.right, self.of + other.of

    def at_most(self, most: float) -> Count:
        """A copy with the same share, scaled down to at most `most` proposals."""
        share = min(1.0, most / self.of)
        return Count(share * self.right, share * self.of)


@dataclass(slots=True)
class Chances:
    """Counts of one tenant's requests at a target, of one temperature class. They contain no text.

    A kind of which 3 of 6 proposals came true, with a hope of 0.9 that weighs PRIOR = 2 proposals, has the chance
    (3 + 2 * 0.9) / (6 + 2):

    >>> kind = ("lookup", 1, 3, 1)
    >>> Chances({kind: Count(right=3, of=6)}).of(kind, hope=0.9)
    0.6
    """

    counts: dict[Kind, Count] = field(default_factory=dict)

    def of(self, kind: Kind, hope: float) -> float:
        """Chance of a proposal, in (0, 1): the share of the kind that came true, with `hope` as prior."""
        count = self.counts.get(kind)
        return hope if count is None else (count.right + PRIOR * hope) / (count.of + PRIOR)

    def first(self, name: str, proposal: Proposal) -> float:
        """The greatest chance of a guess that follows the root and a match of at least two tokens; 0 without one. Most
        tokens occurred before, and few are followed by the same one again."""
        rows = [row for row in proposal.children(0) if proposal.matched[row] > 1]
        return max((self.of(_kind(name, proposal, row, 1), proposal.hopes[row]) for row in rows), default=0.0)

    def tree(self, name: str, proposal: Proposal) -> DraftTree:
        """Make a tree with values of a proposal. Rows with a chance below LEAST, and rows below them, are left out."""
        place, depths = {0: 0}, [0]
        tokens, parents, values = [proposal.root], [-1], [0.0]
        least = math.log(LEAST)
        for row in range(1, proposal.guesses + 1):
            parent = proposal.parents[row]
            depths.append(depths[parent] + 1)
            if parent not in place:
                continue
            chance = self.of(_kind(name, proposal, row, depths[row]), proposal.hopes[row])
            value = values[place[parent]] + math.log(chance)
            if value >= least:
                place[row] = len(tokens)
                tokens.append(proposal.tokens[row])
                parents.append(place[parent])
                values.append(value)
        arrays = np.array(tokens, np.int64), np.array(parents, np.int64), np.array(values, np.float32)
        return DraftTree.unchecked(*arrays, name)

    def learn(self, name: str, proposal: Proposal, came: Sequence[int]) -> None:
        """Count which guesses of a proposal came true. came: the tokens that followed the text that it was made for"""
        row = 0
        for depth, token in enumerate(came, start=1):
            right = 0
            for child in proposal.children(row):
                came_true = proposal.tokens[child] == token
                self.counts.setdefault(_kind(name, proposal, child, depth), Count()).learn(came_true)
                if came_true:
                    right = child
            if not right:
                return
            row = right


def usual_chances(tenants: Iterable[Chances]) -> Chances:
    """Counts with which a new tenant begins: the sum over tenants. A tenant counts at most TENANT_MOST proposals of a
    kind, so that none can move the sum far; the sum weighs at most BEGUN_MOST proposals of a kind."""
    usual = Chances()
    for chances in tenants:
        for kind, count in chances.counts.items():
            usual.counts.setdefault(kind, Count()).add(count.at_most(TENANT_MOST))
    return Chances({kind: count.at_most(BEGUN_MOST) for kind, count in usual.counts.items()})


def _kind(name: str, proposal: Proposal, row: int, depth: int) -> Kind:
    return name, proposal.matched[row].bit_length(), int(4 * proposal.hopes[row]), min(depth, DEEPEST)


class Proposals:
    """The proposals for one text: guesses of its proposers, with their chances as counted so far."""

    def __init__(self, proposers: Sequence[Proposer], chances: Chances, max_rows: int, max_depth: int) -> None:
        self._proposers = proposers
        self._chances = chances
        self._max_rows = max_rows
        self._max_depth = max_depth
        self._proposed: list[tuple[str, Proposal]] = []  # the last proposals, by proposer
        self._tree: DraftTree | None = None  # the last proposals merged, once they are needed
        self._base = 0  # length of the text for which the last proposals were made
        self._depth = 0  # the depth to which they were made
        self._ended = False

    def offer(self, text: Text, least: float = 0.0) -> DraftTree:
        """Merge all proposals for the next round into one tree; the root alone if there are none, or if `least` is
        above zero and no first guess has that chance (`Chances.first`). Deeper guesses are then not made."""
        if least:
            self.propose(text, 1)
            if all(self._chances.first(name, proposal) < least for name, proposal in self._proposed):
                return DraftTree.root_only(text.root)
        self.propose(text)
        return self._all(text.root)

    def propose(self, text: Text, most: int = MAX_ROWS) -> None:
        """Learn from the last proposals and make new ones, of at most this depth, unless the text has as deep ones."""
        # A guess beyond the length limit of the answer is never emitted.
        depth = min(most, self._max_depth, text.limits.max_length - len(text) - 1)
        came = text.ids[self._base :]
        if not came and depth <= self._depth:
            return
        for name, proposal in self._proposed:
            self._chances.learn(name, proposal, came)
        self._proposed, self._base, self._depth, self._tree = [], len(text), depth, None
        for proposer in self._proposers if depth > 0 else ():
            proposer.grow(text)
            self._proposed.append((proposer.name, proposer.propose(text, min(OFFERED, self._max_rows), depth)))

    def _all(self, root: int) -> DraftTree:
        """The last proposals as one tree."""
        if self._tree is None:
            trees = [self._chances.tree(name, proposal) for name, proposal in self._proposed]
            self._tree = merge([DraftTree.root_only(root), *trees], min(OFFERED, self._max_rows), self._max_depth)
        return self._tree

    def merged(self, tree: DraftTree, rows: int) -> DraftTree:
        """A drafter's tree with the last proposals, cut to `rows` rows and to the limits of the target and the request.
        A late or lost tree is the root alone: the result then has proposals alone."""
        return merge([tree, self._all(int(tree.tokens[0]))], min(rows, self._max_rows), self._max_depth)

    def end(self, text: Text) -> None:
        """Record that the text has ended. May be called again."""
        if not self._ended:
            self._ended = True
            for proposer in self._proposers:
                proposer.end(text)


class TenantHistory:
    """History of one tenant's requests at a target: answers, and counts of proposals that came true."""

    def __init__(self) -> None:
        self.chances: defaultdict[str, Chances] = defaultdict(Chances)  # key: temperature class

    @cached_property
    def outputs(self) -> Outputs:
        """The last answers, for proposers that need them."""
        return Outputs(OUTPUT_TOKENS)


class ProposalLibrary:
    """Histories of all tenants of one target. No tenant's proposals come from another tenant's text. Only the counts of
    a new tenant, which contain no text, begin with those of others."""

    def __init__(self, names: Sequence[str], max_rows: int, max_depth: int) -> None:
        """names: proposers, in the order in which they win ties; the configuration checks them   max_rows, max_depth:
        limits of the target"""
        self._names = names
        self._max_rows = max_rows
        self._max_depth = max_depth
        self._pasts: OrderedDict[str, TenantHistory] = OrderedDict()  # key: tenant

    def of(
        self, tenant: str, max_rows: int, temperature: float, prediction: PredictedOutput | None = None
    ) -> Proposals | None:
        """Make the proposals of a new text; None if it has no proposers, or the request allows no guesses.

        max_rows: the request's limit for a tree   prediction: the proposer of the request's predicted texts

        Chances are counted per temperature class, since verbatim repetition depends on the temperature.
        """
        if not (self._names or prediction) or max_rows == 1:
            return None
        past = self._past(tenant)
        proposers: list[Proposer] = [] if prediction is None else [prediction]
        proposers += [Lookup() if name == Lookup.name else Suffix(past.outputs, TEXT_TOKENS) for name in self._names]
        chances = past.chances[temperature_class(temperature)]
        return Proposals(proposers, chances, min(max_rows, self._max_rows), self._max_depth)

    def _begun(self) -> TenantHistory:
        """History of a new tenant: no answers, and the counts of the last tenants together."""
        others, begun = list(itertools.islice(reversed(self._pasts.values()), COUNTED_TENANTS)), TenantHistory()
        for kind in {kind for other in others for kind in other.chances}:
            begun.chances[kind] = usual_chances(other.chances[kind] for other in others if kind in other.chances)
        return begun

    def _past(self, tenant: str) -> TenantHistory:
        if tenant not in self._pasts:
            self._pasts[tenant] = self._begun() if self._pasts else TenantHistory()
        past = self._pasts[tenant]
        self._pasts.move_to_end(tenant)
        if len(self._pasts) > TENANTS:
            self._pasts.popitem(last=False)
        return past


@dataclass(slots=True, eq=False)
class _Guess:
    """A node of several trees' union: a token after the tokens of its ancestors."""

    token: int
    depth: int
    chance: float = -np.inf  # log-chance given the parent: the greatest of the trees that have this guess
    drafted: bool = False  # True if the first tree has this guess
    below: dict[int, _Guess] = field(default_factory=dict)


def merge(trees: Sequence[DraftTree], max_rows: int, max_depth: int) -> DraftTree:
    """Merge trees with one root into their union, cut to the `max_rows` rows of greatest value, root included.

    A row's value is the sum over its path of log chances, each the greatest that any tree gives. So no row's value is
    above its parent's, and a row that stays has all its ancestors. Siblings are in order of value; equal ones in the
    order of the trees. The first tree is the drafter's; its other fields are kept. Raises ValueError for trees with
    different roots.

    Both trees guess 5 after the root, with the chances 0.5 and 0.75; below it the first guesses 1 with half of its
    chance. The merged tree has 5 with 0.75 and 1 with 0.75 / 2:

    >>> one = DraftTree.of([9, 5, 1], [-1, 0, 1], np.log([1.0, 0.5, 0.25]))
    >>> two = DraftTree.of([9, 5, 7], [-1, 0, 0], np.log([1.0, 0.75, 0.2]))
    >>> merged = merge([one, two], max_rows=4, max_depth=4)
    >>> merged.tokens.tolist(), merged.parents.tolist(), [round(float(np.exp(value)), 3) for value in merged.values]
    ([9, 5, 1, 7], [-1, 0, 1, 0], [1.0, 0.75, 0.375, 0.2])
    """
    first = trees[0]
    if any(tree.tokens[0] != first.tokens[0] for tree in trees):
        raise ValueError(f"trees: begin with {[int(tree.tokens[0]) for tree in trees]}; they must have one root")
    if first.rows <= max_rows and first.depth <= max_depth and not any(tree.guesses for tree in trees[1:]):
        return first
    root = _Guess(int(first.tokens[0]), 0, 0.0)
    for tree in trees:
        _add(root, tree, tree is first)
    tokens, parents, values, proposed = [root.token], [-1], [0.0], list[int]()
    found = itertools.count()
    paths: list[tuple[float, int, int, _Guess]] = []  # a heap: the likeliest first; of equals, the first found
    guess, row = root, 0
    while True:
        if guess.depth < max_depth:
            for child in guess.below.values():
                heapq.heappush(paths, (-values[row] - child.chance, next(found), row, child))
        if not paths or len(tokens) >= max_rows:
            break
        less, _, parent, guess = heapq.heappop(paths)
        row = len(tokens)
        tokens.append(guess.token)
        parents.append(parent)
        values.append(-less)
        if not guess.drafted:
            proposed.append(row)
    return DraftTree.unchecked(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(values, np.float32),
        first.proposer,
        first.trace,
        first.draft_us,
        first.texts,
        first.missed,
        frozenset(proposed),
    )


def _add(root: _Guess, tree: DraftTree, drafted: bool) -> None:
    tokens, parents, values = tree.tokens.tolist(), tree.parents.tolist(), tree.values.tolist()
    guesses = [root]
    for row in range(1, tree.rows):
        above = guesses[parents[row]]
        guess = above.below.get(tokens[row])
        if guess is None:
            guess = above.below[tokens[row]] = _Guess(tokens[row], above.depth + 1)
        guess.chance = max(guess.chance, min(values[row] - values[parents[row]], 0.0))
        guess.drafted |= drafted
        guesses.append(guess)
