"""The command line's options for the structure of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dendro.errors import BadRequest
from dendro.structure import Structure

from cluster.command_options import structure

JsonSchemaOption = Annotated[
    Path | None,
    structure("--json-schema", metavar="FILE", help="The answer is JSON, in one line, that this schema accepts."),
]
RegexOption = Annotated[str | None, structure(help="The whole answer matches this regular expression.")]
GrammarOption = Annotated[
    Path | None,
    structure(metavar="FILE", help="The answer is a sentence of this grammar: Lark syntax, from `start` on."),
]
ChoicesOption = Annotated[
    list[str] | None,
    structure("--choices", metavar="TEXT", help="The answer is one of these; repeatable."),
]


def structure_given(
    json_schema: Path | None, regex: str | None, grammar: Path | None, choices: list[str] | None
) -> Structure | None:
    """The structure of these options; None where none is given. Raises BadRequest for more than one, and for a file
    that cannot be read."""
    made = []
    if json_schema is not None:
        made.append(Structure.json_schema(_read("--json-schema", json_schema)))
    if regex is not None:
        made.append(Structure.regex(regex))
    if grammar is not None:
        made.append(Structure.grammar(_read("--grammar", grammar)))
    if choices:
        made.append(Structure.choices(choices))
    if len(made) > 1:
        raise BadRequest("structure", f"is given as {' and as '.join(each.form for each in made)}; give one of them")
    return made[0] if made else None


def _read(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(option, f"{file} cannot be read: {error}") from None
