"""What a structure admits, byte by byte: a vocabulary of the 256 bytes."""

from __future__ import annotations

import asyncio
import json

from dendro.grammars import Grammar, Grammars
from dendro.structure import Structure

BYTES = Grammars(lambda: {token: bytes([token]) for token in range(256)}, 256)


def made(structure: Structure) -> Grammar:
    return asyncio.run(BYTES.compiled(structure))


def compiled(schema: object) -> Grammar:
    """schema: a JSON schema, or its text"""
    return made(Structure.json_schema(schema if isinstance(schema, str) else json.dumps(schema)))


def admits(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer."""
    place = grammar.text(0).place()
    for byte in text.encode():
        below = place.after(byte)
        if below is None:
            return False
        place = below
    return place.may_end
