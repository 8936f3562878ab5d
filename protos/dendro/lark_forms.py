"""Writes a structure as a grammar of llguidance, in Lark syntax.

The process that compiles structures first imports this file and must start quickly, so it needs no package but
llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dendro.lark_text import token_references, with_schemas
from dendro.patterns import slashed
from dendro.schemas import SchemaError, enforceable

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

HEADER = '%llguidance {"no_forcing": true}\n'
"""First line of a grammar. Without `no_forcing`, text that must follow could only be spelt as the tokenizer would."""
OPTIONS_LINE = re.compile(r"^\s*%llguidance", re.MULTILINE)
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "whitespace_pattern": " ?", "lenient": False}
"""Options that a schema cannot change: unbounded whitespace would let a model go on for ever, and `lenient` ignores
keywords."""
TOO_DEEP = "its objects and arrays are nested more than 127 deep"
"""The depth that llguidance's reader of JSON has."""


def lark_of(form: str, texts: Sequence[str]) -> str:
    """Write the grammar of a structure's texts. form: a value of StructureForm. Raises ValueError for structures that
    cannot be enforced."""
    match form:
        case "grammar":
            if OPTIONS_LINE.search(texts[0]):
                raise ValueError("has a line %llguidance; its options are the server's own")
            if named := next(token_references(texts[0]), None):
                raise ValueError(f"names the token {named[:40]}; an answer's tokens stand for text")
            return HEADER + with_schemas(texts[0], _schema)
        case "regex":
            return f"{HEADER}start: /{slashed(texts[0])}/"
        case "choices":
            return f"{HEADER}start: /{'|'.join(map(literal, texts))}/"
    return f"{HEADER}start: %json {_schema(texts[0])}"


def _schema(text: str) -> str:
    """A JSON schema, in a form that llguidance enforces as written. Raises ValueError for what cannot be enforced, or
    is no schema."""
    import llguidance

    try:
        made = llguidance.LLMatcher.grammar_from_json_schema(enforceable(text), overrides=JSON_OPTIONS)
    except SchemaError as error:
        raise ValueError(f"cannot be enforced: {error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError) or str(error).startswith("recursion limit"):
            raise ValueError(f"cannot be enforced: {TOO_DEEP}") from None
        raise ValueError(f"is no JSON schema: {error}") from None
    return json.dumps(json.loads(made)["grammars"][0]["json_schema"])


def literal(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):X}}}" for each in text)
