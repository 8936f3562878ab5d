"""Random combinations of request parameters, and the promise that speculation changes no token under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
from dendro.answer import Completion
from dendro.client import Asking
from dendro.errors import BadRequest, EngineFailed
from dendro.grammars import INSTALL
from dendro.options import MAX_TOP_LOGPROBS, Options
from dendro.speculation import Speculation
from dendro.structure import Structure
from torch import Tensor
from tree_kernels.warp import Processors, processed

from cluster.certify.guesses import GuessCount
from cluster.certify.promises import Promise, check_of, first_difference
from cluster.measure.measurement import Step

FIRST_IDS = 8
"""Number of first ids that are never removed, so that every combination leaves tokens to draw."""
CHANCE = 0.4
"""Chance of each parameter to be set."""
SAMPLES = 3
"""Number of answers to one prompt that are compared with requests of their own."""
MOST_LISTED = 200
"""Most ids of one parameter."""

STRUCTURES = (
    Structure.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 4},
                "kind": {"enum": ["small", "large", None]},
            },
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
    ),
    Structure.regex("([a-z]{2,9}, )*[A-Z][a-z]{0,9}\\."),
    Structure.grammar('start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'),
    Structure.choices(["self", "self.name", "return", "return self.name + 1"]),
)

MarginOf = Callable[[Sequence[int], Callable[[Tensor], Tensor]], float]
"""The margin of the two best scores after a text: of what the function makes of its logits."""


def random_options(rng: np.random.Generator, tokens: int, vocabulary: int, structured: bool = False) -> Options:
    """Random parameters of a request for so many tokens; each is set with probability CHANCE.

    structured: one of them is a structure, which takes the place of removed tokens
    """

    def ids(most: int) -> list[int]:
        count = int(rng.integers(1, min(most, MOST_LISTED, 1 + vocabulary - FIRST_IDS)))
        chosen: list[int] = rng.choice(np.arange(FIRST_IDS, vocabulary), count, replace=False).tolist()
        return chosen

    def word() -> list[int]:
        return [*ids(3), *ids(2)][-int(rng.integers(1, 4)) :]

    made: Options = {
        "temperature": float(rng.choice([0.5, 1.0, 1.6])),
        "top_k": int(rng.integers(1, vocabulary)),
        "top_p": float(rng.uniform(0.3, 1)),
        "min_p": float(rng.uniform(0, 0.2)),
        "repetition_penalty": float(rng.choice([0.7, 1.1, 1.8])),
        "presence_penalty": float(rng.normal(scale=2)),
        "frequency_penalty": float(rng.normal(scale=2)),
        "logit_bias": {token: float(rng.normal(scale=3)) for token in ids(40)},
        "banned_ids": ids(vocabulary // 3),
        "allowed_ids": [*range(FIRST_IDS), *ids(vocabulary // 2)],
        "bad_words": [word() for _ in range(int(rng.integers(1, 60)))],
        "min_new_tokens": int(rng.integers(1, tokens)),
        "stop_ids": ids(vocabulary // 6),
        "sample_index": int(rng.integers(0, 1 << 32)),
        "logprobs": int(rng.integers(0, 1 + MAX_TOP_LOGPROBS)),
        "echo": True,
    }
    chosen = cast(Options, {name: value for name, value in made.items() if rng.random() < CHANCE})
    if structured and rng.random() < CHANCE:
        chosen["structure"] = STRUCTURES[int(rng.integers(len(STRUCTURES)))]
        removed = ("banned_ids", "allowed_ids", "bad_words", *(("min_new_tokens",) if "stop_ids" in chosen else ()))
        for name in removed:
            chosen.pop(name, None)  # type: ignore[misc]
    return chosen


def processors_of(options: Options, prompt: int) -> Processors:
    """What these options, of ids alone, do to logits before the temperature, where end-of-text tokens do not end an
    answer.

    prompt: tokens of the text before the answer
    """
    least = options.get("min_new_tokens") or 0
    return Processors(
        repetition_penalty=options.get("repetition_penalty") or 1.0,
        presence_penalty=options.get("presence_penalty") or 0.0,
        frequency_penalty=options.get("frequency_penalty") or 0.0,
        logit_bias=tuple(cast(Mapping[int, float], options.get("logit_bias", {})).items()),
        banned=tuple(options.get("banned_ids", ())),
        allowed=tuple(options.get("allowed_ids", ())),
        bad_words=tuple(tuple(cast(Sequence[int], word)) for word in options.get("bad_words", ())),
        ending=tuple(options.get("stop_ids", ())),
        min_length=prompt + least if least else 0,
    )


@check_of("(f) parameters: answers do not depend on speculation")
async def identity_under_parameters(
    promise: Promise,
    service: Asking,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    combinations: int,
    shapes: Sequence[str],
    vocabulary: int,
    margin_of: MarginOf | None,
    excused_below: float,
    step: Step,
) -> None:
    """(f) Under random combinations of parameters, `auto` and the shapes in turn give the tokens of speculation off;
    at a bitwise verifier, its log-probabilities too.

    margin_of, excused_below: as in (b); the margin is that of the scores after penalties, biases and removals
    """
    counted, same, compared, structured = GuessCount(promise, shapes), 0, 0, 0
    # A margin would be that of the scores before a structure removes tokens.
    refused = await _refusal_of_structures(service, prompts[0]) if margin_of is None else ""
    for number in range(combinations):
        options = random_options(np.random.default_rng(number), tokens, vocabulary, margin_of is None and not refused)
        structured += "structure" in options
        prompt = prompts[number % len(prompts)]
        plain = await _answer(service, prompt, options, "off", tokens, number)
        for way in ("auto", *shapes[number % len(shapes) :][:1]) if shapes else ("auto",):
            again = await _answer(service, prompt, options, way, tokens, number)
            place = first_difference(again.token_ids, plain.token_ids)
            promise.answers += 1
            counted.add(way, again.complete.speculation)
            promise.tokens_compared += len(plain.token_ids) if place is None else place
            compared += 1
            reported = again.logprobs == plain.logprobs and again.prompt == plain.prompt
            if place is None and (reported or margin_of is not None):
                same += 1
            elif place is None:
                promise.check(False, f"{way} has other log-probabilities, under {options}")
            elif margin_of is not None and margin_of(
                [*prompt, *plain.token_ids[:place]], _scores_of(options, prompt, plain.token_ids[:place])
            ) < excused_below / (options.get("temperature") or 1.0):
                promise.excused += 1
                same += 1
            else:
                promise.check(False, f"{way} differs at token {place}, under {options}")
        step()
    if margin_of is None:  # elsewhere a first difference would have to be excused
        await _samples_are_requests(service, promise, prompts[0], tokens)
    promise.check(
        same == compared,
        f"{combinations} random combinations, {structured} with a structure: {same} of {compared} answers identical to "
        "off or excused",
    )
    if refused:
        promise.check(True, f"no structure was tried: {refused}")
    counted.judge(each_arm=False)


async def _refusal_of_structures(service: Asking, prompt: Sequence[int]) -> str:
    """The error of a cluster without the package that structures need; empty where it has that. Raises BadRequest for
    any other refusal."""
    try:
        await _answer(service, prompt, {"structure": STRUCTURES[0]}, "off", 1, 0)
    except BadRequest as refused:
        if INSTALL not in refused.reason:
            raise
        return str(refused)
    return ""


async def _samples_are_requests(service: Asking, promise: Promise, prompt: Sequence[int], tokens: int) -> None:
    """Add whether each of several answers to a prompt is that of a request with its sample index."""
    fixed: Options = {"temperature": 1.0, "logprobs": 2, "max_new_tokens": tokens, "ignore_end": True, "seed": 1}
    several: Options = {**fixed, "n": SAMPLES, "speculation": Speculation.parse("auto")}
    samples = await service.generate_samples(prompt, **several)
    alone = []
    for index in range(SAMPLES):
        one: Options = {**fixed, "sample_index": index, "speculation": Speculation.parse("off")}
        alone.append(await service.generate_text(prompt, **one))
    promise.answers += SAMPLES
    promise.tokens_compared += sum(len(each.token_ids) for each in alone)
    pairs = zip(samples, alone, strict=True)
    equal = sum((ours.token_ids, ours.logprobs) == (other.token_ids, other.logprobs) for ours, other in pairs)
    promise.check(equal == SAMPLES, f"{equal} of {SAMPLES} samples of a prompt identical to requests of their own")


def _scores_of(options: Options, prompt: Sequence[int], answer: Sequence[int]) -> Callable[[Tensor], Tensor]:
    its = processors_of(options, len(prompt))
    return lambda logits: processed(logits, its, [*prompt, *answer], len(prompt))


async def _answer(
    service: Asking, prompt: Sequence[int], options: Options, way: str, tokens: int, seed: int
) -> Completion:
    """An answer. Raises EngineFailed if its statistics contradict each other."""
    fixed: Options = {
        "max_new_tokens": tokens,
        "ignore_end": True,
        "seed": seed,
        "speculation": Speculation.parse(way),
    }
    given: Options = {**options, **fixed}
    done = await service.generate_text(prompt, **given)
    if wrong := done.complete.speculation.contradictions:
        raise EngineFailed(f"{way}: an answer's statistics contradict each other: {'; '.join(wrong)}")
    return done
