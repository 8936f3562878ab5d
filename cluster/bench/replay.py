"""Policies on recorded answers: the real policy object chooses and learns, the traces say what came of it.

What a round emitted is the trace's, what it took the cost table's. So the same choices always have the same outcome,
and what a policy did can be held against what every arm alone would have done on the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.bench.costs import ReplayCosts
from cluster.bench.traces import Trace
from cluster.policies import Experience, InformedPolicy, make_policy
from cluster.policies.experience import Concurrency
from cluster.proposers.chances import Chances
from cluster.proposers.lookup import Lookup


@dataclass(frozen=True, slots=True)
class Played:
    """One round of a replay."""

    shape: TreeShape
    emitted: int
    took_us: float


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedAnswer:
    """All rounds of one answer."""

    trace: Trace
    rounds: tuple[Played, ...]

    @property
    def tokens_per_second(self) -> float:
        return 1e6 * sum(each.emitted for each in self.rounds) / sum(each.took_us for each in self.rounds)

    @property
    def emitted_per_round(self) -> float:
        return sum(each.emitted for each in self.rounds) / len(self.rounds)

    @property
    def arms(self) -> Counter[TreeShape]:
        return Counter(each.shape for each in self.rounds)


def sibling_ranks(tree: DraftTree, path: Sequence[int]) -> tuple[int, ...]:
    """Of each guess on a path, its rank among its siblings."""
    return tuple(tree.children(above).index(row) for above, row in pairwise(path))


def run_fixed(shape: TreeShape, trace: Trace, costs: ReplayCosts) -> ReplayedAnswer:
    """One answer with the same shape in every round."""
    draft_us = costs.draft_us(shape)
    return ReplayedAnswer(
        trace,
        tuple(
            Played(shape, emitted, draft_us + costs.step_us(trace.rows(shape, base)))
            for base, emitted in trace.rounds(shape)
        ),
    )


def run_policy(
    policy: InformedPolicy, experience: Experience, trace: Trace, costs: ReplayCosts, chances: Chances | None = None
) -> ReplayedAnswer:
    """One answer as a policy that begins now goes through it. Learning is the policy's, the experience's, and that of
    `chances`, with which it is told what is proposed."""
    answer = trace.answer
    rounds: list[Played] = []
    base = traced = answer.begin
    with experience.concurrency.running() as place:
        while base < answer.end:
            proposal = trace.proposals[base - answer.begin] if chances and trace.proposals else None
            offer = partial(chances.tree, Lookup.name, proposal) if chances and proposal else None
            shape = policy.choose(offer)
            draft_us, step_us = costs.draft_us(shape), costs.step_us(trace.rows(shape, base))
            tree = replace(trace.tree(shape, base), draft_us=round(draft_us), texts=1)
            if shape.drafted:
                tree, traced = replace(tree, trace=trace.told(traced, base)), base
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
            policy.learn(shape, tree, verdict)
            place.begun()
            if rounds:  # as in the router: the first waits for its text to be opened
                experience.learn_time(shape, tree, verdict, draft_us + step_us)
            rounds.append(Played(shape, len(path), draft_us + step_us))
            base += len(path)
    return ReplayedAnswer(trace, tuple(rounds))


def run_stream(
    name: str, arms: Sequence[TreeShape], traces: Sequence[Trace], costs: ReplayCosts, passes: int
) -> Iterator[list[ReplayedAnswer]]:
    """The answers one after the other, several times over, with one experience as a router has it: a list per pass.

    Begins with an experience that knows nothing; every answer gets a policy of its own.
    """
    experience, chances = (
        Experience(Concurrency(attends=True)),
        Chances(),
    )  # the target of these traces is a Transformer
    for _ in range(passes):
        yield [
            run_policy(make_policy(name, arms, experience, trace.answer.temperature), experience, trace, costs, chances)
            for trace in traces
        ]


def shares(runs: Sequence[ReplayedAnswer], window: int, wanted: Callable[[Trace], bool]) -> list[dict[str, float]]:
    """How often each arm was chosen in one window of rounds after the other, over the answers that are wanted."""
    rounds = [played.shape for run in runs if wanted(run.trace) for played in run.rounds]
    found = []
    for start in range(0, len(rounds), window):
        counts = Counter(rounds[start : start + window])
        found.append({str(shape): count / counts.total() for shape, count in counts.most_common()})
    return found
