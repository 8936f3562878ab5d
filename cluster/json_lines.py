"""Files of JSON lines that a user names: an object a line. Errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest

SURROGATE = "\\ud"
"""How JSON spells half of a character, and some whole ones."""


@contextmanager
def reading(option: str, file: Path) -> Iterator[None]:
    """Translate the errors of reading a text file into BadRequest, naming the option and the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadRequest(option, f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise BadRequest(option, f"{file} cannot be read: {error.strerror}") from error


def json_lines(
    option: str, file: Path, what: str, most: int | None = None, most_characters: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of each line that is not blank. Raises BadRequest, naming the option, the file and the
    line, also if there is no object.

    what: what the objects are called, a plural   most: most objects   most_characters: of a line; None: any number
    """
    found = 0
    with reading(option, file), file.open(encoding="utf-8") as stream:
        number = 0
        while line := stream.readline(-1 if most_characters is None else most_characters + 1):
            number += 1
            if most_characters is not None and len(line) > most_characters:
                raise BadRequest(option, f"{file}:{number} has more than {most_characters:,} characters")
            if not line.strip():
                continue
            found += 1
            if most is not None and found > most:
                raise BadRequest(option, f"{file} has more than {most:,} {what}")
            yield number, _json_object(option, f"{file}:{number}", line)
    if not found:
        raise BadRequest(option, f"{file} is empty: it has no {what}")


def _json_object(option: str, where: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if SURROGATE in line.lower():  # no tokenizer takes half of a pair
            json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest(option, f"{where} has a surrogate code point, which UTF-8 cannot encode") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(option, f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise BadRequest(option, f"{where} is not a JSON object")
    return entry
