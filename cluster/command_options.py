"""Options that several commands have (the configuration, its target, where the engines run, the report's file), and how
options with numbers are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from dendro.arguments import secret_of
from dendro.errors import BadRequest

from cluster.config import Config, demo_config
from cluster.replaced_files import replace_text

_CONFIG = "A cluster's YAML file. Default: the bundled demo."

ConfigArgument = Annotated[Path | None, typer.Argument(help=_CONFIG, show_default=False)]
ConfigOption = Annotated[Path | None, typer.Option("--config", help=_CONFIG, show_default=False)]
TargetName = Annotated[str, typer.Option(help="The target's name. Default: the first.", show_default=False)]
Routers = Annotated[str, typer.Option("--address", help="The routers, host:port, separated by commas.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS")]
Local = Annotated[bool, typer.Option("--local", help="Engines in this process: no Ray, gRPC or Redis.")]


def writable(option: str) -> Callable[[Path | None], Path | None]:
    """Makes the callback of an option that names the file of a report. It returns the file as it is given, and raises
    BadRequest, before the work that is reported, where it cannot be written; its folder is made after the work."""

    def checked(path: Path | None) -> Path | None:
        if path is not None:
            folder = next((each for each in path.absolute().parents if each.exists()), path)
            made = folder.is_dir() and os.access(folder, os.W_OK)
            if path.is_dir() or not (made or os.access(path, os.W_OK)):
                raise BadRequest(option, f"{path} cannot be written; name a file in a folder that takes new ones")
        return path

    return checked


def write_report(json_file: Path, text: str) -> None:
    """Write a report to the file of `--json`, whose folder is made. Raises BadRequest where that is not possible."""
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest("--json", f"{json_file} cannot be written: {error.strerror}") from None
    replace_text("--json", json_file, text)


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the report as JSON.", show_default=False, callback=writable("--json")),
]

KEY_VARIABLE = "DENDRO_API_KEY"
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help=f"A file whose content is the API key for --address. Default: the environment's {KEY_VARIABLE}.",
        show_default=False,
    ),
]

Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        help="Call --address over TLS; the authority of its certificate, in PEM, or `system` for this machine's.",
        show_default=False,
    ),
]


def given_credentials(authority: Path | None) -> grpc.ChannelCredentials | None:
    """The credentials for calls to an address; None for calls without TLS."""
    if authority is None or str(authority) == "system":
        return None if authority is None else grpc.ssl_channel_credentials()
    return grpc.ssl_channel_credentials(given_file("--ca", authority).encode())


def given_key(path: Path | None = None) -> str:
    """The API key for calls to an address; empty where none is given. An argument of the command would show it in the
    list of processes."""
    if path is None:
        return secret_of(KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "").strip())
    return secret_of("--key-file", given_file("--key-file", path).strip())


MOST_FILE_BYTES = 8 << 20
"""Bytes of a file that an option names. A request has no more; a device has no end."""


def given_file(option: str, path: Path) -> str:
    """The text of a file. Raises BadRequest, naming the option, for a file that has more than MOST_FILE_BYTES or cannot
    be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise BadRequest(option, f"{path} has more than {MOST_FILE_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise BadRequest(option, f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:  # the message of the error would quote a key
        raise BadRequest(option, f"{path} cannot be read: it is not UTF-8") from None


def given_config(path: Path | None) -> Config:
    """The configuration of a command that has the bundled demo as its default."""
    return demo_config() if path is None else Config.load(path)


def numbers_of(option: str, text: str, separator: str, *kinds: Callable[[str], Any]) -> tuple[Any, ...]:
    """The parts of an option's text, each read as its kind."""
    try:
        return tuple(kind(part) for kind, part in zip(kinds, text.split(separator), strict=True))
    except ValueError:
        raise BadRequest(option, f"{text!r} is not of the form that --help shows") from None


def text_and_number(option: str, text: str) -> tuple[str, float]:
    """An option's text up to its last colon, and the number after it."""
    first, _, last = text.rpartition(":")
    try:
        return first, float(last)
    except ValueError:
        raise BadRequest(option, f"{text!r} is not of the form that --help shows") from None
