"""Openings: words of yours that the questions which a target asks itself begin with.

A target that asks itself questions chooses their subjects. Openings lead it to the tasks that are wanted: from
`Translate this sentence to German:` it goes on with a sentence, then answers. They need no data of a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest

from cluster.json_lines import json_lines
from cluster.router.tokenizer import CheckpointTokenizer

OPTION = "--openings"
MOST_OPENINGS = 10_000
MOST_TOKENS = 128
"""Most tokens of an opening."""


def read_openings(file: Path, tokenizer: CheckpointTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of the openings in a file of JSON lines, each with its `opening`. Raises BadRequest, naming the
    line."""
    return tuple(
        _opening(f"{file}:{number}", entry, tokenizer)
        for number, entry in json_lines(OPTION, file, "openings", MOST_OPENINGS)
    )


def _opening(where: str, entry: Mapping[str, Any], tokenizer: CheckpointTokenizer) -> tuple[int, ...]:
    text = entry.get("opening")
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(OPTION, f"{where} has no text in the field 'opening'")
    tokens = tokenizer.encode(text, begins=False)
    if len(tokens) > MOST_TOKENS:
        raise BadRequest(OPTION, f"{where} has {len(tokens)} tokens; at most {MOST_TOKENS} are allowed")
    return tuple(tokens)
