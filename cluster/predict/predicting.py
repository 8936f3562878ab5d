"""The measurements behind predictions, in their order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dendro.errors import BadRequest
from dendro.text import Sampling

from cluster.arms import OFF_ARM, Arm
from cluster.measure.measurement import Begin, Step
from cluster.predict.prediction import Prediction, predict_by_ranks, predict_by_runs, ranks_determine
from cluster.tune.measuring import Ranker, RunAnswer, Strangers, Timed

WARM_TOKENS = 8
"""Tokens of the warm-up answers, which are not timed."""


@dataclass(frozen=True, slots=True)
class PredictPlan:
    """Measurements to make for one target."""

    target: str
    arms: tuple[Arm, ...]  # arms other than `off`
    prompts: tuple[tuple[int, ...], ...]
    timed: int  # number of prompts, from the first on, whose answers are timed
    held_out: tuple[tuple[int, ...], ...]  # other prompts, on which predictions are compared with runs
    tokens: int  # most tokens of an answer
    seed: int

    @property
    def every(self) -> tuple[tuple[int, ...], ...]:
        return (*self.prompts, *self.held_out)


@dataclass(slots=True)
class Predicted:
    """Measurements and predictions at one temperature."""

    temperature: float
    off: Timed
    predictions: list[Prediction]
    unknown: list[Arm]  # arms whose answers have no second round
    held_out: dict[Arm, dict[int, RunAnswer]]  # `off` included
    ranks: dict[str, list[list[int]]]  # by drafter: of each answer's tokens
    differences: list[str] = field(default_factory=list)


class Predicting:
    """Runs a plan on a running cluster."""

    def __init__(self, plan: PredictPlan, strangers: Strangers, rankers: Mapping[str, Ranker], begin: Begin) -> None:
        """rankers: by drafter; arms of other drafters are run on every prompt"""
        self.plan = plan
        self._strangers = strangers
        self._rankers = rankers
        self._begin = begin

    async def at(self, temperature: float) -> Predicted:
        plan = self.plan
        await self._warm(temperature)
        answers = await self._run(temperature)
        off = answers[OFF_ARM]
        parts = Timed.of([off[prompt] for prompt in range(plan.timed)])
        if parts is None:
            raise BadRequest("prompts", f"the target's answers to {plan.timed} have less than two tokens")
        ranks = self._ranks(temperature, off)
        predictions, unknown = [], []
        for arm in plan.arms:
            seen = {prompt: each for prompt, each in answers[arm].items() if prompt < len(plan.prompts)}
            if self._by_ranks(arm):
                found = predict_by_ranks(arm, ranks[arm.maker], seen, off)
            else:
                found = predict_by_runs(arm, seen, off)
            if found is None:
                unknown.append(arm)
            else:
                predictions.append(found)
        held_out = {
            arm: {prompt: each for prompt, each in found.items() if prompt >= len(plan.prompts)}
            for arm, found in answers.items()
        }
        differences = self._differences(temperature, answers)
        return Predicted(temperature, parts, predictions, unknown, held_out, ranks, differences)

    def _by_ranks(self, arm: Arm) -> bool:
        return arm.maker in self._rankers and ranks_determine(arm)

    def _arms_of(self, prompt: int) -> list[Arm]:
        """The arms that answer a prompt: all of the timed and the held-out ones; of the others those without ranks."""
        everything = prompt < self.plan.timed or prompt >= len(self.plan.prompts)
        return [OFF_ARM, *(arm for arm in self.plan.arms if everything or not self._by_ranks(arm))]

    async def _warm(self, temperature: float) -> None:
        step = self._begin(f"temperature {temperature:g}: warm-up", 1 + len(self.plan.arms))
        for arm in (OFF_ARM, *self.plan.arms):
            await self._answer(0, temperature, arm, WARM_TOKENS)
            step()

    async def _run(self, temperature: float) -> dict[Arm, dict[int, RunAnswer]]:
        """Every prompt by its arms, in a seeded random order: no arm is always run after the same other arm."""
        order = {prompt: self._arms_of(prompt) for prompt in range(len(self.plan.every))}
        step = self._begin(f"temperature {temperature:g}: answers", sum(map(len, order.values())))
        answers: dict[Arm, dict[int, RunAnswer]] = {arm: {} for arm in (OFF_ARM, *self.plan.arms)}
        for prompt, arms in order.items():
            random.Random(f"{self.plan.seed}/{temperature}/{prompt}").shuffle(arms)
            for arm in arms:
                answers[arm][prompt] = await self._answer(prompt, temperature, arm, self.plan.tokens)
                step()
        return answers

    def _ranks(self, temperature: float, off: Mapping[int, RunAnswer]) -> dict[str, list[list[int]]]:
        step: Step = self._begin(f"temperature {temperature:g}: ranks", len(self._rankers) * len(self.plan.prompts))
        found: dict[str, list[list[int]]] = {name: [] for name in self._rankers}
        for name, ranker in self._rankers.items():
            for number, prompt in enumerate(self.plan.prompts):
                found[name].append(ranker.ranks(prompt, off[number].tokens, self._sampling(temperature, number)))
                step()
        return found

    def _sampling(self, temperature: float, prompt: int) -> Sampling:
        """A prompt has one seed, as its tokens must be the same with every arm."""
        return Sampling(temperature=temperature, seed=(self.plan.seed * 1_000_003 + prompt) % (1 << 32))

    async def _answer(self, prompt: int, temperature: float, arm: Arm, tokens: int) -> RunAnswer:
        plan = self.plan
        sampling = self._sampling(temperature, prompt)
        return await self._strangers.answer(
            plan.target, plan.every[prompt], sampling, tokens, arm.name(names_drafter=True)
        )

    def _differences(self, temperature: float, answers: Mapping[Arm, Mapping[int, RunAnswer]]) -> list[str]:
        off = answers[OFF_ARM]
        return [
            f"{arm}, temperature {temperature:g}, prompt {prompt + 1}: other tokens than `off`"
            for arm, found in answers.items()
            for prompt, answer in found.items()
            if answer.tokens != off[prompt].tokens
        ]


def widest(arms: Sequence[Arm]) -> int:
    """The most children of a row of the arms whose rounds ranks determine, at least 1."""
    return max((arm.shape.width for arm in arms if ranks_determine(arm)), default=1)
