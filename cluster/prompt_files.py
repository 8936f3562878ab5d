"""Prompts of a file of JSON lines, as a user of a target sends them; by default, the questions of this package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.errors import BadRequest

from cluster.config import TargetConfig
from cluster.json_lines import json_lines
from cluster.router.tokenizer import CheckpointTokenizer

QUESTIONS = Path(__file__).parent / "demo" / "questions.jsonl"
"""Questions of several categories, written for this project."""
OPTION = "--prompt-file"
MOST_PROMPTS = 10_000
MOST_CHARACTERS = 1 << 20
"""Most characters of a line."""

PromptFile = Annotated[
    Path | None,
    typer.Option(
        OPTION,
        help="JSON lines, each with messages, a prompt (a user's message) or a text, and perhaps its category.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One line of a file."""

    name: str  # file and line, `prompts.jsonl:3`
    category: str  # empty where the line names none
    token_ids: tuple[int, ...]


def tokenizer_of(target: TargetConfig, name: str) -> CheckpointTokenizer:
    """A target's tokenizer, from its folder on this machine. Raises BadRequest, naming the field."""
    try:
        return CheckpointTokenizer(target.tokenizer_folder, "", target.chat_template)
    except BadRequest as error:
        field = "chat_template" if error.field == "chat_template" else target.tokenizer_field
        raise BadRequest(f"targets.{name}.{field}", error.reason) from error


def read_prompts(file: Path, tokenizer: CheckpointTokenizer) -> list[FilePrompt]:
    """The prompts of a file, in its order. `messages`, up to the last that is not an answer, and a `prompt` go through
    the chat template, where the tokenizer has one; a `text`, and a `prompt` without a template, begin a text.

    Raises BadRequest, naming the file and the line.
    """
    return [
        _prompt(f"{file.name}:{number}", entry, tokenizer)
        for number, entry in json_lines(OPTION, file, "prompts", MOST_PROMPTS, MOST_CHARACTERS)
    ]


def by_turns(prompts: Iterable[FilePrompt]) -> list[FilePrompt]:
    """The first of every category, then the second of every category, and so on: any number of them is a mixture."""
    categories: dict[str, list[FilePrompt]] = defaultdict(list)
    for prompt in prompts:
        categories[prompt.category].append(prompt)
    return [prompt for prompt in chain(*zip_longest(*categories.values())) if prompt is not None]


def that_fit(prompts: Iterable[FilePrompt], longest: int) -> list[FilePrompt]:
    """Select the prompts of at most `longest` tokens. Raises BadRequest if there are none."""
    found = [prompt for prompt in prompts if len(prompt.token_ids) <= longest]
    if not found:
        raise BadRequest(OPTION, f"has no prompt of at most {longest} tokens")
    return found


def _prompt(where: str, entry: Mapping[str, Any], tokenizer: CheckpointTokenizer) -> FilePrompt:
    category = entry.get("category", "")
    if not isinstance(category, str):
        raise BadRequest(OPTION, f"{where}: category must be a text")
    given = [name for name in ("messages", "prompt", "text") if name in entry]
    if len(given) != 1:
        raise BadRequest(OPTION, f"{where} must have one of messages, prompt and text, not {len(given)}")
    try:
        ids = _ids(given[0], entry[given[0]], tokenizer)
    except BadRequest as error:
        raise BadRequest(OPTION, f"{where}: {error.field}: {error.reason}") from error
    return FilePrompt(where, category, tuple(ids))


def _ids(kind: str, value: Any, tokenizer: CheckpointTokenizer) -> list[int]:
    if kind == "messages":
        return tokenizer.encode_chat(tokenizer.chat(_asked(value), opens_answer=True))
    if not isinstance(value, str) or not value:
        raise BadRequest(kind, "must be a text that is not empty")
    if kind == "prompt" and tokenizer.has_chat:
        return tokenizer.encode_chat(tokenizer.chat([{"role": "user", "content": value}], opens_answer=True))
    return tokenizer.encode(value, begins=True)


def _asked(messages: Any) -> list[dict[str, Any]]:
    """A conversation without the answers at its end."""
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in messages
    ):
        raise BadRequest("messages", "must be a list of objects with a role and a content, both texts")
    asked: list[dict[str, Any]] = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise BadRequest("messages", "asks nothing")
    return asked
