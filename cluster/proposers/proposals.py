"""Proposals for a text's rounds, and the history of each tenant from which they are made.

Proposals for a round are available before its shape is chosen (`offer`), so that the drafter need not be asked where
they suffice. A drafter's tree is merged with them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from dendro.text import Text
from dendro.tree import DraftTree

from cluster.policies.classes import temperature_class
from cluster.proposers.chances import Chances, usual_chances
from cluster.proposers.lookup import Lookup
from cluster.proposers.merge import merge
from cluster.proposers.prediction import PredictedOutput
from cluster.proposers.proposal import Proposal, Proposer
from cluster.proposers.suffix import Outputs, Suffix

TEXT_TOKENS = 8192
"""Most tokens of a text in its suffix automaton: some 3 MB."""
OFFERED = 32
"""Most rows of one proposer. Paths that are not among the likeliest 32 are hardly ever accepted."""
OUTPUT_TOKENS = 8192
"""Most tokens of past answers kept for a tenant at a target."""
COUNTED_TENANTS = 16
"""Number of last tenants with whose counts a new tenant begins."""
TENANTS = 64
"""Tenants of a target whose past answers and counts are kept; beyond that the least recently used is dropped."""


class Proposals:
    """The proposals for one text: guesses of its proposers, with their chances as counted so far."""

    def __init__(self, proposers: Sequence[Proposer], chances: Chances, max_rows: int, max_depth: int) -> None:
        self._proposers = proposers
        self._suffix = next((each for each in proposers if isinstance(each, Suffix)), None)
        self._chances = chances
        self._max_rows = max_rows
        self._max_depth = max_depth
        self._proposed: list[tuple[str, Proposal]] = []  # the last proposals, by proposer
        self._made: list[DraftTree] | None = None  # the last proposals as trees with values, once they are needed
        self._base = 0  # length of the text for which the last proposals were made
        self._ended = False

    def offer(self, text: Text, least: float = 0.0) -> DraftTree:
        """Merge all proposals for the next round into one tree; the root alone if there are none, or if no first guess
        likely has a chance of `least`. A single proposer's need no merging: the policy uses their chances and their
        number.

        Above zero, `least` also excludes guesses after a match of a single token: most tokens occurred before, and few
        are followed by the same one again.
        """
        if least and self._suffix is not None:
            self._suffix.grow(text)
            if self._suffix.matched(text) < 2:  # no proposer finds a longer match
                return DraftTree.root_only(text.root)
        self.propose(text)
        if not any(self._chances.first(name, proposal) >= least for name, proposal in self._proposed):
            return DraftTree.root_only(text.root)
        if len(self._trees) == 1:
            return self._trees[0]
        return merge([DraftTree.root_only(text.root), *self._trees], self._max_rows, self._max_depth)

    def propose(self, text: Text) -> None:
        """Learn from the last proposals and make new ones, once per length of the text."""
        if self._base == len(text):
            return
        came = text.ids[self._base :]
        for name, proposal in self._proposed:
            self._chances.learn(name, proposal, came)
        self._proposed, self._base = [], len(text)
        # A guess beyond the length limit of the answer is never emitted.
        depth = min(self._max_depth, text.limits.max_length - len(text) - 1)
        for proposer in self._proposers if depth > 0 else ():
            proposer.grow(text)
            proposal = proposer.propose(text, min(OFFERED, self._max_rows), depth)
            if proposal.guesses:
                self._proposed.append((proposer.name, proposal))
        self._made = None

    @property
    def _trees(self) -> list[DraftTree]:
        if self._made is None:
            self._made = [self._chances.tree(name, proposal) for name, proposal in self._proposed]
        return self._made

    def merged(self, tree: DraftTree, rows: int) -> DraftTree:
        """A drafter's tree with the last proposals, cut to `rows` rows and to the limits of the target and the request.
        A late or lost tree is the root alone: the result then has proposals alone."""
        return merge([tree, *self._trees], min(rows, self._max_rows), self._max_depth)

    def end(self, text: Text) -> None:
        """Record that the text has ended. May be called again."""
        if not self._ended:
            self._ended = True
            for proposer in self._proposers:
                proposer.end(text)


@dataclass(slots=True)
class TenantHistory:
    """History of one tenant's requests at a target: answers, and counts of proposals that came true."""

    outputs: Outputs = field(default_factory=lambda: Outputs(OUTPUT_TOKENS))
    chances: defaultdict[str, Chances] = field(default_factory=lambda: defaultdict(Chances))  # key: temperature class


class ProposalLibrary:
    """Histories of all tenants of one target. No tenant's proposals come from another tenant's text. Only the counts of
    a new tenant, which contain no text, begin with those of others."""

    def __init__(self, names: Sequence[str], max_rows: int, max_depth: int) -> None:
        """names: proposers, in the order in which they win ties   max_rows, max_depth: limits of the target"""
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
        proposers += [self._proposer(name, past) for name in self._names]
        chances = past.chances[temperature_class(temperature)]
        return Proposals(proposers, chances, min(max_rows, self._max_rows), self._max_depth)

    def _proposer(self, name: str, past: TenantHistory) -> Proposer:
        if name == Lookup.name:
            return Lookup()
        assert name == Suffix.name, "the configuration checks the names"
        return Suffix(past.outputs, TEXT_TOKENS)

    def _begun(self) -> TenantHistory:
        """History of a new tenant: no answers, and the counts of the last tenants together."""
        others, begun = list(islice(reversed(self._pasts.values()), COUNTED_TENANTS)), TenantHistory()
        for kind in {kind for other in others for kind in other.chances}:
            begun.chances[kind] = usual_chances(other.chances[kind] for other in others if kind in other.chances)
        return begun

    def _past(self, tenant: str) -> TenantHistory:
        if tenant not in self._pasts:
            self._pasts[tenant] = self._begun()
        past = self._pasts[tenant]
        self._pasts.move_to_end(tenant)
        if len(self._pasts) > TENANTS:
            self._pasts.popitem(last=False)
        return past
