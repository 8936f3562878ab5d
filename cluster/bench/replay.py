"""Replay of policies on recorded answers: the real policy object chooses and learns.

Emitted tokens come from the trace, times from the cost table. So replays are deterministic, and a policy can be
compared with every fixed arm on the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from dendro.shapes import TreeShape
from dendro.step_sizes import StepSizes
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.bench.costs import STEP_ROWS, ReplayCosts
from cluster.bench.traces import Trace
from cluster.measure.statistics import Key
from cluster.policies import Experience, InformedPolicy, make_policy
from cluster.policies.experience import Concurrency
from cluster.policies.prior import Prior
from cluster.policies.stopping import StopRule
from cluster.proposers.chances import Chances
from cluster.proposers.lookup import Lookup
from cluster.proposers.proposal import Proposal


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """One round of a replay."""

    shape: TreeShape
    emitted: int
    guesses: int
    took_us: float


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedAnswer:
    """All rounds of one answer."""

    trace: Trace
    rounds: tuple[ReplayedRound, ...]

    @property
    def tokens_per_second(self) -> float:
        return rate([self])

    @property
    def arms(self) -> Counter[TreeShape]:
        return Counter(each.shape for each in self.rounds)


def rate(runs: Sequence[ReplayedAnswer]) -> float:
    """Tokens a second over all rounds of all answers."""
    rounds = [played for run in runs for played in run.rounds]
    return 1e6 * sum(played.emitted for played in rounds) / sum(played.took_us for played in rounds)


def rates(runs: Sequence[ReplayedAnswer]) -> dict[Key, float]:
    """Tokens a second of each answer, for `paired_ratio`."""
    return by_answer([run.tokens_per_second for run in runs])


def by_answer(values: Sequence[float]) -> dict[Key, float]:
    """Values of answers, for `paired_ratio`."""
    return {(index, 0): value for index, value in enumerate(values)}


def arm_of(shape: TreeShape) -> Arm:
    """The arm of a shape in a replay, whose guesses come from one drafter and from `lookup`."""
    return Arm.of("drafter" if shape.drafted else Lookup.name, shape)


def sibling_ranks(tree: DraftTree, path: Sequence[int]) -> tuple[int, ...]:
    """The rank among its siblings of each guess on a path."""
    return tuple(tree.children(above).index(row) for above, row in pairwise(path))


def run_fixed(shape: TreeShape, trace: Trace, costs: ReplayCosts) -> ReplayedAnswer:
    """Replay one answer with the same shape in every round."""
    rounds = []
    for base, emitted in trace.rounds(shape):
        rows, draft_us = trace.rows(shape, base), costs.draft_us(trace.drafted_as(shape, base))
        rounds.append(ReplayedRound(shape, emitted, rows - 1, draft_us + costs.step_us(rows)))
    return ReplayedAnswer(trace, tuple(rounds))


def offered(chances: Chances, proposal: Proposal, least: float) -> DraftTree:
    """The tree of what prompt lookup proposes, as a router offers it to a policy."""
    if proposal.guesses and chances.first(Lookup.name, proposal) >= least:
        return chances.tree(Lookup.name, proposal)
    return DraftTree.root_only(proposal.root)


def run_policy(
    policy: InformedPolicy,
    experience: Experience,
    trace: Trace,
    costs: ReplayCosts,
    chances: Chances | None = None,
    notes: Prior | None = None,
    rule: StopRule | None = None,
) -> ReplayedAnswer:
    """Replay one answer with a new policy. The policy, the experience, `chances`, `notes` and `rule` learn from it.

    Without `chances`, the policy gets no proposals.
    """
    answer = trace.answer
    rounds: list[ReplayedRound] = []
    base = answer.begin
    ranked: int | None = None  # ranks of ids[:ranked] were reported; a drafter's first tree begins them
    with experience.concurrency.running() as running:
        while base < answer.end:
            proposal = trace.proposals[base - answer.begin] if chances and trace.proposals else None
            offer = partial(offered, chances, proposal) if chances and proposal else None
            arm = policy.choose(offer)
            shape = (arm if rule is None else rule.resolved(arm)).shape
            draft_us, step_us = costs.draft_us(trace.drafted_as(shape, base)), costs.step_us(trace.rows(shape, base))
            tree = replace(trace.tree(shape, base), draft_us=round(draft_us), texts=1)
            if rule is not None:
                rule.drafted(tree)
            if shape.drafted and len(trace.ranks):
                known = base if ranked is None else ranked
                tree, ranked = replace(tree, trace=trace.reported_ranks(known, base)), base
            path = trace.path(shape, base)
            verdict = Verdict(
                tokens=answer.ids[base : base + len(path)],
                path=path,
                ranks=sibling_ranks(tree, path),
                finish=None,
                length=len(path),
                verify_us=round(step_us),
                step_rows=tree.rows,
            )
            if chances and proposal:
                chances.learn(Lookup.name, proposal, verdict.tokens)
            policy.learn(arm, tree, verdict)
            if notes is not None:
                notes.learn(arm, tree, verdict, True)
            running.begun()
            took_us = draft_us + step_us
            if rounds:  # the first round includes opening the text, as in the router
                experience.learn_time(arm, tree, verdict, took_us)
            if rule is not None:
                rule.learn(verdict, experience.share_us(tree, verdict, took_us) if rounds else None)
            rounds.append(ReplayedRound(shape, len(path), tree.guesses, took_us))
            base += len(path)
    return ReplayedAnswer(trace, tuple(rounds))


def new_experience() -> Experience:
    """The experience of a target that is a Transformer, as those of the replayed answers are."""
    return Experience(Concurrency(attends=True, sizes=StepSizes(STEP_ROWS)))


def run_stream(
    name: str, shapes: Sequence[TreeShape], traces: Sequence[Trace], costs: ReplayCosts, passes: int
) -> Iterator[list[ReplayedAnswer]]:
    """Replay all answers in order, `passes` times, by one router and as one tenant's; a list per pass."""
    experience = new_experience()
    prior, chances, arms = Prior(), Chances(), [arm_of(shape) for shape in shapes]
    for _ in range(passes):
        runs = []
        for trace in traces:
            policy, notes = make_policy(name, arms, experience, prior), Prior()
            runs.append(run_policy(policy, experience, trace, costs, chances, notes))
            prior.add(notes)
        yield runs
