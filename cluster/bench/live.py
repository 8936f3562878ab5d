"""Recorded rounds again with drafter and verifier: their real time, and whether they emit as replayed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.shapes import OFF, DynamicShape, LevelShape, TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.bench.costs import ReplayCosts
from cluster.bench.replay import run_fixed
from cluster.bench.traces import SPARE, Trace, TracedAnswer
from cluster.measure.in_process import EngineText


def live_shapes() -> tuple[TreeShape, ...]:
    """A few shapes of different kinds; few, as each is measured in real time."""
    return (OFF, LevelShape((1, 1, 1, 1)), LevelShape((3, 2, 1)), DynamicShape(4, 5, 15))


class LiveRule(Protocol):
    """What decides the shape of each round, where it is not always the same."""

    def begin(self) -> TreeShape: ...
    def learn(self, tree: DraftTree, verdict: Verdict, took_us: float) -> None: ...


async def live_rounds(
    drafter: DrafterPeer,
    verifier: VerifierPeer,
    shape: TreeShape,
    answer: TracedAnswer,
    rule: LiveRule | None = None,
) -> tuple[list[int], float]:
    """N of every round of one answer with drafter and verifier, one round after the other; and the seconds of all.

    Drafter and verifier get the prompt, the sampling parameters and a length limit, not the recorded tokens.
    rule: computes the shape of each round from that one, and learns from its verdict
    """
    peer = EngineText(answer.ids[: answer.begin], answer.sampling)
    await peer.open(verifier, answer.tokens + 2 * SPARE)
    await peer.open(drafter, answer.tokens + 2 * SPARE)
    verifier_length = drafter_length = len(peer.text)  # tokens of the text that each has received
    emitted: list[int] = []
    started = time.perf_counter()
    while len(peer.text) < answer.end:
        tree, began = DraftTree.root_only(peer.text.ids[-1]), time.perf_counter()
        if not shape.off:
            wanted = shape if rule is None else rule.begin()
            tree, drafter_length = await peer.draft(drafter, wanted, drafter_length), len(peer.text)
        verdict = await peer.verify(verifier, tree, verifier_length)
        verifier_length = len(peer.text)
        peer.text.extend(verdict.tokens)
        if rule is not None:
            rule.learn(tree, verdict, 1e6 * (time.perf_counter() - began))
        emitted.append(verdict.length)
    seconds = time.perf_counter() - started
    await peer.close(verifier)
    await peer.close(drafter, drafter_length)
    return emitted, seconds


async def live_row(
    drafter: DrafterPeer, verifier: VerifierPeer, shape: TreeShape, traces: Sequence[Trace], costs: ReplayCosts
) -> dict[str, Any]:
    """One arm's rate in real time, beside the rate predicted for the same answers."""
    rounds = tokens = differences = 0
    seconds = predicted_us = 0.0
    for trace in traces:
        emitted, took = await live_rounds(drafter, verifier, shape, trace.answer)
        run = run_fixed(shape, trace, costs)
        replayed = [played.emitted for played in run.rounds]
        differences += sum(a != b for a, b in zip_longest(emitted, replayed))
        rounds += len(emitted)
        tokens += sum(emitted)
        seconds += took
        predicted_us += sum(played.took_us for played in run.rounds)
    return {
        "temperature": traces[0].answer.temperature,
        "arm": str(shape),
        "rounds": rounds,
        "differences": differences,
        "tokens_per_second": round(tokens / seconds, 2),
        "predicted_tokens_per_second": round(
            1e6 * sum(sum(n for _, n in trace.rounds(shape)) for trace in traces) / predicted_us, 2
        ),
    }
