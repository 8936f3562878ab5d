"""A request's statistics by round."""

from __future__ import annotations

import time
from collections.abc import Mapping

from dendro.calls import Hello, Opened
from dendro.clock import Clock
from dendro.step_sizes import StepSizes
from dendro.text import Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import OFF_ARM, Arm
from cluster.policies import Experience, Offer, RunningRequest
from cluster.policies.prior import Prior
from cluster.policies.stopping import StopRule
from cluster.router.speculation import SpeculationPlan


class RoundAccount:
    """Wraps a request's policy: counts its rounds for `complete`, and times them for its tenant's experience."""

    def __init__(
        self,
        plan: SpeculationPlan,
        experience: Experience,
        running: RunningRequest,
        clock: Clock = time.monotonic,
    ) -> None:
        self.notes = Prior()
        self._policy = plan.policy
        self._learns = plan.learns
        self._plain_first = plan.plain_first
        self._chosen = plan.adaptive  # a policy chooses among the configured arms
        self._experience = experience
        self.stopping = StopRule(experience) if plan.stops else None
        self.running = running
        self._clock = clock  # seconds
        self._began_s = self._first_s = 0.0
        self._disturbed = False
        self._hello: Hello | None = None
        self.arm: Arm = OFF_ARM  # of the current round
        self._announced = False  # the verifier may have begun the next round, without a tree
        self._delayed = False  # the policy chose a tree for the current round, which was announced without one
        self._names_drafters = plan.names_drafters
        self.offer: Offer | None = None  # makes the proposals for the next round
        self.stats = pb.SpeculationStats(policy=plan.name)
        self._drafters: dict[str, pb.DrafterStats] = {}  # by name, in the order of their first rounds

    def choose(self) -> Arm:
        self._began_s = self._clock()
        chosen = OFF_ARM if self._plain_first and not self.stats.rounds else self._policy.choose(self.offer)
        # A tree would wait until the round that the verifier has begun is done, and its result would be lost.
        self._delayed = self._announced and not chosen.off
        self._announced = False
        self.arm = OFF_ARM if self._delayed else chosen
        self._disturbed = self._experience.concurrency.opening > 0
        return self.arm

    def foresee(self) -> Arm:
        """The arm that the policy would choose for the first round, which has no tree: likely a later round's."""
        return self._policy.choose(self.offer)

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        now_s = self._clock()
        first = self.stats.rounds == 0
        self._policy.learn(arm, tree, verdict)
        self.notes.learn(arm, tree, verdict, self._chosen)
        self.running.begun()
        took_us = 1e6 * (now_s - self._began_s)
        if not first and self._learns:  # the first also waits for the text to be opened
            disturbed = self._disturbed or self._experience.concurrency.opening > 0
            self._experience.learn_time(arm, tree, verdict, took_us, disturbed)
        if self.stopping is not None:
            self.stopping.learn(verdict, None if first else self._experience.share_us(tree, verdict, took_us))
        self._count(arm, tree, verdict)
        self._time(tree, verdict, int(took_us), now_s, first)

    @property
    def arm_name(self) -> str:
        """The current round's arm, as in the statistics: with its drafter where the target has several."""
        return self.arm.name(self._names_drafters)

    def stays_off(self) -> bool:
        """Whether the next round, like the current one, likely has no tree. The verifier may then begin it before the
        router has this round's verdict, so it has no tree: one that is chosen then is drafted a round later."""
        self._announced = self.arm.off and not self._delayed and self._policy.stays_off
        return self._announced

    def learn_hello(self, hello: Hello | None) -> None:
        """Record whether the target has attention layers, which decides how its steps grow with their rows, and what
        its steps are padded to."""
        if hello is not None and hello is not self._hello:
            self._hello = hello
            self._experience.concurrency.attends = hello.attends
            self._experience.concurrency.sizes = StepSizes(hello.step_sizes)
            self.stats.step_sizes[:] = hello.step_sizes

    def _count(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        stats, tokens, accepted = self.stats, len(verdict.tokens), len(verdict.ranks)
        stats.rounds += 1
        stats.rounds_by_shape[arm.name(self._names_drafters)] += 1
        stats.rounds_by_tokens[tokens] += 1
        stats.emitted_tokens += tokens
        stats.cut_tokens += verdict.length - tokens
        stats.drafted_tokens += tree.guesses
        stats.accepted_tokens += accepted
        stats.discarded_tokens += tree.guesses - accepted
        stats.trimmed_tokens += verdict.trimmed
        stats.late_drafts += tree.missed
        if not arm.drafted:
            return
        drafter = self._drafters.setdefault(arm.maker, pb.DrafterStats(name=arm.maker))
        if tree.missed:  # any guesses are proposals
            drafter.late_drafts += 1
        else:
            drafter.rounds += 1
            drafter.drafted_tokens += tree.guesses - len(tree.proposed)
            drafter.accepted_tokens += _accepted_of_drafter(tree, verdict)

    def _time(self, tree: DraftTree, verdict: Verdict, took_us: int, now_s: float, first: bool) -> None:
        stats, tokens = self.stats, len(verdict.tokens)
        busy_us = tree.draft_us + verdict.verify_us + verdict.queue_us
        rest_us = max(took_us - busy_us, 0)  # peers round their times, so their sum may exceed ours
        stats.rounds_us += busy_us + rest_us
        stats.draft_us += tree.draft_us
        stats.verify_us += verdict.verify_us
        stats.queue_us += verdict.queue_us
        stats.ahead_us += verdict.ahead_us
        if first:
            stats.opening_us = rest_us
            self._first_s = now_s
        else:
            stats.hop_us += rest_us
            stats.decode_tokens += tokens
            stats.decode_us = int(1e6 * (now_s - self._first_s))

    def fill(self, complete: pb.GenerateComplete, openings: Mapping[str, Opened], target: Opened | None) -> None:
        """Set the statistics of `complete`. openings: of the drafters that opened the text, by name; target: of the
        verifier"""
        complete.speculation.CopyFrom(self.stats)
        complete.drafters.extend(self._drafters.values())
        opened = [each for each in complete.drafters if each.name in openings]
        for each in opened:
            each.opening.CopyFrom(_opening_message(openings[each.name]))
        if opened:
            complete.drafter.CopyFrom(max(opened, key=lambda each: each.rounds).opening)
        if target is not None:
            complete.target.CopyFrom(_opening_message(target))


def _accepted_of_drafter(tree: DraftTree, verdict: Verdict) -> int:
    """Accepted guesses, those aside that are the router's proposals alone."""
    if not tree.proposed:
        return len(verdict.ranks)
    rows, last = verdict.path[1:], verdict.path[-1]
    if len(verdict.ranks) > len(rows):  # the answer ends with a guess, below which nothing was drawn
        rows += tuple(row for row in tree.children(last) if tree.tokens[row] == verdict.tokens[-1])
    return sum(row not in tree.proposed for row in rows)


def _opening_message(opened: Opened) -> pb.OpeningStats:
    return pb.OpeningStats(restored_tokens=opened.restored, processed_tokens=opened.processed, open_us=opened.open_us)
