"""`dendro bench stopping`: a few rules in real time, beside the configured arms, in turns on the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.shapes import OFF, MarginalShape, TreeShape

from cluster.arms import Arm
from cluster.bench.live import live_rounds
from cluster.bench.stopping import FORMS, MarginalRounds, new_experience
from cluster.bench.traces import TracedAnswer
from cluster.measure.measurement import Step
from cluster.measure.report import Row
from cluster.measure.statistics import paired_ratio

LIVE_H = 0.9
"""The fixed h that is run in real time: the greatest of SpecDec++'s grid, as these targets verify a row cheaply."""

Timed = Mapping[TreeShape, Sequence[tuple[int, int, float]]]
"""By arm, of each answer: rounds, emitted tokens, seconds."""


def live_arms(configured: Sequence[Arm]) -> tuple[TreeShape, ...]:
    """`off`, the configured arms of a drafter, and the rules of both forms."""
    drafted = [arm.shape for arm in configured if arm.drafted]
    rules = [shape for form in FORMS for shape in (form.until(LIVE_H), form.marginal)]
    return tuple(dict.fromkeys([OFF, *drafted, *rules]))


async def run_live(
    drafter: DrafterPeer, verifier: VerifierPeer, arms: Sequence[TreeShape], answers: Sequence[TracedAnswer], step: Step
) -> Timed:
    """Every answer by every arm; the arms take turns, and each answer begins with another one. Each marginal rule has
    an experience of its own, which begins empty."""
    experiences = {arm: new_experience() for arm in arms}
    found: dict[TreeShape, list[tuple[int, int, float]]] = {arm: [] for arm in arms}
    for index, answer in enumerate(answers):
        first = index % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            rule = None
            if isinstance(arm, MarginalShape):
                rule = MarginalRounds(arm, experiences[arm], answer.temperature)
            emitted, seconds = await live_rounds(drafter, verifier, arm, answer, rule=rule)
            found[arm].append((len(emitted), sum(emitted), seconds))
            step()
    return found


def live_rows(timed: Timed, temperature: float) -> Iterator[Row]:
    """One row for each arm; over all answers."""
    rates = {
        arm: {(index, 0): tokens / seconds for index, (_, tokens, seconds) in enumerate(answers)}
        for arm, answers in timed.items()
    }
    for arm, answers in timed.items():
        rounds, tokens, seconds = map(sum, zip(*answers, strict=True))
        yield {
            "temperature": temperature,
            "arm": str(arm),
            "rounds": rounds,
            "emitted_per_round": round(tokens / rounds, 3),
            "tokens_per_second": round(tokens / seconds, 2),
            "over_off": paired_ratio(rates[arm], rates[OFF]).as_json(),
        }
