"""The checks, one for each promise."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.client import Asking
from dendro.engine import started
from dendro.shapes import OFF, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape
from dendro.speculation import Speculation
from dendro.text import Limits, Sampling, Text
from dendro.tree import DraftTree
from tree_kernels.noise import gumbel_noise
from tree_kernels.warp import Warp, tokens_of
from tree_layers.library_mixers import group_norms

from cluster.certify.asking import SamplingLaw, answers
from cluster.certify.guesses import GuessCount
from cluster.certify.law import LARGEST_DRAWS, LawFit, draws_to_notice, expected_law, fit, fit_counts
from cluster.certify.own_drafter import own_drafter
from cluster.certify.promises import Promise, check_of, first_difference
from cluster.certify.twin import (
    KeyedByRow,
    LogitsOf,
    OneTooMany,
    TwinVerifier,
    answer_of,
    float32_noise_is_infinite,
    top_k_as_if_sampled,
)
from cluster.checkpoints import check_library_has
from cluster.measure.measurement import Step
from cluster.policies import POLICIES
from drafter_service.engine import DrafterEngine
from verifier_service.engine import VerifierEngine
from verifier_service.models.reading import load_library_model

Prompt = tuple[int, ...]
ScoresOf = Callable[[torch.Tensor], torch.Tensor]
LAWS = tuple(
    SamplingLaw(temperature, top_k, top_p)
    for temperature in (0.7, 1.0)
    for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.9))
)
FP32_MARGIN = 1e-4
MARGINS = {"float32": FP32_MARGIN, "float16": 0.25 / 8, "bfloat16": 0.25}
"""Margin of the two best logits, by dtype, below which a difference is excused. float16 has three mantissa bits more
than bfloat16, so its rounding errors are an eighth."""
MOST_EXCUSED = 2
SHAPES_OF_ITS_OWN = (
    LevelShape((1, 1, 1, 1)),
    LevelShape((3, 2, 1)),
    LevelShape((2, 2, 1, 1)),
    NodeShape((2, 1, 1)),
    BeamShape(3, 2),
    DynamicShape(2, 3, 5),
)
TEMPERATURES_OF_ITS_OWN = (0.0, 0.7, 1.0)
TEMPERATURES_OF_FAULTS = (1.0, 2.0, 4.0, 8.0, 0.5)
"""Temperatures at which planted faults are tried, in this order; the higher, the flatter the target's law."""
MOST_PLANTED_DRAWS = 1_000_000
"""Limit of the draws of a planted rule, which are drawn from its computed law, not by a model."""


class LibraryModel:
    """The target as transformers runs it."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        check_library_has(checkpoint)
        self.model = load_library_model(checkpoint, dtype=dtype).eval()
        group_norms(self.model)

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """`generate`'s answer without sampling; the end-of-text token does not end it."""
        ids = torch.tensor([list(prompt)])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        answer: list[int] = made[0, ids.shape[1] :].tolist()
        return answer

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] float32 after the last of `ids`."""
        found = self.model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=1)
        logits: torch.Tensor = found.logits[0, -1].float()
        return logits

    def margin(self, ids: Sequence[int], scores_of: ScoresOf = torch.Tensor.float) -> float:
        """The difference of the two best scores after `ids`. scores_of: turns logits into scores; default: no change"""
        best = scores_of(self.logits(ids)).topk(2).values
        return float(best[0] - best[1])


@check_of("(a) greedy equals transformers' generate, float32")
async def greedy_against_transformers(
    promise: Promise,
    service: Asking,
    checkpoint: Path,
    prompts: Sequence[Prompt],
    tokens: int,
    speculation: Sequence[str],
    step: Step,
) -> None:
    """(a) Greedy answers in float32 equal `generate`'s; excused: differences where its margin is below 1e-4."""
    library = LibraryModel(checkpoint, torch.float32)
    theirs = [library.greedy(prompt, tokens) for prompt in prompts]
    for shape in speculation:
        ours = await answers(service, prompts, [0] * len(prompts), SamplingLaw(), shape, tokens, step)
        same, excused = 0, 0
        for prompt, mine, other in zip(prompts, (each.token_ids for each in ours), theirs, strict=True):
            promise.answers += 1
            place = first_difference(mine, other)
            promise.tokens_compared += len(other) if place is None else place
            if place is None:
                same += 1
                continue
            margin = library.margin([*prompt, *other[:place]])
            if margin < FP32_MARGIN:
                excused += 1
                promise.found.append(f"{shape}: excused at token {place}: the two best logits are {margin:.1e} apart")
            else:
                promise.check(False, f"{shape}: differs at token {place}, margin {margin:.1e}")
        promise.excused += excused
        promise.check(
            same + excused == len(prompts) and excused <= MOST_EXCUSED,
            f"{shape}: {same} of {len(prompts)} answers of {tokens} tokens identical, {excused} excused",
        )


@check_of("(b) sampled answers do not depend on speculation or load")
async def identity_under_sampling(
    promise: Promise,
    service: Asking,
    prompts: Sequence[Prompt],
    tokens: int,
    shapes: Sequence[str],
    margin_of: Callable[[Sequence[int]], float] | None,
    excused_below: float,
    step: Step,
) -> None:
    """Check (b): every shape, every policy, and 8 requests at once give the tokens of `off`, for the same seeds.

    `margin_of` is None for a bitwise verifier, where nothing is excused. Else a first difference is excused where the
    margin of the two best logits is below `excused_below` / temperature. Not checked where a shape has no guess.
    """
    counted = GuessCount(promise, shapes)
    seeds = [1000 + number for number in range(len(prompts))]
    for law in LAWS:
        plain = await answers(service, prompts, seeds, law, "off", tokens, step)
        ways = [*((Speculation.parse(shape), 1) for shape in shapes), *ways_to_choose()]
        same_ways = 0
        for way, at_once in ways:
            again = await answers(service, prompts, seeds, law, way, tokens, step, at_once)
            same = True
            for prompt, mine, its in zip(prompts, again, plain, strict=True):
                other = its.token_ids
                promise.answers += 1
                counted.add(way.shape, mine.complete.speculation)
                place = first_difference(mine.token_ids, other)
                promise.tokens_compared += len(other) if place is None else place
                if place is None:
                    continue
                close = margin_of is not None and margin_of([*prompt, *other[:place]]) < excused_below / law.temperature
                if close:
                    promise.excused += 1
                else:
                    same = False
                    promise.check(False, f"{law}: {_way_name(way)}, {at_once} at once, differs at token {place}")
            same_ways += same
        promise.check(same_ways == len(ways), f"{law}: {same_ways} of {len(ways)} ways identical to off")
    counted.judge(each_arm=True)


def ways_to_choose() -> list[tuple[Speculation, int]]:
    """Speculation `auto` and the number of requests at once: each policy with 1, the server's own policy with 8."""
    return [*((Speculation(policy=policy), 1) for policy in POLICIES), (Speculation(), 8)]


def _way_name(way: Speculation) -> str:
    return way.shape or " by ".join(filter(None, (str(way.mode), way.policy)))


@check_of("(c) the law: first tokens over many seeds")
async def law_of_the_sampler(
    promise: Promise,
    service: Asking,
    logits_of: LogitsOf,
    prompt: Prompt,
    draws: int,
    far_draws: int,
    step: Step,
) -> None:
    """(c) First tokens over many seeds follow the target's law, drawn in this process and by the served system."""
    logits = logits_of(prompt, _root(prompt))[:1]
    for law in (SamplingLaw(1.0), SamplingLaw(0.7, 50), SamplingLaw(1.0, 0, 0.9)):
        expected = expected_law(logits[0], law.temperature, law.top_k, law.top_p)
        warp = Warp(law.temperature, law.top_k, law.top_p)
        near = [
            int(tokens_of(logits, warp, gumbel_noise(seed, [len(prompt)], logits.shape[-1]))[0])
            for seed in range(draws)
        ]
        found = fit(near, expected)
        promise.answers += draws
        promise.check(found.good, f"{law}, in process: {_described(found, expected)}")
    law = SamplingLaw(1.0)
    expected = expected_law(logits[0], law.temperature)
    far = await answers(service, [prompt] * far_draws, range(far_draws), law, "off", 1, step, at_once=8)
    found = fit([each.token_ids[0] for each in far], expected)
    promise.answers += far_draws
    promise.tokens_compared = 3 * draws + far_draws
    promise.check(found.good, f"{law}, served: {_described(found, expected)}")


@check_of("(d) the checks notice planted faults")
async def planted_faults_are_noticed(
    promise: Promise, logits_of: LogitsOf, prompt: Prompt, tokens: int, step: Step
) -> None:
    """(d) Each planted fault makes the checks fail, and the twin without a fault passes them.

    A fault that changes no token at one temperature, such as where the target is almost certain, is tried at the next.
    One that changes none at any temperature is reported as not shown, and neither keeps nor breaks the promise.
    """
    planted: tuple[tuple[type[TwinVerifier], int], ...] = ((TwinVerifier, 8), (KeyedByRow, 7), (OneTooMany, 8))
    for rule, drafter_seed in planted:
        for temperature in TEMPERATURES_OF_FAULTS:
            sampling = Sampling(temperature=temperature, seed=7)
            plain = await answer_of(prompt, tokens, OFF, TwinVerifier(logits_of, sampling), sampling.seed)
            verifier = rule(logits_of, sampling)
            emitted = await answer_of(prompt, tokens, LevelShape((2, 2, 1)), verifier, drafter_seed)
            promise.tokens_compared += len(plain)
            if rule is TwinVerifier or verifier.changed:
                break
        place = first_difference(emitted, plain)
        word = "identical" if place is None else f"differs at token {place}"
        line = f"{rule.__name__}, temperature {temperature:g}: {word}"
        if rule is TwinVerifier:
            promise.check(place is None, line)
        elif verifier.changed:
            promise.check(place is not None, line)
        else:
            promise.found.append(f"{rule.__name__}: not shown: it changes none of {tokens} tokens up to {line}")
        step()
    lossy_rule_is_noticed(promise, logits_of(prompt, _root(prompt))[0])
    promise.check(float32_noise_is_infinite(), "float32 noise of the word 2**32-1 is infinite; the contract's is not")
    step()


def lossy_rule_is_noticed(promise: Promise, logits: torch.Tensor, most_draws: int = MOST_PLANTED_DRAWS) -> None:
    """Part of (d): draws by a lossy rule fail the comparison of (c), at the temperature that needs the fewest draws.

    If these are more than `most_draws`, their number is reported, and the promise is neither kept nor broken by it.
    """
    laws = [expected_law(logits, temperature) for temperature in TEMPERATURES_OF_FAULTS]
    faults = [top_k_as_if_sampled(law, 3) for law in laws]
    needed = [draws_to_notice(fault, law) for fault, law in zip(faults, laws, strict=True)]
    best = needed.index(min(needed))
    draws, temperature = needed[best], TEMPERATURES_OF_FAULTS[best]
    what = f"top-3 drafts judged as if sampled, temperature {temperature:g}"
    if draws > most_draws:
        promise.found.append(f"{what}: not shown: would need {_number(draws)} draws")
        return
    found = fit_counts(np.random.default_rng(1).multinomial(draws, faults[best]), laws[best])
    promise.check(not found.good, f"{what}: p = {found.p:.3g} over {draws:,} draws, the number that shows it")


def _described(found: LawFit, law: npt.NDArray[np.float64]) -> str:
    """A line of the report: a comparison and its power."""
    needed = draws_to_notice(top_k_as_if_sampled(law, 3), law)
    power = f"would show a lossy rule: {'yes' if found.draws >= needed else f'no, that takes {_number(needed)}'}"
    return f"{found.draws:,} seeds, {found.cells} cells, p = {found.p:.3g}; {power}"


def _number(draws: int) -> str:
    return f"{draws:,}" if draws < LARGEST_DRAWS else f"more than {LARGEST_DRAWS:,}"


@check_of("(e) every guess of the target as its own drafter is accepted")
async def the_target_drafts_for_itself(
    promise: Promise, verifier: VerifierEngine, prompts: Sequence[Prompt], tokens: int, step: Step
) -> None:
    """(e) A drafter that runs the target has every guess accepted, at every temperature, in chains and trees."""
    drafter = own_drafter(verifier, await verifier.hello())
    async with started(drafter):
        for temperature in TEMPERATURES_OF_ITS_OWN:
            for shape in SHAPES_OF_ITS_OWN:
                ends: list[bool] = []
                for seed, prompt in enumerate(prompts):
                    limits = Limits(len(prompt) + tokens, ignore_end=True)
                    text = Text(prompt, Sampling(temperature, seed=seed), limits)
                    ends += await _wholly_accepted(verifier, drafter, text, shape)
                    promise.answers += 1
                    promise.tokens_compared += tokens
                    step()
                found = f"{sum(ends)} of {len(ends)} rounds wholly accepted"
                promise.check(all(ends), f"temperature {temperature:g}, {shape}: {found}")


async def _wholly_accepted(
    verifier: VerifierEngine, drafter: DrafterEngine, text: Text, shape: TreeShape
) -> list[bool]:
    """Finish a text. For each round: whether all first-ranked guesses of its tree were accepted, before any cut.

    Their number is read from the tree, as a dynamic shape's depth depends on the drafter's probabilities.
    """
    call = OpenCall(TextUpdate.of(new_opening(), text, 0), RequestParameters(text.sampling, text.limits, "", ()))
    await asyncio.gather(verifier.open(call), drafter.open(call))
    opening, held, ends = call.update.opening, len(text), []
    while text.finish is None:
        tree = await drafter.draft(DraftCall(TextUpdate.of(opening, text, held), shape))
        verdict = await verifier.verify(VerifyCall(TextUpdate.of(opening, text, held), tree))
        held = len(text)
        text.commit(verdict)
        last = 0
        while children := tree.children(last):
            last = children[0]
        ends.append(not any(verdict.ranks) and verdict.length == tree.depths[last] + 1)
    close = CloseCall(TextUpdate.of(opening, text, held))
    await asyncio.gather(verifier.close(close), drafter.close(close))
    return ends


def margin_in(checkpoint: Path, dtype: torch.dtype) -> Callable[..., float]:
    """Computes `LibraryModel.margin` in a dtype; the model is loaded at the first call."""
    loaded: list[LibraryModel] = []

    def margin(*given: Any) -> float:
        if not loaded:
            loaded.append(LibraryModel(checkpoint, dtype))
        found = loaded[0].margin(*given)
        return found if math.isfinite(found) else math.inf

    return margin


def _root(prompt: Prompt) -> DraftTree:
    return DraftTree.root_only(prompt[-1])
