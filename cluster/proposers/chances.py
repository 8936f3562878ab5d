"""The chance that a proposed token is the target's, counted: a proposer's own word is only where it begins.

Counted for each proposer, class of match lengths, class of hopes and depth by itself, on the condition that the path to
the token came true. The text says so by itself when the round is over: what was proposed, whether or not a verifier
was asked, is held against the tokens that came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.tree import DraftTree

from cluster.proposers.proposal import LEAST, Proposal

PRIOR = 2.0
"""What a proposer's word weighs, in proposals."""
MEMORY = 512.0
"""Proposals of a kind after which all of them weigh half: texts change."""
DEEPEST = 8
"""Depths from here on are counted together."""

Kind = tuple[str, int, int, int]
"""Proposer, class of match length (1, 2 to 3, 4 to 7, and so on), class of hope (by quarters), depth."""


@dataclass(slots=True)
class Count:
    right: float = 0.0
    of: float = 0.0

    def learn(self, right: bool) -> None:
        if self.of >= MEMORY:
            self.right, self.of = self.right / 2, self.of / 2
        self.right += right
        self.of += 1


@dataclass(slots=True)
class Chances:
    """The counts of one tenant's requests at a target: numbers alone, nothing of a text."""

    counts: dict[Kind, Count] = field(default_factory=dict)

    def of(self, kind: Kind, hope: float) -> float:
        """The chance of one kind of proposal, by the counts and, while they are few, its hope; inside (0, 1)."""
        count = self.counts.get(kind)
        return hope if count is None else (count.right + PRIOR * hope) / (count.of + PRIOR)

    def tree(self, name: str, proposal: Proposal) -> DraftTree:
        """The proposal with its values; rows that are hardly reached are left out, with all below them."""
        place, depths = {0: 0}, [0]
        tokens, parents, values = [proposal.root], [-1], [0.0]
        for row in range(1, proposal.guesses + 1):
            parent = proposal.parents[row]
            depths.append(depths[parent] + 1)
            if parent not in place:
                continue
            chance = self.of(_kind(name, proposal, row, depths[row]), proposal.hopes[row])
            value = values[place[parent]] + math.log(chance)
            if value >= math.log(LEAST):
                place[row] = len(tokens)
                tokens.append(proposal.tokens[row])
                parents.append(place[parent])
                values.append(value)
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(values, np.float32), name)

    def learn(self, name: str, proposal: Proposal, came: Sequence[int]) -> None:
        """Hold a proposal against the tokens that the text went on with."""
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


def _kind(name: str, proposal: Proposal, row: int, depth: int) -> Kind:
    return name, proposal.matched[row].bit_length(), int(4 * proposal.hopes[row]), min(depth, DEEPEST)
