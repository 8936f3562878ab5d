"""Structures of answers: JSON of a schema, a match of a regular expression, a sentence of a grammar, or a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from dendro.arguments import items_of, shown
from dendro.errors import BadRequest
from dendro.internal.v1 import calls_pb2
from dendro.v1 import generation_pb2
from dendro.written_numbers import json_text

MAX_STRUCTURE_BYTES = 1 << 16
"""Bytes of a structure in UTF-8, of all choices together."""
MAX_CHOICES = 1024


class StructureForm(StrEnum):
    """The fields of the public API's Structure."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICES = "choices"


@dataclass(frozen=True, slots=True)
class Structure:
    """A form and the texts that describe the answer. Raises BadRequest, naming the field, for a structure that is
    empty, too large or cannot be encoded as UTF-8. `Grammars` finds whether it compiles."""

    form: StructureForm
    texts: tuple[str, ...]  # the structure's text; for choices, each of them

    def __post_init__(self) -> None:
        if not isinstance(self.form, StructureForm):
            raise BadRequest("structure.form", f"{shown(self.form)} is none of {', '.join(StructureForm)}")
        for text in items_of(self.field, self.texts):
            if not isinstance(text, str):
                raise BadRequest(self.field, f"must be of text; got {shown(text)}")
        if self.form is StructureForm.CHOICES and not 1 <= len(self.texts) <= MAX_CHOICES:
            raise BadRequest(self.field, f"has {len(self.texts)} texts; must have 1 to {MAX_CHOICES}")
        if self.form is not StructureForm.CHOICES and len(self.texts) != 1:
            raise BadRequest(self.field, f"has {len(self.texts)} texts; must have one")
        characters = sum(map(len, self.texts))
        if characters > MAX_STRUCTURE_BYTES:  # a character has at least one byte; do not encode more
            raise BadRequest(self.field, f"has {characters} characters; at most {MAX_STRUCTURE_BYTES} bytes of UTF-8")
        for index, text in enumerate(self.texts):
            if not text:
                raise BadRequest(
                    f"{self.field}[{index}]" if self.form is StructureForm.CHOICES else self.field, "is empty"
                )
        try:
            size = sum(len(text.encode()) for text in self.texts)
        except UnicodeEncodeError:
            raise BadRequest(self.field, "has a surrogate code point, which UTF-8 cannot encode") from None
        if size > MAX_STRUCTURE_BYTES:
            raise BadRequest(self.field, f"has {size} bytes of UTF-8; at most {MAX_STRUCTURE_BYTES}")

    @property
    def field(self) -> str:
        """Name of the field in errors."""
        return f"structure.{self.form}"

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Self:
        """The answer is JSON that a schema, given as JSON text or as Python values, accepts."""
        try:
            return cls(StructureForm.JSON_SCHEMA, (schema if isinstance(schema, str) else json_text(schema),))
        except (TypeError, ValueError) as error:
            raise BadRequest("structure.json_schema", f"cannot be written as JSON: {error}") from None

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """The whole answer matches a regular expression."""
        return cls(StructureForm.REGEX, (pattern,))

    @classmethod
    def grammar(cls, rules: str) -> Self:
        """The answer is a sentence of a grammar in Lark syntax."""
        return cls(StructureForm.GRAMMAR, (rules,))

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Self:
        """The answer is one of these texts."""
        return cls(StructureForm.CHOICES, tuple(items_of(f"structure.{StructureForm.CHOICES}", texts)))


def fill_structure(message: generation_pb2.Structure, structure: Structure) -> None:
    """Write a structure into the public API's message."""
    if structure.form is StructureForm.CHOICES:
        message.choices.texts.extend(structure.texts)
    else:
        setattr(message, structure.form, structure.texts[0])


def structure_from(message: generation_pb2.Structure) -> Structure:
    """The structure of a client's message. Its size is checked before it is copied."""
    form = message.WhichOneof("form")
    if form is None:
        raise BadRequest("structure", f"is empty; give one of {', '.join(StructureForm)}")
    if (named := StructureForm(form)) is not StructureForm.CHOICES:
        return Structure(named, (getattr(message, form),))
    if len(message.choices.texts) > MAX_CHOICES:
        raise BadRequest("structure.choices", f"has {len(message.choices.texts)} texts; must have 1 to {MAX_CHOICES}")
    return Structure(StructureForm.CHOICES, tuple(message.choices.texts))


def structure_message(structure: Structure | None) -> calls_pb2.Structure | None:
    """A structure in a call to a peer."""
    return None if structure is None else calls_pb2.Structure(form=structure.form, texts=structure.texts)


def structure_of_call(message: calls_pb2.OpenCall) -> Structure | None:
    """The structure of a call; None where it has none."""
    if not message.HasField("structure"):
        return None
    if message.structure.form not in list(StructureForm):
        raise BadRequest(
            "structure.form", f"{message.structure.form[:32]!r} is unknown; must be one of {', '.join(StructureForm)}"
        )
    if len(message.structure.texts) > MAX_CHOICES:
        raise BadRequest("structure.texts", f"has {len(message.structure.texts)} texts; at most {MAX_CHOICES}")
    return Structure(StructureForm(message.structure.form), tuple(message.structure.texts))
