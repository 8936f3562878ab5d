"""Where stop strings end a text, and what may be sent of it: by the definitions, as slowly as they are written."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.router.tokenizer import Tokenizer


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The end and the string of the stop string that ends first, the longest of several. By trying every end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def sendable(text: str, stops: Sequence[str], included: bool, finished: bool) -> str:
    """What may be sent of a text so far: by the definition, as slowly as that."""
    found = first_stop(text, stops)
    if found is not None:
        return text[: found[0] if included else found[0] - len(found[1])]
    if finished:
        return text
    begins = {stop[:length] for stop in stops for length in range(1, len(stop))}
    held = max((len(text) - start for start in range(len(text)) if text[start:] in begins), default=0)
    return text[: len(text) - held]


def ended(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], included: bool) -> tuple[int, str, str]:
    """Tokens, text and stop string of an answer, from the text of every prefix of its tokens: up to the first token
    with which a stop string is in the text that later tokens cannot change."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        incomplete = len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        stable = text if count == len(ids) else text[: len(text) - min(incomplete, 3)]
        if found := first_stop(stable, stops):
            return count, sendable(stable, stops, included, True), found[1]
    return len(ids), tokenizer.decode(ids), ""
