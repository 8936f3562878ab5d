"""Statistics of requests' rounds, and a warning of a drafter none of whose guesses is accepted."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from dendro.calls import Opened
from dendro.text import Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import Arm

log = logging.getLogger("dendro.router")

ROUND_PARTS = ("draft", "verify", "queue", "hop", "opening")
"""Parts of a round's time. `SpeculationStats` has a field of microseconds for each, `draft_us` for `draft`."""

UNACCEPTED = 1000
"""Number of guesses from a router's start, none of them accepted, after which it warns."""


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


@dataclass(slots=True)
class _Counts:
    """Counts and microseconds, with the names of their fields in `SpeculationStats`. Adding to the message itself would
    take several times as long."""

    rounds: int = 0
    emitted_tokens: int = 0
    cut_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    discarded_tokens: int = 0
    trimmed_tokens: int = 0
    late_drafts: int = 0
    ordered_trees: int = 0
    ahead_us: int = 0
    rounds_us: int = 0
    decode_tokens: int = 0
    decode_us: int = 0

    def count(self, tree: DraftTree, verdict: Verdict) -> None:
        tokens, accepted, guesses = len(verdict.tokens), len(verdict.ranks), tree.guesses
        self.rounds += 1
        self.emitted_tokens += tokens
        self.cut_tokens += verdict.length - tokens
        self.drafted_tokens += guesses
        self.accepted_tokens += accepted
        self.discarded_tokens += guesses - accepted
        self.trimmed_tokens += verdict.trimmed
        self.late_drafts += tree.missed
        self.ordered_trees += verdict.tree is not None and not verdict.missed

    def time(self, us: int, verdict: Verdict, decoded_us: int | None) -> None:
        """us: the round's time   decoded_us: time since the first round ended; None in that round"""
        self.rounds_us += us
        self.ahead_us += verdict.ahead_us
        if decoded_us is not None:
            self.decode_tokens += len(verdict.tokens)
            self.decode_us = decoded_us


class RoundAccount:
    """Counts and times a request's rounds."""

    def __init__(self, policy: str, names_drafters: bool = False) -> None:
        """policy: name of the policy   names_drafters: True if arms are named with their drafters"""
        self._step_sizes: Sequence[int] = ()
        self._policy = policy
        self._names_drafters = names_drafters
        self._counts = _Counts()
        self._part_us = dict.fromkeys(ROUND_PARTS, 0)
        self._by_arm = defaultdict[Arm, int](int)  # rounds
        self._by_tokens = defaultdict[int, int](int)  # rounds, by number of their tokens
        self._drafters: dict[str, pb.DrafterStats] = {}  # key: name; in the order of first rounds
        self._first_s = 0.0  # time at which the first round ended

    @property
    def rounds(self) -> int:
        return self._counts.rounds

    def learn_target(self, step_sizes: Sequence[int]) -> None:
        """step_sizes: numbers of rows that the target's steps are padded to"""
        self._step_sizes = step_sizes

    @property
    def stats(self) -> pb.SpeculationStats:
        """The statistics of the rounds so far."""
        counts = {each.name: getattr(self._counts, each.name) for each in fields(self._counts)}
        stats = pb.SpeculationStats(policy=self._policy, step_sizes=self._step_sizes, **counts)
        for arm, count in self._by_arm.items():
            stats.rounds_by_shape[arm.name(self._names_drafters)] += count
        stats.rounds_by_tokens.update(self._by_tokens)
        for part, us in self._part_us.items():
            setattr(stats, f"{part}_us", us)
        return stats

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict, took_us: int, now_s: float) -> Mapping[str, int]:
        """Record a round. Returns the microseconds of its parts. took_us: time of the round, from the choice of its arm
        to its verdict   now_s: time at which it ended"""
        first = self._counts.rounds == 0
        parts = round_parts(tree, verdict, took_us, first)
        if first:
            self._first_s = now_s
        self._counts.count(tree, verdict)
        self._counts.time(sum(parts.values()), verdict, None if first else int(1e6 * (now_s - self._first_s)))
        for part, us in parts.items():
            self._part_us[part] += us
        self._by_arm[arm] += 1
        self._by_tokens[len(verdict.tokens)] += 1
        if arm.drafted:
            self._count_drafter(arm, tree, verdict)
        return parts

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
        complete.speculation.CopyFrom(self.stats)
        complete.speculation.verifier_moves = moves
        complete.drafters.extend(self._drafters.values())
        opened = [each for each in complete.drafters if each.name in openings]
        for each in opened:
            each.opening.CopyFrom(_opening_message(openings[each.name]))
        if opened:
            complete.drafter.CopyFrom(max(opened, key=lambda each: each.rounds).opening)
        if target is not None:
            complete.target.CopyFrom(_opening_message(target))


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
