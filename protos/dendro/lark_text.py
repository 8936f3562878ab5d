"""What a grammar in Lark syntax names, read without compiling it."""

from __future__ import annotations

from collections.abc import Iterator


def token_references(grammar: str) -> Iterator[str]:
    """The tokens that a Lark grammar names, as `<[7]>` or `<|end|>`, outside of strings, expressions and comments."""
    place = 0
    while place < len(grammar):
        here = grammar[place]
        if here == "#" or grammar.startswith("//", place):
            place = _after(grammar, place, "\n")
        elif here in ('"', "/"):
            place = _after(grammar, place, here)
        elif here == "<":
            end = grammar.find(">", place)
            yield grammar[place : end + 1 if end >= 0 else len(grammar)]
            place = end + 1 if end >= 0 else len(grammar)
        else:
            place += 1


def _after(text: str, place: int, end: str) -> int:
    """The place after what begins here and ends with this character, where no backslash is before it."""
    place += 1
    while place < len(text) and text[place] != end:
        place += 2 if text[place] == "\\" else 1
    return place + 1
