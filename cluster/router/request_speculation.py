"""Speculation of one request: the loop's policy and drafter in one object."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from dendro.calls import Hello, Opened
from dendro.clock import Clock
from dendro.text import Text, Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import OFF_ARM, Arm
from cluster.policies import ConservativeUCB, Experience, RunningRequest
from cluster.policies.prior import Prior
from cluster.policies.step_time import TargetSteps
from cluster.policies.stopping import StopRule
from cluster.proposers.proposals import Proposals
from cluster.router.account import AnswerAccount
from cluster.router.ports import DrafterPort
from cluster.router.speculation import SpeculationPlan

ORDERED = "ordered"
"""Name of the way of a tree that the drafter sends straight to the verifier."""


class RequestSpeculation:
    """Owns a request's policy, proposals, stop rule, drafter handles and statistics. Each round calls `choose` for an
    arm, `draft` for its tree, and `learn` with the verdict, in this order."""

    def __init__(
        self,
        plan: SpeculationPlan,
        experience: Experience,
        running: RunningRequest,
        text: Text,
        drafters: DrafterPort,
        proposals: Proposals | None = None,
        clock: Clock = time.monotonic,
        account: AnswerAccount | None = None,
    ) -> None:
        """clock: returns seconds   account: of the answer; by default one of this request's rounds alone"""
        self.notes = Prior()  # statistics of this request's rounds, for later requests of its kind
        self.account = account or AnswerAccount(plan.name, plan.names_drafters)
        self._plan = plan
        self._experience = experience
        self._running = running
        self._text = text
        self._drafters = drafters
        self._proposals = proposals
        self._offer = None if proposals is None else partial(proposals.offer, text)
        self._stopping = StopRule(experience) if plan.stops else None
        # Only policies and `until(auto,...)` read costs. ConservativeUCB itself records its rounds in `Experience`,
        # without rounds whose costs would mislead.
        uses_costs = plan.learns and (plan.adaptive or plan.stops)
        self._teaches = uses_costs and not isinstance(plan.policy, ConservativeUCB)
        self._clock = clock
        self._hello: Hello | None = None
        self._arm: Arm = OFF_ARM  # the current round's arm
        self._began_s = 0.0  # time at which the current round began
        self._disturbed = False  # True if a text was being opened when the current round began
        self._announced = False  # True if the verifier may have begun the next round, without a tree
        self._delayed: Arm | None = None  # an arm with a tree, chosen for a round that was announced without one
        self._last_maker = ""  # maker of the previous round's tree; empty without a tree
        self._ordered: Arm | None = None  # arm of the tree that was ordered for the next round
        self._claims = False  # True if the current round has the tree that was ordered for it
        self._why = ""  # reason why the round's arm is `off`, or way of its tree (`metrics.WAYS`)
        self._way = "open"  # the way of the next round's tree, if it has one

    @property
    def arm_name(self) -> str:
        """Name of the current round's arm in statistics: with its drafter if the target has several."""
        return self._arm.name(self._plan.names_drafters)

    def learn_hello(self, hello: Hello | None) -> None:
        """Record what the leased verifier says of its target. May be called again."""
        if hello is not None and hello is not self._hello:
            self._hello = hello
            self._experience.concurrency.learn_target(TargetSteps.of(hello))
            self.account.learn_target(hello.step_sizes)

    def prepare(self) -> None:
        """If the first round has no tree, open the text at the drafter of the arm that the policy would choose: a later
        round will likely ask for its tree."""
        if self._plan.plain_first:
            self._drafters.prepare(self._text, self._plan.policy.choose(self._offer))

    def choose(self) -> Arm:
        self._began_s = self._clock()
        first = self._plan.plain_first and not self.account.rounds
        chosen = OFF_ARM if first else self._plan.policy.choose(self._offer)
        ordered, self._ordered = self._ordered, None
        self._claims = False
        explores = self._plan.policy.next_arm is None  # An exploring policy must get the arm that it chose.
        if ordered is not None and chosen.drafted and chosen.maker == ordered.maker and not explores:
            self._claims = True
            chosen = ordered  # The drafter works on its tree already: one of another shape would begin later.
        # The verifier may have begun this round without a tree: a tree sent now would wait until that round is done,
        # and the round's result would be lost.
        self._delayed = chosen if self._announced and not chosen.off else None
        self._announced = False
        self._arm = OFF_ARM if self._delayed is not None else chosen
        if self._arm.off:
            self._why = "first" if first else "announced" if self._delayed is not None else "chosen"
        else:
            self._why = "open" if self._way == ORDERED and not self._claims else self._way
        self._way = "open"
        self._disturbed = self._experience.concurrency.opening > 0
        return self._arm

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        """Draft a tree and merge it with the proposals, or claim the tree that was ordered in the last round.

        If the next round's arm is likely known and drafted, the returned tree orders its tree (`DraftTree.order`). A
        round of `off` that `off` likely follows announces it (`DraftTree.ahead`). A tree that the policy chooses for an
        announced round is drafted a round later.
        """
        resolved = arm if self._stopping is None else self._stopping.resolved(arm)
        if arm.off:
            tree = await self._drafters.draft(text, arm)
            self._announced = self._delayed is None and self._plan.policy.next_arm == OFF_ARM
            if self._announced:
                return DraftTree.root_only(text.root, ahead=True)
        elif self._claims:
            tree = DraftTree.root_only(text.root, ordered=True)
        else:
            tree = await self._drafted(text, arm, resolved)
        return self._ordering(text, tree, self._delayed or self._plan.policy.next_arm)

    async def _drafted(self, text: Text, arm: Arm, resolved: Arm) -> DraftTree:
        """Draft a tree and merge it with the proposals. resolved: the arm with the stop rule's numbers"""
        proposals = self._proposals
        if proposals is not None:
            proposals.propose(text)
        tree = await self._drafters.draft(text, resolved)
        if self._stopping is not None:
            self._stopping.drafted(tree)
        if proposals is None:
            return tree
        # Rows that a stopped draft left out are not worth their verification: proposals do not fill them.
        rows = tree.rows if arm.shape.stops and not tree.missed else arm.rows
        return proposals.merged(tree, self._experience.concurrency.target.padded(rows) if arm.drafted else rows)

    def _ordering(self, text: Text, tree: DraftTree, later: Arm | None) -> DraftTree:
        """Add an order of the next round's tree to `tree`, if that is possible. later: the next round's likely arm"""
        if later is None or not later.drafted:
            return tree
        order = "stops" if later.stops else self._drafters.order(text, later)
        if isinstance(order, str):
            self._way = order
            return tree
        self._way, self._ordered = ORDERED, later
        return tree.with_order(order)

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        now_s, first = self._clock(), not self.account.rounds
        took_us = 1e6 * (now_s - self._began_s)
        if self._claims:
            self._drafters.ordered(self._text, arm, verdict)
        if verdict.refused:
            self._drafters.strike(arm)
        # A missed tree is likely followed by another missed one; beside a refused tree no order was placed.
        if verdict.missed or verdict.refused:
            self._ordered = None
        tree = verdict.verified(tree)
        self._plan.policy.learn(arm, tree, verdict)
        # A round that did not wait for its missing draft, as while a drafter opens the text, would make its arm seem
        # free.
        if self._teaches and (tree.draft_us or not tree.missed):
            self._experience.learn(arm, tree, verdict, self._plan.adaptive)
        self.notes.learn(arm, tree, verdict, self._plan.adaptive)
        self._running.begun()
        if not first and self._plan.learns:  # the first round also waits for the text to be opened
            disturbed = self._disturbed or self._experience.concurrency.opening > 0
            self._experience.learn_time(arm, tree, verdict, took_us, disturbed, self._plan.free, self._last_maker)
        self._last_maker = "" if tree.missed else arm.maker
        if self._stopping is not None:
            self._stopping.learn(verdict, None if first else self._experience.share_us(tree, verdict, took_us))
        self.account.learn(arm, tree, verdict, int(took_us), now_s, self._why)

    @property
    def fallbacks(self) -> Mapping[tuple[str, str], int]:
        """Rounds without the tree that was asked for, by drafter and reason."""
        return self._drafters.fallbacks

    async def close(self, text: Text) -> None:
        """Close the text at all drafters. Never raises, and may be called again."""
        if self._proposals is not None:
            self._proposals.end(text)
        await self._drafters.close(text)

    def fill(self, complete: pb.GenerateComplete, target: Opened | None, moves: int) -> None:
        """Set the statistics of `complete`. target: the first opening at a verifier   moves: number of moves to other
        verifiers"""
        self.account.fill(complete, self._drafters.openings, target, moves)
