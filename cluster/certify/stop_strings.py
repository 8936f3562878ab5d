"""The check of stop strings: random substrings of known answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from dendro.answer import Completion
from dendro.client import Asking

from cluster.certify.asking import SamplingLaw, completion
from cluster.certify.guesses import GuessCount
from cluster.certify.promises import Promise, check_of, first_difference
from cluster.measure.measurement import Step

STOP_LAWS = (SamplingLaw(), SamplingLaw(1.0))
LONGEST_STOP = 6
"""Characters of a drawn stop string: at most about a round's, so that many begin in one round and end in another."""
AT_ONCE = 2
"""Stop strings of a request, at most."""


def drawn_stops(text: str, random: Random) -> tuple[str, ...]:
    """One or two substrings of a text that is not empty."""
    places = [random.randrange(len(text)) for _ in range(random.randint(1, AT_ONCE))]
    return tuple(text[place : place + random.randint(1, LONGEST_STOP)] for place in places)


def cut_of(whole: Completion, stops: Sequence[str]) -> tuple[list[int], str, str]:
    """Tokens, text and stop string of an answer that was generated without stop strings and without speculation, so
    that each of its rounds has one token. By a plain search of the text after each token."""
    ids: list[int] = []
    text = ""
    for part in whole.rounds:
        ids += part.token_ids
        text += part.text
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            end, length, stop = min(found)
            return ids, text[: end + length], stop
    return ids, text, ""


@check_of("(g) stop strings cut answers at the same token and character with every speculation")
async def stop_strings_end_answers(
    promise: Promise,
    service: Asking,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    draws: int,
    ways: Sequence[str],
    margin_of: Callable[[Sequence[int]], float] | None,
    excused_below: float,
    step: Step,
) -> None:
    """(g) With substrings of an answer as its stop strings, every way of speculation gives that answer up to them.

    For each prompt and law one answer is generated without stop strings, and `draws` times others with stop strings, in
    each of the `ways`. `margin_of` and `excused_below` are those of (b).
    """
    random, counted = Random(1), GuessCount(promise, [way for way in ways if way not in ("off", "auto")])
    for law in STOP_LAWS:
        limit = excused_below / (law.temperature or 1.0)
        same, asked = 0, 0
        for seed, prompt in enumerate(prompts, 1000):
            whole = await completion(service, prompt, law, seed, "off", tokens)
            step()
            if not whole.text:
                promise.found.append(f"{law}: an answer without text has no stop strings")
                continue
            for _ in range(draws):
                stops = drawn_stops(whole.text, random)
                ids, text, stop = cut_of(whole, stops)
                for way in ways:
                    done = await completion(service, prompt, law, seed, way, tokens, stop=stops)
                    step()
                    asked += 1
                    counted.add(way, done.complete.speculation)
                    place = first_difference(done.token_ids, ids)
                    promise.tokens_compared += len(ids) if place is None else place
                    what = f"{law}, {way}, stop strings {stops!r}"
                    if place is None and (done.text, done.complete.stop_string) == (text, stop):
                        same += 1
                    elif place is None:
                        promise.check(False, f"{what}: the text ends with {done.text[-40:]!r}, not {text[-40:]!r}")
                    elif place < len(ids) and margin_of is not None and margin_of([*prompt, *ids[:place]]) < limit:
                        promise.excused += 1
                        same += 1
                    else:
                        promise.check(False, f"{what}: differs at token {place}")
        promise.answers += asked
        promise.check(same == asked, f"{law}: {same} of {asked} answers are the plain one up to its stop string")
    counted.judge(each_arm=False)
