"""Counts rounds and outcome of an answer and writes its line in the log; counts what a router has done since its start,
which its status port exports; warns of a drafter none of whose guesses is accepted.

All labels of totals are from closed lists: configured targets, arms and drafters, and our own reasons and outcomes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from dendro.calls import Opened
from dendro.errors import NO_FAULTS, DendroError, EngineFailed, one_line
from dendro.measured import Histogram
from dendro.options import MAX_REQUEST_ID
from dendro.text import Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import OFF_ARM, Arm
from cluster.config import Config
from cluster.router.traces import AnswerSpan

log = logging.getLogger("dendro.router")
answer_log = logging.getLogger("dendro.requests")
"""The log of answers: at the end of each one line, a JSON object, without prompt, answer or the tenant's name."""

REFUSED, LEFT = "refused", "left"
"""Outcomes in the log for an answer that did not begin, and for one whose client went away."""
TENANT_CHARACTERS = 8
"""Length of a tenant's mark in the log: the beginning of its name's SHA-256."""
UNACCEPTED = 1000
"""Number of guesses from a router's start, none of them accepted, after which it warns."""

ROUND_PARTS = ("draft", "verify", "queue", "hop", "opening")
"""Parts of a round's time. `SpeculationStats` has a field of microseconds for each, `draft_us` for `draft`."""
OTHER = "other"
"""Label of arms and makers that are not configured: shapes that requests name."""

FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 60.0)
BETWEEN_TOKENS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 4.0)
ANSWER_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 400.0, 1000.0)


@dataclass(slots=True)
class ArmTotals:
    """Rounds of one arm, or of all arms of an answer."""

    rounds: int = 0
    tokens: int = 0  # emitted tokens
    guesses: int = 0  # guesses sent to a verifier
    accepted: int = 0  # guesses that were emitted
    trimmed: int = 0  # guesses that the verifier left out of its step

    def learn(self, tree: DraftTree, verdict: Verdict) -> None:
        self.rounds += 1
        self.tokens += len(verdict.tokens)
        self.guesses += tree.guesses
        self.accepted += len(verdict.ranks)
        self.trimmed += verdict.trimmed


@dataclass
class TargetTotals:
    """Answers of one target."""

    arms: dict[Arm, ArmTotals]
    others: dict[str, ArmTotals]  # rounds of arms that are not configured, by maker
    without_tree: Counter[tuple[str, str]] = field(default_factory=Counter)  # rounds, by drafter and reason
    ways: Counter[str] = field(default_factory=Counter)  # drafted rounds by the way of their tree, see `metrics.WAYS`
    round_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROUND_PARTS, 0.0))
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    answer_s: Histogram = field(default_factory=lambda: Histogram(ANSWER_S))
    prompt_tokens: int = 0
    moves: int = 0  # texts opened at another verifier
    reopened: int = 0  # texts opened again at the same verifier, which had forgotten them
    resumed: int = 0  # answers that a client went on with after a broken stream

    @classmethod
    def of(cls, config: Config, target: str) -> TargetTotals:
        arms = {OFF_ARM, *config.arms_of(target)}
        makers = {arm.maker for arm in arms} | set(config.drafters_of(target)) | {OTHER}
        return cls(
            {arm: ArmTotals() for arm in sorted(arms, key=str)}, {maker: ArmTotals() for maker in sorted(makers)}
        )

    def begun(self, prompt_tokens: int, resumed: bool) -> None:
        """Count an answer that begins."""
        self.prompt_tokens += prompt_tokens
        self.resumed += resumed

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict, parts: Mapping[str, int], why: str) -> None:
        """Count a round. parts: microseconds by part (`round_parts`)   why: reason why the arm is `off`, or the way of
        a drafted arm's tree"""
        self.arm(arm).learn(tree, verdict)
        if arm.off:
            self.without_tree["", why] += 1
        elif arm.drafted:
            self.ways[why] += 1
        for part, us in parts.items():
            self.round_s[part] += us / 1e6

    def left(self, fallbacks: Mapping[tuple[str, str], int], moves: int, reopened: int) -> None:
        """Count what an answer's peers did. fallbacks: rounds without the tree that was asked for, by drafter and
        reason"""
        self.without_tree.update(fallbacks)
        self.moves += moves
        self.reopened += reopened

    def arm(self, arm: Arm) -> ArmTotals:
        """The totals to which an arm's rounds are added; all arms of a maker that are not configured share one."""
        found = self.arms.get(arm)
        return found if found is not None else self.others.get(arm.maker, self.others[OTHER])


class RouterTotals:
    """Counts of all requests of one router."""

    def __init__(self, config: Config) -> None:
        self.targets = {name: TargetTotals.of(config, name) for name in config.targets}
        self.outcomes: Counter[tuple[str, str]] = Counter()  # answers, by target, empty where unknown, and outcome
        self.errors: Counter[str] = Counter()  # requests that ended with an error, by gRPC code

    def failed(self, error: BaseException) -> None:
        """Count a request that ends with an error. A client that leaves is not counted."""
        if isinstance(error, DendroError) and not isinstance(error, EngineFailed):
            self.errors[error.code.name] += 1
        elif not isinstance(error, NO_FAULTS):
            self.errors[grpc.StatusCode.INTERNAL.name] += 1


def round_parts(tree: DraftTree, verdict: Verdict, took_us: int, first: bool) -> dict[str, int]:
    """Divide a round's time, `took_us`, into microseconds by part. The rest that no peer reports is `opening` in a
    first round, otherwise `hop`; at least 0, since the rounded times of peers may exceed `took_us` together.

    >>> verdict = Verdict((8,), (0,), (), None, 1, verify_us=50, queue_us=5)
    >>> round_parts(DraftTree.root_only(7), verdict, 60, first=False)
    {'draft': 0, 'verify': 50, 'queue': 5, 'hop': 5}
    """
    parts = {"draft": tree.draft_us, "verify": verdict.verify_us, "queue": verdict.queue_us}
    parts["opening" if first else "hop"] = max(took_us - sum(parts.values()), 0)
    return parts


class AnswerAccount:
    """Counts and times of one answer, and how it ended. They go into its `complete`, its line in the log and its span;
    those of a computed answer are added to its target's totals, too."""

    def __init__(self, policy: str = "", names_drafters: bool = False, span: AnswerSpan | None = None) -> None:
        """policy: name of the policy   names_drafters: True if arms are named with their drafters   span: the answer's
        span; None: it is not sampled"""
        self.outcome = REFUSED
        self._policy = policy
        self._names_drafters = names_drafters
        self._span = span
        self._totals: TargetTotals | None = None  # None: the answer is not computed, or not counted
        self._prompt_tokens, self._resumed = 0, False
        self._began_s = self._last_s = 0.0  # times of the request's arrival and of the last round's end
        self._first_s: float | None = None  # time at which the first round ended
        self._step_sizes: Sequence[int] = ()
        self._counts = ArmTotals()
        self._cut_tokens = self._late_drafts = self._ordered_trees = self._decode_tokens = self._ahead_us = 0
        self._part_us = dict.fromkeys(ROUND_PARTS, 0)
        self._by_arm = defaultdict[Arm, int](int)  # rounds
        self._by_tokens = defaultdict[int, int](int)  # rounds, by number of their tokens
        self._drafters: dict[str, pb.DrafterStats] = {}  # key: name; in the order of first rounds

    def begin(self, totals: TargetTotals, began_s: float, prompt_tokens: int = 0, resumed: bool = False) -> None:
        """Count a computed answer. began_s: time of the request's arrival, on the clock of `learn`   resumed: True if
        the client goes on with an answer after a broken stream"""
        self._totals = totals
        self._began_s = began_s
        self._prompt_tokens, self._resumed = prompt_tokens, resumed
        totals.begun(prompt_tokens, resumed)

    @property
    def rounds(self) -> int:
        return self._counts.rounds

    def ended(self, outcome: str) -> None:
        self.outcome = outcome

    def learn_target(self, step_sizes: Sequence[int]) -> None:
        """step_sizes: numbers of rows that the target's steps are padded to"""
        self._step_sizes = step_sizes

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict, took_us: int, now_s: float, why: str) -> None:
        """Count a round. took_us: time of the round, from the choice of its arm to its verdict   now_s: time at which
        it ended   why: reason why the arm is `off`, or the way of a drafted arm's tree"""
        first, tokens = self._first_s is None, len(verdict.tokens)
        parts = round_parts(tree, verdict, took_us, first)
        self._counts.learn(tree, verdict)
        self._cut_tokens += verdict.length - tokens
        self._late_drafts += tree.missed
        self._ordered_trees += verdict.tree is not None and not verdict.missed
        self._decode_tokens += 0 if first else tokens
        self._ahead_us += verdict.ahead_us
        for part, us in parts.items():
            self._part_us[part] += us
        self._by_arm[arm] += 1
        self._by_tokens[tokens] += 1
        if arm.drafted:
            self._count_drafter(arm, tree, verdict)
        if self._totals is not None:
            self._totals.learn(arm, tree, verdict, parts, why)
            if first:
                self._totals.first_token_s.observe(now_s - self._began_s)
            else:
                self._totals.between_tokens_s.observe((now_s - self._last_s) / max(tokens, 1), tokens)
        if self._span is not None:
            self._span.round(arm, tree, verdict)
        self._first_s, self._last_s = now_s if self._first_s is None else self._first_s, now_s

    def _count_drafter(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        drafter = self._drafters.setdefault(arm.maker, pb.DrafterStats(name=arm.maker))
        if tree.missed:  # any guesses are proposals
            drafter.late_drafts += 1
        else:
            drafter.rounds += 1
            drafter.drafted_tokens += tree.guesses - len(tree.proposed)
            drafter.accepted_tokens += _accepted_of_drafter(tree, verdict)

    def fill(
        self, complete: pb.GenerateComplete, openings: Mapping[str, Opened], target: Opened | None, moves: int
    ) -> None:
        """Set the statistics of `complete`. openings: opening at each drafter that opened the text, by name
        target: opening at the verifier   moves: number of moves to other verifiers"""
        counts, first_s = self._counts, self._first_s
        part_us: dict[str, Any] = {f"{part}_us": us for part, us in self._part_us.items()}
        stats = pb.SpeculationStats(
            policy=self._policy,
            step_sizes=self._step_sizes,
            rounds=counts.rounds,
            emitted_tokens=counts.tokens,
            cut_tokens=self._cut_tokens,
            drafted_tokens=counts.guesses,
            accepted_tokens=counts.accepted,
            discarded_tokens=counts.guesses - counts.accepted,
            trimmed_tokens=counts.trimmed,
            late_drafts=self._late_drafts,
            ordered_trees=self._ordered_trees,
            decode_tokens=self._decode_tokens,
            decode_us=int(1e6 * (self._last_s - first_s)) if first_s is not None else 0,
            ahead_us=self._ahead_us,
            rounds_us=sum(self._part_us.values()),
            verifier_moves=moves,
            **part_us,
        )
        for arm, count in self._by_arm.items():
            stats.rounds_by_shape[arm.name(self._names_drafters)] += count
        stats.rounds_by_tokens.update(self._by_tokens)
        complete.speculation.CopyFrom(stats)
        complete.drafters.extend(self._drafters.values())
        opened = [each for each in complete.drafters if each.name in openings]
        for each in opened:
            each.opening.CopyFrom(_opening_message(openings[each.name]))
        if opened:
            complete.drafter.CopyFrom(max(opened, key=lambda each: each.rounds).opening)
        if target is not None:
            complete.target.CopyFrom(_opening_message(target))

    def log(self, request_id: str, tenant: str, target: str, seconds: float) -> None:
        """Log the end of the answer, and end its span. request_id: as the client sees it   target: empty if the request
        named none"""
        counts, first_s = self._counts, self._first_s
        line: dict[str, str | int | float | bool | None] = {
            "request_id": one_line(request_id, MAX_REQUEST_ID),
            "tenant": hashlib.sha256(tenant.encode()).hexdigest()[:TENANT_CHARACTERS],
            "target": target,
            "outcome": self.outcome,
            "prompt_tokens": self._prompt_tokens,
            "tokens": counts.tokens,
            "rounds": counts.rounds,
            "guesses": counts.guesses,
            "accepted": counts.accepted,
            "late_drafts": self._late_drafts,
            "resumed": self._resumed,
            "first_token_s": None if first_s is None else first_s - self._began_s,
            "seconds": round(seconds, 4),
        }
        answer_log.info("%s", json.dumps(line))
        if self._span is not None:
            facts: dict[str, str | int | float | bool] = {
                f"dendro.{name}": value for name, value in line.items() if value is not None and name != "tenant"
            }
            facts |= {"gen_ai.usage.input_tokens": self._prompt_tokens}
            facts |= {"gen_ai.usage.output_tokens": counts.tokens}
            self._span.end(facts, self.outcome[:1].isupper())


def _accepted_of_drafter(tree: DraftTree, verdict: Verdict) -> int:
    """Number of accepted guesses that the drafter made, whether proposers made them too or not."""
    if not tree.proposed:
        return len(verdict.ranks)
    return sum(row not in tree.proposed for row in accepted_rows(tree, verdict))


def accepted_rows(tree: DraftTree, verdict: Verdict) -> tuple[int, ...]:
    """Rows of the accepted guesses, from the root down."""
    rows, last = verdict.path[1:], verdict.path[-1]
    if len(verdict.ranks) > len(rows):  # the answer ends with a guess, below which nothing was drawn
        rows += tuple(row for row in tree.children(last) if tree.tokens[row] == verdict.tokens[-1])
    return rows


def _opening_message(opened: Opened) -> pb.OpeningStats:
    return pb.OpeningStats(restored_tokens=opened.restored, processed_tokens=opened.processed, open_us=opened.open_us)


class AcceptanceWatch:
    """Counts the guesses of each drafter for each target until one is accepted. A drafter none of whose guesses is
    accepted costs time, and something is wrong with its checkpoint."""

    def __init__(self) -> None:
        self._guesses: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._settled: set[tuple[str, str]] = set()  # pairs with an accepted guess, or warned of

    def learn(self, target: str, drafters: Iterable[pb.DrafterStats]) -> None:
        """Add the statistics of an answer's drafters. Logs one warning for each pair of a drafter and a target, after
        UNACCEPTED guesses of which none was accepted."""
        for each in drafters:
            pair = each.name, target
            if pair in self._settled:
                continue
            self._guesses[pair] += each.drafted_tokens
            if each.accepted_tokens:
                self._settled.add(pair)
            elif self._guesses[pair] >= UNACCEPTED:
                self._settled.add(pair)
                log.warning(
                    "drafter %s: none of its %d guesses for %s was accepted; was it trained for this target?",
                    each.name,
                    self._guesses[pair],
                    target,
                )
