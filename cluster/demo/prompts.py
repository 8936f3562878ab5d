"""Prompts for measuring the demo pair: passages of the held-out modules, shipped as `held_out.json`.

The passages are shipped, so that prompts do not depend on the running Python; `passages.py` chose them. They are
Python's own source text, under the PSF licence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tokenizers import Tokenizer

from cluster.config import DEMO_MODELS, demo_models

if TYPE_CHECKING:
    from cluster.router.tokenizer import CheckpointTokenizer

PASSAGES_FILE = Path(__file__).parent / "held_out.json"
MEASURING_FILE = "measuring_prompts.json"  # a file beside the models, which their training writes
LEAST_CONTINUATION = 128
"""Tokens that a passage has after a prompt cut from it."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Passage:
    """The beginning of a function or class of a held-out module."""

    name: str  # module and line, "heapq.py:214"
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of exactly the requested length, and its continuation in the module."""

    name: str  # name of the passage
    text: str
    token_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]  # at least LEAST_CONTINUATION


def load_passages() -> list[Passage]:
    return [Passage(entry["name"], entry["text"]) for entry in json.loads(PASSAGES_FILE.read_text())]


def load_tokenizer(models: Path = DEMO_MODELS) -> Tokenizer:
    return Tokenizer.from_file(str(demo_models(models) / "target" / "tokenizer.json"))


def _measuring_order(models: Path) -> list[str]:
    """Names of the passages, those with few repetitions in the greedy answer first; empty without MEASURING_FILE."""
    chosen = models / MEASURING_FILE
    return list(json.loads(chosen.read_text())["order"]) if chosen.exists() else []


def as_prompts(passages: Iterable[Passage], length_tokens: int, tokenizer: Tokenizer) -> list[Prompt]:
    """A prompt of each passage that has enough tokens after the prompt."""
    prompts = []
    for passage in passages:
        ids = tokenizer.encode(passage.text).ids
        prompt, continuation = ids[:length_tokens], ids[length_tokens:]
        if len(continuation) >= LEAST_CONTINUATION:
            prompts.append(Prompt(passage.name, tokenizer.decode(prompt), tuple(prompt), tuple(continuation)))
    return prompts


def held_out_prompts(
    count: int | None,
    length_tokens: int,
    tokenizer: Tokenizer | None = None,
    models: Path = DEMO_MODELS,
) -> list[Prompt]:
    """The first `count` (None: all) measuring prompts of exactly `length_tokens` (at most 256) tokens; always the same.

    Passages on which the target at `models` repeats itself least come first, since looping text is trivially predicted;
    the model card states for which lengths. `tokenizer` is that target's unless given.
    """
    return _first(
        count, as_prompts(_measured(models, length_tokens), length_tokens, tokenizer or load_tokenizer(models))
    )


def served_prompts(count: int | None, length_tokens: int, tokenizer: CheckpointTokenizer) -> list[tuple[int, ...]]:
    """The ids of the first `count` (None: all) measuring prompts, as a router encodes them for a target with this
    tokenizer."""
    texts = (tokenizer.encode(passage.text, begins=True) for passage in _measured(DEMO_MODELS, length_tokens))
    return _first(
        count, [tuple(ids[:length_tokens]) for ids in texts if len(ids) >= length_tokens + LEAST_CONTINUATION]
    )


def _measured(models: Path, length_tokens: int) -> list[Passage]:
    """All passages, in the order of the target at `models`, for prompts of so many tokens."""
    if length_tokens > 256:
        raise ValueError(f"prompts have at most 256 tokens, not {length_tokens}")
    passages = {passage.name: passage for passage in load_passages()}
    order = [name for name in _measuring_order(models) if name in passages]
    order += [name for name in passages if name not in set(order)]
    return [passages[name] for name in order]


def _first(count: int | None, prompts: list[Found]) -> list[Found]:
    if count is not None and count > len(prompts):
        raise ValueError(f"there are {len(prompts)} measuring prompts, not {count}")
    return prompts[:count]
