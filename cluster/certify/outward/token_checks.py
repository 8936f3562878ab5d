"""The checks of greedy answers and of log-probabilities, token by token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from cluster.certify.outward.reference import Reference
from cluster.certify.outward.served import OpenAIServer, ServedAnswer, ServedPrompt
from cluster.certify.promises import Promise
from cluster.measure.measurement import Begin, Step
from cluster.router.tokenizer import INCOMPLETE

NOT_NAMED = "answers do not say which tokens they are made of (no logprobs)"


WIDER = "the tolerance is that of --dtype; where the server's arithmetic is another, give --tolerance"


@dataclass(slots=True)
class GreedyCount:
    """Findings in greedy answers."""

    positions: int = 0  # tokens, and ends of answers, that were compared
    ties: int = 0  # positions where the reference's two best are within the tolerance
    gaps: list[float] = field(
        default_factory=list
    )  # how far the other tokens that were served there are from the best, in float32
    by_text: int = 0  # answers that were compared by their text


async def greedy_answers(
    server: OpenAIServer,
    reference: Reference,
    prompts: Sequence[ServedPrompt],
    tokens: int,
    tolerance: float,
    begin: Begin,
) -> Promise:
    """(a) Each token of a greedy answer is the reference's best one after the tokens before it.

    Another token is excused, and counted, where its log-probability is within the tolerance of the best one's, in
    float32 or in the served dtype. Where an answer does not name its tokens, its text is compared with that of the
    reference's greedy answer up to the first difference.
    """
    promise = Promise("(a) greedy answers have the reference's tokens")
    found, step = GreedyCount(), begin("(a) greedy answers", len(prompts))
    asked = await asyncio.gather(*(_stepped(server, prompt, tokens, step) for prompt in prompts))
    for prompt, answer in zip(prompts, asked, strict=True):
        promise.answers += 1
        ids = reference.ids_of(answer)
        if ids is None:
            found.by_text += 1
            await asyncio.to_thread(_compare_texts, promise, found, reference, prompt, answer, tokens, tolerance)
        else:
            await asyncio.to_thread(_compare_tokens, promise, found, reference, prompt, answer, ids, tolerance)
            text = reference.text_after(prompt.ids, ids)
            same = answer.text.rstrip(INCOMPLETE) == text.rstrip(INCOMPLETE)
            if not same:
                promise.check(False, f"the text is not that of its tokens: {_apart(answer.text, text)}")
    promise.tokens_compared = found.positions
    dtype = str(reference.dtype).removeprefix("torch.")
    asked_for = f"temperature 0, {len(prompts)} prompts, {tokens} tokens each"
    wrong = len(promise.broken)
    promise.check(not wrong, f"{asked_for}: {wrong} faults in {found.positions:,} positions")
    if wrong:
        promise.found.append(WIDER)
    promise.found.append(
        f"near ties, whose two best are within {tolerance:g} in float32 or {dtype}: {found.ties:,}; "
        f"served another one there: {promise.excused:,}"
        + (f", largest gap in float32 {max(found.gaps):.2g}" if found.gaps else "")
    )
    if found.by_text:
        words = f"{found.by_text} of {len(prompts)} compared by their texts, up to the first difference"
        promise.found.append(words if server.offer.names_tokens else f"{words}: {NOT_NAMED}")
    return promise


async def _stepped(server: OpenAIServer, prompt: ServedPrompt, tokens: int, step: Step) -> ServedAnswer:
    (answer, *_) = await server.answers(prompt, max_tokens=tokens, temperature=0)
    step()
    return answer


def _compare_tokens(
    promise: Promise,
    found: GreedyCount,
    reference: Reference,
    prompt: ServedPrompt,
    answer: ServedAnswer,
    ids: Sequence[int],
    tolerance: float,
) -> None:
    whole, start = [*prompt.ids, *ids], len(prompt.ids)
    best = reference.logprobs(whole, start)
    rounded = reference.logprobs(whole, start, reference.dtype)
    ended = answer.finish == "stop"
    for place in range(len(ids) + ended):
        served = [ids[place]] if place < len(ids) else sorted(reference.end_ids)
        gap = _gap(best[place], served)
        near = min(gap, _gap(rounded[place], served))
        two = [scores[place].topk(2).values for scores in (best, rounded)]
        found.positions += 1
        found.ties += min(float(each[0] - each[1]) for each in two) < tolerance
        if gap <= 0:
            continue
        if near < tolerance:
            promise.excused += 1
            found.gaps.append(gap)
            continue
        token = reference.token_text(ids[place]) if place < len(ids) else "the end of the text"
        better = reference.token_text(int(best[place].argmax()))
        promise.check(False, f"token {place} is {token!r}; {better!r} is better by {gap:.2g} in log-probability")


def _gap(logprobs: torch.Tensor, tokens: Sequence[int]) -> float:
    """The difference between the best log-probability [V] and that of the best of these tokens."""
    return float(logprobs.max() - logprobs[list(tokens)].max()) if tokens else math.inf


def _compare_texts(
    promise: Promise,
    found: GreedyCount,
    reference: Reference,
    prompt: ServedPrompt,
    answer: ServedAnswer,
    tokens: int,
    tolerance: float,
) -> None:
    best = reference.greedy(prompt.ids, tokens)
    text, ended = answer.text.rstrip(INCOMPLETE), answer.finish == "stop"
    if text == reference.text_after(prompt.ids, best).rstrip(INCOMPLETE) and ended == (len(best) < tokens):
        found.positions += len(best) + ended
        return
    place = len(best)
    while not text.startswith(reference.text_after(prompt.ids, best[:place]).rstrip(INCOMPLETE)):
        place -= 1
    found.positions += place
    known = reference.text_after(prompt.ids, best[:place])
    gap = math.inf
    for dtype in {torch.float32, reference.dtype}:
        logprobs = reference.logprobs([*prompt.ids, *best[:place]], len(prompt.ids) + place, dtype)[0]
        other = reference.likeliest_going_on(logprobs, prompt.ids, best[:place], text[len(known) :], ended)
        if other is not None:
            gap = min(gap, float(logprobs.max()) - other)
    if gap < tolerance:
        promise.excused += 1
        found.ties += 1
        found.gaps.append(gap)
        return
    how = "no likely token goes on like that" if math.isinf(gap) else f"the reference's token is better by {gap:.2g}"
    differs = _apart(text, reference.text_after(prompt.ids, best))
    promise.check(False, f"the text differs at token {place}: {differs}; {how}")


def _apart(served: str, expected: str) -> str:
    """Two texts from shortly before their first difference on."""
    pairs = enumerate(zip(served, expected, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(served), len(expected)))
    shown = slice(max(place - 12, 0), place + 12)
    return f"{served[shown]!r} in place of {expected[shown]!r}"


async def log_probabilities(
    server: OpenAIServer,
    reference: Reference,
    prompts: Sequence[ServedPrompt],
    tokens: int,
    tolerance: float,
    begin: Begin,
) -> Promise:
    """(d) Log-probabilities, of the drawn tokens and of the likeliest ones, are the reference's within a tolerance."""
    promise = Promise("(d) log-probabilities are the reference's")
    if not server.offer.tops:
        promise.offered, promise.why = False, server.offer.refusals.get("logprobs", "logprobs are not given")
        return promise
    sampled = {"temperature": 1.0, "top_p": 1.0, "max_tokens": tokens}
    step = begin("(d) log-probabilities", len(prompts))
    differences: list[float] = []
    own: list[float] = []
    for prompt in prompts:
        for answer in await server.answers(prompt, **sampled):
            step()
            promise.answers += 1
            ids = reference.ids_of(answer)
            if ids:
                for here, its in await asyncio.to_thread(_apart_from, reference, prompt, answer, ids):
                    differences.append(here)
                    own.append(its)
    promise.tokens_compared = len(differences)
    asked = (
        f"temperature 1, {len(prompts)} prompts, {tokens} tokens each, the drawn token and the {server.offer.tops} best"
    )
    if not differences:
        promise.why = f"{asked}: no token of them is the only one of its text"
        return promise
    beyond = sum(not each <= tolerance for each in differences)
    promise.check(
        not beyond,
        f"{asked}: {beyond:,} of {len(differences):,} differ from float32 by more than {tolerance:g}; median "
        f"{median(differences):.2g}, largest {max(differences):.2g}",
    )
    if beyond:
        promise.found.append(WIDER)
    if reference.dtype is not torch.float32:
        dtype = str(reference.dtype).removeprefix("torch.")
        words = (
            f"the reference itself in {dtype} differs from float32: median {median(own):.2g}, largest {max(own):.2g}"
        )
        promise.found.append(words)
    return promise


def _apart_from(
    reference: Reference, prompt: ServedPrompt, answer: ServedAnswer, ids: Sequence[int]
) -> Iterator[tuple[float, float]]:
    """How far each log-probability of an answer is from the reference's in float32, and how far the reference's in the
    served dtype is from that."""
    whole, start = [*prompt.ids, *ids], len(prompt.ids)
    exact, rounded = reference.logprobs(whole, start), reference.logprobs(whole, start, reference.dtype)
    found: list[tuple[float, float]] = []
    for place, token in enumerate(ids[: len(answer.logprobs)]):
        named = {token: answer.logprobs[place]}
        for text, value in (answer.tops[place] if place < len(answer.tops) else {}).items():
            if (other := reference.id_of(text)) is not None:
                named[other] = value
        for other, value in named.items():
            right = float(exact[place, other])
            apart = abs(value - right)
            found.append((apart if math.isfinite(apart) else math.inf, abs(float(rounded[place, other]) - right)))
    return iter(found)
