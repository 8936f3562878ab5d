"""Options that both `dendro train drafter` and `dendro train head` declare."""

from __future__ import annotations

from typing import Annotated

import typer

Pattern = Annotated[str, typer.Option(help="Names of a folder's files.")]
TextField = Annotated[str, typer.Option(help="The field of a JSON line that has its text.")]
Resume = Annotated[bool, typer.Option(help="Resume a stopped run with the same --out.")]
