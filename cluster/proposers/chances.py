"""Chances that proposed tokens are the target's, from counts; a proposer's own estimate (hope) is only the prior.

Counts are kept per proposer, class of match lengths, class of hopes and depth, for tokens whose path came true. After
each round all proposals for it, verified or not, are compared with the tokens that came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.tree import DraftTree

from cluster.proposers.proposal import LEAST, Proposal

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
        """The greatest chance of a guess that follows the root."""
        first = (row for row in range(1, proposal.guesses + 1) if proposal.parents[row] == 0)
        return max(self.of(_kind(name, proposal, row, 1), proposal.hopes[row]) for row in first)

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
        """Compare a proposal with the tokens that followed."""
        below, row = proposal.children(), 0
        for depth, token in enumerate(came, start=1):
            if row not in below:
                return
            right = 0
            for child in below[row]:
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
