"""`dendro keys`: make, list and remove the API keys of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from dendro.errors import BadRequest

from cluster.tables import folding_table, page

keys = typer.Typer(help="Make, list and remove API keys.", no_args_is_help=True)

KeysFile = Annotated[Path, typer.Argument(help="The file of keys, as in `auth.keys` of a configuration.")]
Name = Annotated[str, typer.Argument(help="The key's name, for people.")]


@keys.command()
def add(
    file: KeysFile,
    name: Name,
    tenant: Annotated[
        str | None, typer.Option(help="Whose sessions and statistics its calls use. Default: the name.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests in any 60 seconds.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompts and answers in any 60 seconds.")
    ] = None,
    answers: Annotated[int | None, typer.Option(help="Answers that run at once.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the text before an answer, a session's included.")
    ] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer.")] = None,
    structures: Annotated[bool, typer.Option(help="Whether answers may have structures.")] = True,
) -> None:
    """Make a key, print it, and write its hash into the file. It is shown only now. Routers read the file again."""
    from cluster.api.keys import ApiKeys, new_key, read_keys, write_keys
    from cluster.router.allowance import KeyLimits

    limits = KeyLimits(requests_per_minute, tokens_per_minute, answers, prompt_tokens, new_tokens, structures)
    text, key = new_key(name, name if tenant is None else tenant, limits)
    write_keys(file, (read_keys(file) if file.exists() else ApiKeys()).with_key(key))
    print(text)


@keys.command("list")
def list_keys(file: KeysFile) -> None:
    """List the keys of a file with their tenants and limits."""
    from cluster.api.keys import read_keys

    found = read_keys(file).keys
    rows = [(key.name, key.tenant, ", ".join(_limits(key.limits.given())) or "none") for key in found]
    page().print(folding_table("keys", ("name", "tenant", "limits"), rows))


def _limits(given: dict[str, int | bool]) -> list[str]:
    return [f"{name} {'off' if value is False else value}" for name, value in given.items()]


@keys.command()
def remove(file: KeysFile, name: Name) -> None:
    """Remove a key. Routers refuse it once they have read the file again; answers that run go on."""
    from cluster.api.keys import read_keys, write_keys

    if not file.exists():
        raise BadRequest("file", f"there is no file {file}")
    write_keys(file, read_keys(file).without(name))
