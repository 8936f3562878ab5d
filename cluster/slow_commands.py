"""Commands of `dendro` whose modules are slow to import: each is imported when its command runs, or shows its help."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import typer
from dendro.errors import BadRequest

train = typer.Typer(help="Train models.", no_args_is_help=True)
bench = typer.Typer(help="Measure, side by side and in one run.", no_args_is_help=True)

LABORATORY = "cluster.bench"
"""The package of the benches of the bundled models, which is left out of the wheel as these models are."""
ELSEWHERE = {"ignore_unknown_options": True, "allow_extra_args": True}


def function_of(module: str, name: str) -> Callable[..., Any]:
    """A command's function, by the name that it, or the bench that makes it, has in a module."""
    found: Any = getattr(importlib.import_module(module), name)
    function: Callable[..., Any] = found if callable(found) else found.command()
    return function


def _run_from(module: str, function: str, context: typer.Context) -> None:
    """Run a command that is defined, with its options and help, in a module that is slow to import.

    Raises BadRequest for a bench of the bundled models where the package was installed from a wheel, which lacks both.
    """
    if module.startswith(LABORATORY) and find_spec(LABORATORY) is None:
        name = f"bench {context.info_name}"
        reason = "measures the bundled models; the package has neither them nor this bench: clone the repository,"
        raise BadRequest(name, f"{reason} run `make setup` there, then `.venv/bin/dendro {name}`")
    command = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    command.command()(function_of(module, function))
    command(args=context.args, prog_name=context.command_path)


@train.command("demo", context_settings=ELSEWHERE, add_help_option=False)
def train_demo(context: typer.Context) -> None:
    """Train the demo's models on Python's standard library: a small Llama, three drafters distilled from it, and a
    second target, a Mamba-2."""
    _run_from("cluster.demo.train", "main", context)


@train.command("drafter", context_settings=ELSEWHERE, add_help_option=False)
def train_drafter(context: typer.Context) -> None:
    """Train a drafter for a target of a configuration on your own texts: a Mamba, a Mamba-2 or a Llama, distilled from
    the target."""
    _run_from("cluster.training.command", "drafter", context)


@train.command("head", context_settings=ELSEWHERE, add_help_option=False)
def train_head(context: typer.Context) -> None:
    """Train an acceptance head for a drafter of a configuration: the chances that its guesses come true, learned from
    the target's answers to your texts."""
    _run_from("cluster.training.head_command", "head", context)


MEASURING = {
    "certify": "Check that answers have the target's own tokens whatever the speculation. Exit status 1 where a check "
    "fails.",
    "tune": "Find the fastest trees for a target, its drafters and this machine, and compare them with the configured "
    "arms.",
    "predict": "Predict what each configured arm gives over no speculation here, and where a round's time is lost.",
}
"""Help of the commands of modules of their names."""

OWN = {
    "speed": ("cluster.measure.speed_command", "Compare speeds with transformers and with speculation off."),
    "load": ("cluster.measure.load_command", "Measure many concurrent clients, next to transformers' batches."),
}
"""Module and help of each bench that also measures a configuration's own models."""
BUNDLED = {
    "edits": ("cluster.bench.edits", "Measure answers that a client's prediction speeds up."),
    "ahead": ("cluster.bench.ahead", "Measure the drafting time that prepared trees hide."),
    "kernels": ("cluster.bench.kernels", "Measure this processor's products of few rows, next to torch's."),
    "drafter": ("cluster.bench.drafter", "Measure drafters: levels, drafts, sessions, and long texts."),
}
"""Module and help of each bench that measures the bundled models alone."""
BENCHES = OWN | BUNDLED


def _add(group: typer.Typer, name: str, module: str, function: str, text: str, panel: str | None = None) -> None:
    def run(context: typer.Context) -> None:
        _run_from(module, function, context)

    group.command(name, help=text, context_settings=ELSEWHERE, add_help_option=False, rich_help_panel=panel)(run)


def add_measuring(app: typer.Typer) -> None:
    """Add `certify`, `tune` and `predict` to the command `dendro`."""
    for name, text in MEASURING.items():
        _add(app, name, f"cluster.{name}.command", name, text)


for _panel, _benches in {
    "Your own pair, or the bundled one": OWN,
    "The bundled models, in a checkout": BUNDLED,
}.items():
    for _name, (_module, _text) in _benches.items():
        _add(bench, _name, _module, _name.upper(), _text, _panel)
