"""Options that both `dendro train drafter` and `dendro train head` declare."""

from __future__ import annotations

from typing import Annotated

import typer

Pattern = Annotated[str, typer.Option(help="Names of a folder's files.")]
TextField = Annotated[str, typer.Option(help="The field of a JSON line that has its text.")]
MOST_SEED = (1 << 32) - 1
"""Largest seed, as of all commands: an unsigned 32-bit number."""
Resume = Annotated[bool, typer.Option(help="Resume a stopped run with the same --out.")]
