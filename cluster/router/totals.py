"""What a router has done since its start: plain numbers, which its status port exports.

All labels are from closed lists: configured targets, arms and drafters, and our own reasons and outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from dendro.errors import NO_FAULTS, DendroError, EngineFailed
from dendro.measured import Histogram
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.config import Config

ROUND_PARTS = ("draft", "verify", "queue", "hop", "opening")
"""Parts of a round's time. `SpeculationStats` has a field of microseconds for each, `draft_us` for `draft`."""
OTHER = "other"
"""Label of arms and makers that are not configured: shapes that requests name."""

FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 60.0)
BETWEEN_TOKENS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 4.0)
ANSWER_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 400.0, 1000.0)


@dataclass(slots=True)
class ArmTotals:
    """Rounds of one arm."""

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
