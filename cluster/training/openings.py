"""Openings: words of yours that the questions which a target asks itself begin with.

A target that asks itself questions chooses their subjects. Openings lead it to the tasks that are wanted: from
`Translate this sentence to German:` it goes on with a sentence, then answers. They need no data of a task.
"""

from __future__ import annotations

from pathlib import Path

from dendro.errors import BadRequest

from cluster.prompt_files import json_object
from cluster.router.tokenizer import CheckpointTokenizer

OPTION = "--openings"
MOST_OPENINGS = 10_000
MOST_TOKENS = 128
"""Most tokens of an opening."""


def read_openings(file: Path, tokenizer: CheckpointTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of the openings in a file of JSON lines, each with its `opening`. Raises BadRequest, naming the
    line."""
    found = list[tuple[int, ...]]()
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    found.append(_opening(f"{file}:{number}", line, tokenizer))
                if len(found) > MOST_OPENINGS:
                    raise BadRequest(OPTION, f"{file} has more than {MOST_OPENINGS:,} openings")
    except UnicodeDecodeError as error:
        raise BadRequest(OPTION, f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise BadRequest(OPTION, f"{file} cannot be read: {error.strerror}") from error
    if not found:
        raise BadRequest(OPTION, f"{file} has no openings")
    return tuple(found)


def _opening(where: str, line: str, tokenizer: CheckpointTokenizer) -> tuple[int, ...]:
    text = json_object(OPTION, where, line).get("opening")
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(OPTION, f"{where} has no text in the field 'opening'")
    tokens = tokenizer.encode(text, begins=False)
    if len(tokens) > MOST_TOKENS:
        raise BadRequest(OPTION, f"{where} has {len(tokens)} tokens; at most {MOST_TOKENS} are allowed")
    return tuple(tokens)
