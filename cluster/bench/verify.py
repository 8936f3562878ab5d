"""Verification modes side by side: answers of each mode and tree, round by round, with drafter and verifier."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.modes import VerificationMode
from dendro.shapes import LevelShape
from dendro.text import Sampling

from cluster.measure.in_process import EngineText
from cluster.measure.measurement import Step
from cluster.measure.report import Row, aim_row
from cluster.measure.statistics import Key, median_estimate, paired_ratio

SHAPES: Mapping[int, LevelShape] = {1: LevelShape((1, 1, 1)), 2: LevelShape((2, 2, 2)), 4: LevelShape((4, 4, 2))}
"""By the children of a row: trees of three levels. Of four children the last level has two, for 63 guesses at most."""

UNDECIDED = "the interval includes 1: answers differ from mode to mode, so more of them are needed"

ROOM = 80
"""Room past an answer, in tokens."""


@dataclass(frozen=True, slots=True)
class VerifiedArm:
    """A mode and a tree."""

    mode: VerificationMode
    children: int

    @property
    def shape(self) -> LevelShape:
        return SHAPES[self.children]


@dataclass(frozen=True, slots=True)
class VerifiedAnswer:
    """What one answer took."""

    tokens: int
    rounds: int
    seconds: float


ARMS = (
    *(VerifiedArm(VerificationMode.COUPLED, children) for children in SHAPES),
    *(VerifiedArm(VerificationMode.MULTI_STEP, children) for children in SHAPES),
    VerifiedArm(VerificationMode.BLOCK, 1),
    *(VerifiedArm(VerificationMode.NAIVE, children) for children in SHAPES),
)


async def verified_answer(
    drafter: DrafterPeer, verifier: VerifierPeer, arm: VerifiedArm, ids: Sequence[int], sampling: Sampling, tokens: int
) -> VerifiedAnswer:
    """An answer of at least so many tokens in an arm's mode, each round with the arm's tree. The opening is not timed.

    sampling: of the request; its mode is the arm's
    """
    # The engines get the same text under different parameters, as from a router.
    at_verifier, at_drafter = EngineText(ids, sampling), EngineText(ids, sampling.of_drafters)
    await at_verifier.open(verifier, tokens + ROOM)
    await at_drafter.open(drafter, tokens + ROOM)
    known, rounds, began = len(ids), 0, time.perf_counter()
    while len(at_verifier.text) < len(ids) + tokens:
        length = len(at_verifier.text)
        tree = await at_drafter.draft(drafter, arm.shape, known)
        verdict = await at_verifier.verify(verifier, tree, known)
        for peer in (at_verifier, at_drafter):
            peer.text.extend(verdict.tokens)
        known, rounds = length, rounds + 1
    seconds = time.perf_counter() - began
    await at_verifier.close(verifier, known)
    await at_drafter.close(drafter, known)
    return VerifiedAnswer(len(at_verifier.text) - len(ids), rounds, seconds)


async def measure_arms(
    drafter: DrafterPeer,
    verifier: VerifierPeer,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    tokens: int,
    repetitions: int,
    seed: int,
    step: Step,
) -> dict[VerifiedArm, dict[Key, VerifiedAnswer]]:
    """Every arm's answers. The arms alternate on each prompt, in another order each time, after one answer each that
    does not count; repetitions have seeds of their own, the same for all arms."""
    found: dict[VerifiedArm, dict[Key, VerifiedAnswer]] = {arm: {} for arm in ARMS}
    for arm in ARMS:
        await verified_answer(drafter, verifier, arm, prompts[0], Sampling(temperature, mode=arm.mode), 8)
    for repetition in range(repetitions):
        for number, ids in enumerate(prompts):
            turn = (number + repetition) % len(ARMS)
            own = seed * 1_000_003 + repetition * len(prompts) + number
            for arm in (*ARMS[turn:], *ARMS[:turn]):
                sampling = Sampling(temperature, seed=own, mode=arm.mode)
                answer = await verified_answer(drafter, verifier, arm, ids, sampling, tokens)
                found[arm][number, repetition] = answer
                step()
    return found


def arm_rows(found: Mapping[VerifiedArm, Mapping[Key, VerifiedAnswer]], temperature: float) -> list[Row]:
    """A row for each arm: medians over prompts, and ratios to the coupled mode with the same tree, paired by prompt."""
    rows = []
    for arm, answers in found.items():
        coupled = found[VerifiedArm(VerificationMode.COUPLED, arm.children)]
        emitted, speed = _per_round(answers), _per_second(answers)
        rows.append(
            {
                "temperature": temperature,
                "mode": str(arm.mode),
                "children": arm.children,
                "shape": str(arm.shape),
                "answers": len(answers),
                "rounds": sum(answer.rounds for answer in answers.values()),
                "emitted_per_round": median_estimate(list(emitted.values())).as_json(),
                "tokens_per_s": median_estimate(list(speed.values())).as_json(),
                "emitted_over_coupled": paired_ratio(emitted, _per_round(coupled)).as_json(),
                "speed_over_coupled": paired_ratio(speed, _per_second(coupled)).as_json(),
            }
        )
    return rows


def aims_of(found: Mapping[VerifiedArm, Mapping[Key, VerifiedAnswer]], temperature: float) -> list[Row]:
    """What the literature says of emitted tokens per round, as ratios of at least 1, paired by prompt. Not judged where
    the interval includes 1."""
    claims = (
        (VerifiedArm(VerificationMode.BLOCK, 1), VerifiedArm(VerificationMode.MULTI_STEP, 1), "block verification"),
        (VerifiedArm(VerificationMode.MULTI_STEP, 1), VerifiedArm(VerificationMode.COUPLED, 1), "drafter invariance"),
        (VerifiedArm(VerificationMode.COUPLED, 4), VerifiedArm(VerificationMode.NAIVE, 4), "shared noise"),
        (VerifiedArm(VerificationMode.COUPLED, 4), VerifiedArm(VerificationMode.MULTI_STEP, 4), "shared noise"),
    )
    rows = []
    for over, under, source in claims:
        ratio = paired_ratio(_per_round(found[over]), _per_round(found[under]))
        aim = (
            f"emitted per round of {over.mode} over {under.mode}, {over.children} children, "
            f"temperature {temperature:g} ({source})"
        )
        met = None if ratio.low < 1.0 <= ratio.high else ratio.low >= 1.0
        rows.append(aim_row(aim, 1.0, met, ratio, "" if met is not None else UNDECIDED))
    return rows


def _per_round(answers: Mapping[Key, VerifiedAnswer]) -> dict[Key, float]:
    return {key: answer.tokens / answer.rounds for key, answer in answers.items()}


def _per_second(answers: Mapping[Key, VerifiedAnswer]) -> dict[Key, float]:
    return {key: answer.tokens / answer.seconds for key, answer in answers.items()}


def by_temperature(rows: Sequence[Row]) -> dict[float, list[dict[str, Any]]]:
    """The rows of each temperature, in order."""
    found: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["temperature"], []).append(row)
    return found
