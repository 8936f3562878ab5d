"""Why a replica did not start, from what Serve reports of its deployment: a traceback as text."""

from __future__ import annotations

import re

from dendro.errors import BadRequest, DendroError, EngineFailed, one_line

REASON_CHARACTERS = 2000
_REFUSAL = re.compile(r"^(?:\w+\.)+(BadRequest|CheckpointError|FamilyError): (.+)$", re.MULTILINE)
"""Errors that another start would raise again, in the last lines of a traceback."""


def refusal_in(message: str) -> DendroError | None:
    """The error with which a replica refused its model or configuration; None where it failed otherwise."""
    found = _REFUSAL.findall(message)
    if not found:
        return None
    kind, text = found[-1]
    reason = one_line(text, REASON_CHARACTERS)
    if kind != BadRequest.__name__:
        return EngineFailed(f"model: {reason}")
    field, _, rest = reason.partition(": ")
    return BadRequest(field, rest)


def last_line(message: str) -> str:
    """The error that a traceback ends with; empty for an empty message."""
    lines = message.strip().splitlines()
    return one_line(lines[-1].strip(), REASON_CHARACTERS) if lines else ""


def first_and_last_line(message: str) -> str:
    """What Serve reports of a deployment, without the traceback that may be between its first line and its last."""
    first, *rest = message.strip().splitlines()
    return one_line(" ".join([first, *rest[-1:]]), REASON_CHARACTERS)
