"""The checks of seeds, stop strings and usage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from cluster.certify.outward.served import NotOffered, OpenAIServer, ServedPrompt
from cluster.certify.promises import Promise
from cluster.certify.stop_strings import drawn_stops
from cluster.measure.measurement import Begin

SEEDS = 8
"""Seeds of each prompt, and requests without one: that a right sampler gives as many equal answers at a place where the
likeliest token has a chance of 0.6 has a probability below 0.6**7, or 3 % at one place and 1e-6 at four."""
SAMPLED = {"temperature": 1.0, "top_p": 1.0}


async def seeds_are_honoured(
    server: OpenAIServer, prompts: Sequence[ServedPrompt], tokens: int, begin: Begin
) -> Promise:
    """(c) The same seed gives the same answer, alone and beside other requests; other seeds, and none, give others."""
    promise = Promise("(c) seeds")
    step = begin("(c) seeds", (4 if server.offer.seed else 1) * SEEDS * len(prompts))
    asked = f"temperature 1, {len(prompts)} prompts, {tokens} tokens"
    fields = {**SAMPLED, "max_tokens": tokens}

    async def text(prompt: ServedPrompt, seed: int | None) -> str:
        (answer, *_) = await server.answers(prompt, **fields, **({} if seed is None else {"seed": seed}))
        step()
        promise.answers += 1
        return answer.text

    unseeded = await asyncio.gather(*(text(prompt, None) for prompt in prompts for _ in range(SEEDS)))
    several = len(set(unseeded)) > len(prompts)
    line = f"{asked}, {SEEDS} requests each without a seed: {len(set(unseeded))} different answers"
    promise.check(several, line if several else f"{line}; they are not drawn anew")
    if not server.offer.seed:
        promise.found.append(f"not offered: seeds: {server.offer.refusals.get('seed', '')}")
        return promise
    pairs = [(prompt, seed) for prompt in prompts for seed in range(1, SEEDS + 1)]
    alone = [await text(*pair) for pair in pairs]
    again = [await text(*pair) for pair in pairs]
    together = await asyncio.gather(*(text(*pair) for pair in pairs))
    for other, how in ((again, "one after the other"), (together, "at once")):
        same = sum(one == two for one, two in zip(alone, other, strict=True))
        promise.check(same == len(pairs), f"{asked}, {SEEDS} seeds each, again {how}: {same} of {len(pairs)} the same")
    differ = len(set(alone))
    promise.check(differ > len(prompts), f"{asked}, {SEEDS} seeds each: {differ} different answers")
    return promise


async def stop_strings_cut(
    server: OpenAIServer, prompts: Sequence[ServedPrompt], tokens: int, draws: int, begin: Begin
) -> Promise:
    """(g) With parts of a greedy answer as its stop strings, the answer ends before the first of them."""
    promise = Promise("(g) stop strings end answers before them")
    random, step = Random(1), begin("(g) stop strings", len(prompts) * (1 + draws))
    other, unrepeated = 0, 0
    for prompt in prompts:
        (whole, *_) = await server.answers(prompt, temperature=0, max_tokens=tokens)
        step()
        for _ in range(draws if whole.text else 0):
            stops = drawn_stops(whole.text, random)
            expected = whole.text[: min(whole.text.index(stop) for stop in stops)]
            try:
                (found, *_) = await server.answers(prompt, temperature=0, max_tokens=tokens, stop=list(stops))
            except NotOffered as error:
                promise.offered, promise.why = False, str(error)
                return promise
            step()
            promise.answers += 1
            if found.text == expected:
                if found.finish != "stop":
                    promise.check(False, f"{stops!r}: the finish is {found.finish!r}")
                continue
            if not found.text.startswith(expected) and not expected.startswith(found.text):
                unrepeated += 1
                continue
            other += 1
            promise.check(False, f"{stops!r}: the text ends with {found.text[-20:]!r}, not {expected[-20:]!r}")
    if promise.answers == unrepeated:
        promise.why = "no greedy answer was the same again" if unrepeated else "no greedy answer has a text"
        return promise
    asked = f"temperature 0, {len(prompts)} prompts, {tokens} tokens, 1 or 2 stop strings drawn {draws} times each"
    promise.check(not other, f"{asked}: {promise.answers - other - unrepeated} of {promise.answers} end there")
    if unrepeated:
        promise.found.append(
            f"not judged: {unrepeated} answers, which differ from the greedy one before its stop string"
        )
    return promise


def usage_counts(server: OpenAIServer) -> Promise:
    """(h) The usage of every answered request counts its tokens."""
    promise = Promise("(h) usage counts tokens")
    rows = [(row, row.usage) for row in server.usage if row.usage is not None]
    if not rows:
        promise.offered, promise.why = False, f"none of {len(server.usage)} answers has usage"
        return promise
    promise.answers = len(rows)
    sums = [usage.get("total_tokens") == _of(usage, "prompt") + _of(usage, "completion") for _, usage in rows]
    promise.check(all(sums), f"{sum(sums):,} of {len(sums):,} totals are the sum of their parts")
    prompts = [(row.prompt_tokens, _of(usage, "prompt")) for row, usage in rows if row.prompt_tokens is not None]
    same = sum(ours == theirs for ours, theirs in prompts)
    line = f"prompt tokens are the reference's in {same:,} of {len(prompts):,}"
    wrong = next(((ours, theirs) for ours, theirs in prompts if ours != theirs), None)
    if wrong is not None:
        line += f"; it has {wrong[1]} where the reference has {wrong[0]}: the prompt is read as other tokens"
    promise.check(wrong is None, line)
    counted = 0
    for row, usage in rows:
        given, ends = _of(usage, "completion"), sum(answer.finish == "stop" for answer in row.answers)
        known = [answer.token_ids if answer.token_ids is not None else answer.tokens for answer in row.answers]
        if any(each is None for each in known):
            continue
        counted += 1
        made = sum(len(each) for each in known if each is not None)
        if not made <= given <= made + ends:  # whether an end-of-text token counts is the server's choice
            promise.check(False, f"completion tokens: {given} for answers of {made} tokens, {ends} of them ended")
    if counted:
        wrong_ones = sum(line.startswith("completion tokens") for line in promise.broken)
        promise.check(
            not wrong_ones, f"completion tokens are those of the answers in {counted - wrong_ones:,} of {counted:,}"
        )
    else:
        promise.found.append("not offered: completion tokens; answers do not say which tokens they are made of")
    return promise


def _of(usage: object, what: str) -> int:
    found = usage.get(f"{what}_tokens") if isinstance(usage, dict) else None
    return found if isinstance(found, int) else -1
