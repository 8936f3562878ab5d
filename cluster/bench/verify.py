"""`dendro bench verify`: answers of each verification mode and tree, round by round, with drafter and verifier."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.errors import BadRequest
from dendro.modes import VerificationMode
from dendro.shapes import LevelShape
from dendro.text import Sampling

from cluster.demo.kinds import KINDS, kind_prompts
from cluster.demo.prompts import load_tokenizer
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, models, option, seed
from cluster.measure.in_process import DRAFTER_DTYPE, EngineText, drafter_of, verifier_of
from cluster.measure.measurement import Begin, Step
from cluster.measure.options import KIND_PROMPTS
from cluster.measure.report import Row
from cluster.measure.statistics import Key, paired_ratio
from cluster.measure.targets import DEMO, target_config
from cluster.measure.turns import estimate
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

SHAPES: Mapping[int, LevelShape] = {1: LevelShape((1, 1, 1)), 2: LevelShape((2, 2, 2)), 4: LevelShape((4, 4, 2))}
"""Children of a row -> a tree of three levels. With four children the last level has two, for 63 guesses at most."""

DRAFTER = "mamba2"
ROOM = 80
"""Room past an answer, in tokens."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    prompts: int = option(KIND_PROMPTS, 5, 1, least=1)
    tokens: int = option("New tokens of every answer.", ANSWER_TOKENS, 24, least=1)
    repetitions: int = option("Answers to each prompt, with seeds of their own.", 2, 1, least=1)
    temperatures: tuple[float, ...] = option("Sampling temperatures, separated by commas.", (0.6, 1.0), (1.0,))
    seed: int = seed()
    models: Path = models()

    def __post_init__(self) -> None:
        if 0 in self.temperatures:
            raise BadRequest("temperatures", "must be above 0: at 0 every mode is greedy")


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
                "rounds": sum(answer.rounds for answer in answers.values()),
                "emitted_per_round": estimate(list(emitted.values())),
                "tokens_per_s": estimate(list(speed.values())),
                "emitted_over_coupled": paired_ratio(emitted, _per_round(coupled)).as_json(),
                "speed_over_coupled": paired_ratio(speed, _per_second(coupled)).as_json(),
            }
        )
    return rows


def claim_rows(found: Mapping[VerifiedArm, Mapping[Key, VerifiedAnswer]], temperature: float) -> list[Row]:
    """What the literature says of emitted tokens per round: ratios of at least 1, paired by prompt."""
    coupled, several, block = VerificationMode.COUPLED, VerificationMode.MULTI_STEP, VerificationMode.BLOCK
    claims = (
        (block, several, 1, "block verification"),
        (several, coupled, 1, "drafter invariance"),
        (coupled, VerificationMode.NAIVE, 4, "shared noise"),
        (coupled, several, 4, "shared noise"),
    )
    return [
        {
            "claim": f"{over} over {under}, {children} children, temperature {temperature:g} ({source})",
            "ratio": paired_ratio(
                _per_round(found[VerifiedArm(over, children)]), _per_round(found[VerifiedArm(under, children)])
            ).as_json(),
        }
        for over, under, children, source in claims
    ]


def _per_round(answers: Mapping[Key, VerifiedAnswer]) -> dict[Key, float]:
    return {key: answer.tokens / answer.rounds for key, answer in answers.items()}


def _per_second(answers: Mapping[Key, VerifiedAnswer]) -> dict[Key, float]:
    return {key: answer.tokens / answer.seconds for key, answer in answers.items()}


async def measure(options: VerifyOptions, begin: Begin) -> dict[str, Any]:
    (target,) = target_config(options.models, DEMO).targets.values()
    tokenizer, rows, claims = load_tokenizer(options.models), list[Row](), list[Row]()
    prompts = [
        prompt.token_ids
        for kind in KINDS
        for prompt in kind_prompts(kind, options.prompts, PROMPT_TOKENS, tokenizer, options.models)
    ]
    async with (
        verifier_of(DEMO, target, PROMPT_TOKENS + options.tokens + ROOM) as verifier,
        drafter_of(options.models / DRAFTER) as drafter,
    ):
        for temperature in options.temperatures:
            step = begin(f"temperature {temperature:g}", len(prompts) * options.repetitions * len(ARMS))
            sizes = options.tokens, options.repetitions, options.seed
            found = await measure_arms(drafter, verifier, prompts, temperature, *sizes, step)
            rows += arm_rows(found, temperature)
            claims += claim_rows(found, temperature)
    return {"plan": {}, "rows": rows, "claims": claims}


VERIFY = Bench(
    "verify",
    "Compare verification modes on the demo pair: coupled, multi-step and naive sampling with trees of 1, 2 and 4 "
    "children, and block verification of chains. Reports tokens emitted per round and tokens a second, paired by "
    "prompt and seed. The aims are what the papers found.",
    "Under a minute: one prompt of each kind, one short answer of each.",
    VerifyOptions,
    measure,
    facts=(
        f"Held-out prompts of {PROMPT_TOKENS} tokens of each kind ({', '.join(KINDS)}); drafter {DRAFTER} in "
        f"{DRAFTER_DTYPE}",
        "Every round drafts the whole tree, and verifies it. Medians over answers; ratios are paired by prompt and "
        "seed; in parentheses the 90 % interval. Prompts are not timed",
    ),
    tables=(
        ReportTable(
            "Temperature {temperature:g}",
            "rows",
            "mode; children; tree = shape; rounds; emitted per round = emitted_per_round:.2f; over coupled = "
            "emitted_over_coupled:.2f; tokens/s = tokens_per_s:.0f; over coupled's = speed_over_coupled:.2f",
        ),
    ),
    aims=(Aim("emitted per round of {claim}: the interval reaches 1", "claims", "ratio", least=1.0, end="high"),),
    plots=(
        Plot(
            "rows",
            "children of a row = children",
            "emitted tokens per round = emitted_per_round",
            line="{mode}",
            panel="temperature {temperature:g}",
        ),
    ),
    code=("verifier_service", "drafter_service"),
)
bench_verify = VERIFY.command()
