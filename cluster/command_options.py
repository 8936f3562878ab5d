"""Options that several commands have: the configuration, its target, where the engines run, and the report's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.config import Config, demo_config

_CONFIG = "A cluster's YAML file. Default: the bundled demo."

ConfigArgument = Annotated[Path | None, typer.Argument(help=_CONFIG, show_default=False)]
ConfigOption = Annotated[Path | None, typer.Option("--config", help=_CONFIG, show_default=False)]
TargetName = Annotated[str, typer.Option(help="The target's name. Default: the first.", show_default=False)]
Local = Annotated[bool, typer.Option("--local", help="Engines in this process: no Ray, gRPC or Redis.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.", show_default=False)]


def given_config(path: Path | None) -> Config:
    """The configuration of a command that has the bundled demo as its default."""
    return demo_config() if path is None else Config.load(path)
