"""Prompts of three kinds, always the same ones of the held-out passages: code, prose of docstrings, repetitive edits.

Kinds differ in acceptance: the continuation of an edit occurs in the prompt, that of prose does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path

from tokenizers import Tokenizer

from cluster.config import DEMO_MODELS
from cluster.demo.prompts import Passage, Prompt, held_out_prompts, load_passages, load_tokenizer, served_prompts
from cluster.router.tokenizer import CheckpointTokenizer

CODE, PROSE, EDITS = "code", "prose", "edits"
KINDS = (CODE, PROSE, EDITS)
DOCSTRING = re.compile(r'"""(.+?)(?:"""|\Z)', re.DOTALL)
DEFINED = re.compile(r"(?:def|class) (\w+)")
PROSE_LEFT = 64
"""Tokens that a docstring must have after the prompt cut from it, so that the continuation is prose too."""
BLOCK_TOKENS = 32
"""Most tokens of the lines that an edit repeats: a prompt of 128 has three copies or more and the start of another."""

CountTokens = Callable[[str], int]


def kind_prompts(
    kind: str, count: int, length_tokens: int, tokenizer: Tokenizer | None = None, models: Path = DEMO_MODELS
) -> list[Prompt]:
    """The first `count` prompts of a kind, of exactly `length_tokens` tokens each.

    code: those of `held_out_prompts`. prose: beginnings of long docstrings. edits: copies of a passage's first lines,
    each under another name, so that another copy is the likely continuation. Raises ValueError if there are fewer.
    """
    tokenizer = tokenizer or load_tokenizer(models)
    if kind == CODE:
        return held_out_prompts(count, length_tokens, tokenizer, models)
    if kind not in MAKERS:
        raise ValueError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")
    found: dict[tuple[int, ...], Prompt] = {}
    for passage in load_passages():
        text = MAKERS[kind](passage, lambda text: len(tokenizer.encode(text).ids), length_tokens)
        if text is None:
            continue
        ids = tokenizer.encode(text).ids
        prompt = tuple(ids[:length_tokens])
        if len(prompt) == length_tokens:  # passages of a module overlap, and two may have a docstring in common
            found.setdefault(
                prompt, Prompt(passage.name, tokenizer.decode(list(prompt)), prompt, tuple(ids[length_tokens:]))
            )
    if count > len(found):
        raise ValueError(f"there are {len(found)} prompts of {kind} of {length_tokens} tokens, not {count}")
    return list(found.values())[:count]


def served_kinds(length_tokens: int, tokenizer: CheckpointTokenizer) -> list[tuple[int, ...]]:
    """The ids of the prompts of all kinds by turns, each once, as a router encodes them for a target with this
    tokenizer."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, begins=True))

    by_kind = [served_prompts(None, length_tokens, tokenizer)]
    for make in MAKERS.values():
        texts = (make(passage, count, length_tokens) for passage in load_passages())
        ids = (tokenizer.encode(text, begins=True)[:length_tokens] for text in texts if text is not None)
        by_kind.append([tuple(each) for each in ids if len(each) == length_tokens])
    return list(dict.fromkeys(prompt for prompt in chain(*zip_longest(*by_kind)) if prompt is not None))


def _prose(passage: Passage, count: CountTokens, length_tokens: int) -> str | None:
    """The longest docstring of a passage, quotes included; None if it is not long enough."""
    longest = max((found[1] for found in DOCSTRING.finditer(passage.text)), key=len, default="")
    text = f'"""{longest}'
    return text if count(text) >= length_tokens + PROSE_LEFT else None


def _edits(passage: Passage, count: CountTokens, length_tokens: int) -> str | None:
    """Copies of the passage's first lines, their definition renamed in each; None if they are too few or too long."""
    defined = DEFINED.match(passage.text)
    block = _first_lines(passage.text, count)
    if defined is None or block is None:
        return None
    copies = (re.sub(rf"\b{defined[1]}\b", f"{defined[1]}_{letter}", block) for letter in _letters())
    text = ""
    while count(text) < 2 * length_tokens:
        text += next(copies)
    return text


def _first_lines(text: str, count: CountTokens) -> str | None:
    """Whole lines of at most BLOCK_TOKENS tokens, at least two of them, then an empty one."""
    lines = text.splitlines(keepends=True)
    kept = 0
    while kept < len(lines) and count("".join(lines[: kept + 1])) <= BLOCK_TOKENS:
        kept += 1
    return "".join(lines[:kept]).rstrip() + "\n\n" if kept >= 2 else None


def _letters() -> Iterator[str]:
    yield from "abcdefghijklmnopqrstuvwxyz"


MAKERS: dict[str, Callable[[Passage, CountTokens, int], str | None]] = {PROSE: _prose, EDITS: _edits}
"""Makers of a prompt's text from a passage, by kind. They return None if the passage does not suffice."""
