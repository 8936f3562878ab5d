"""Wraps a drafter with proposers. The round loop sees one drafter, whose trees have more guesses.

Proposals for a round are available before its shape is chosen (`offer`), so that the drafter need not be asked where
they suffice. Where the drafter is late, lost or absent, the tree has proposals alone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from dendro.calls import Opened
from dendro.step_sizes import StepSizes
from dendro.text import Text
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.classes import temperature_class
from cluster.proposers.chances import Chances, usual_chances
from cluster.proposers.lookup import Lookup
from cluster.proposers.merge import merge
from cluster.proposers.proposal import Proposal, Proposer
from cluster.proposers.suffix import Outputs, Suffix

if TYPE_CHECKING:
    from cluster.router.ports import DrafterPort

TEXT_TOKENS = 8192
"""Most tokens of a text in its suffix automaton: some 3 MB."""
OFFERED = 32
"""Most rows of one proposer. Paths that are not among the likeliest 32 are hardly ever accepted."""
OUTPUT_TOKENS = 8192
"""Most tokens of past answers kept for a tenant at a target."""
COUNTED_TENANTS = 16
"""The last tenants with whose counts a new tenant begins."""
TENANTS = 64
"""Tenants of a target whose past answers and counts are kept; beyond that the least recently used is dropped."""


class Proposals:
    """A request's drafter handle with its proposers. A merged tree fills the rows to which the verifier would pad the
    drafted shape anyway, within the limits of the target and the request."""

    def __init__(
        self,
        drafter: DrafterPort,
        proposers: Sequence[Proposer],
        chances: Chances,
        max_rows: int,
        max_depth: int,
        sizes: Callable[[], StepSizes],
    ) -> None:
        """sizes: of the verifier's steps, which are known after its hello"""
        self._drafter = drafter
        self._sizes = sizes
        self._proposers = proposers
        self._chances = chances
        self._max_rows = max_rows
        self._max_depth = max_depth
        self._proposed: list[tuple[str, Proposal]] = []  # last, ...
        self._trees: list[DraftTree] = []  # ... as trees with values, ...
        self._base = 0  # ... for a text of this length
        self._ended = False

    @property
    def openings(self) -> Mapping[str, Opened]:
        return self._drafter.openings

    async def prepare(self, text: Text, arm: Arm) -> None:
        await self._drafter.prepare(text, arm)

    def offer(self, text: Text) -> DraftTree:
        """All proposals for the next round as one tree; the root alone where there are none. Those of one proposer
        need no merging: the policy uses their chances and their number."""
        self._propose(text)
        if len(self._trees) == 1:
            return self._trees[0]
        return merge([DraftTree.root_only(text.root), *self._trees], self._max_rows, self._max_depth)

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        if arm.off:
            return await self._drafter.draft(text, arm)
        self._propose(text)
        tree = await self._drafter.draft(text, arm)
        # What a draft that stopped in time left out is not worth its verification: proposals do not fill these rows.
        rows = tree.rows if arm.shape.stops and not tree.missed else arm.rows
        return merge([tree, *self._trees], self._rows(rows, arm.drafted), self._max_depth)

    async def close(self, text: Text) -> None:
        """As the drafter's: never raises, and may be called again."""
        if not self._ended:
            self._ended = True
            for proposer in self._proposers:
                proposer.end(text)
        await self._drafter.close(text)

    def _propose(self, text: Text) -> None:
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
        self._trees = [self._chances.tree(name, proposal) for name, proposal in self._proposed]

    def _rows(self, rows: int, drafted: bool) -> int:
        """The most rows of a merged tree; `rows` without the proposals that only fill a padded step."""
        return min(self._sizes().padded(rows) if drafted else rows, self._max_rows)


@dataclass(slots=True)
class TenantHistory:
    """What a router keeps of one tenant's requests at a target: answers, and counts of proposals that came true."""

    outputs: Outputs = field(default_factory=lambda: Outputs(OUTPUT_TOKENS))
    chances: defaultdict[str, Chances] = field(default_factory=lambda: defaultdict(Chances))  # by temperature class


class ProposalLibrary:
    """What a router keeps for the proposers of one target, separately per tenant: no tenant's proposals come from
    another's text. The counts of a new tenant's proposals, which contain no text, begin with others'."""

    def __init__(self, names: Sequence[str], max_rows: int, max_depth: int) -> None:
        """names: proposers, in the order in which they win ties   max_rows, max_depth: limits of the target"""
        self._names = names
        self._max_rows = max_rows
        self._max_depth = max_depth
        self._pasts: OrderedDict[str, TenantHistory] = OrderedDict()  # by tenant

    def around(
        self,
        drafter: DrafterPort,
        tenant: str,
        max_rows: int,
        temperature: float,
        sizes: Callable[[], StepSizes] = StepSizes,
    ) -> Proposals | None:
        """A request's drafter with its proposers; None where it has none.

        max_rows: the request's limit for a tree   sizes: those of the target's steps that are known by now

        Chances are counted per temperature class, since verbatim repetition depends on the temperature.
        """
        if not self._names or max_rows == 1:
            return None
        past = self._past(tenant)
        proposers = [self._proposer(name, past) for name in self._names]
        chances = past.chances[temperature_class(temperature)]
        return Proposals(drafter, proposers, chances, min(max_rows, self._max_rows), self._max_depth, sizes)

    def _proposer(self, name: str, past: TenantHistory) -> Proposer:
        if name == Lookup.name:
            return Lookup()
        assert name == Suffix.name, "the configuration checks the names"
        return Suffix(past.outputs, TEXT_TOKENS)

    def _begun(self) -> TenantHistory:
        """A new tenant's: no answers, and the counts of the last tenants together."""
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
