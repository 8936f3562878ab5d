"""`dendro train head`: the options, and the line for the configuration."""

from __future__ import annotations

import os

# Set before torch is imported: idle OpenMP threads must not spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from dendro.errors import BadRequest
from transformers.utils import logging

from cluster.command_options import ConfigArgument, TargetName, given_config
from cluster.hub import fetched_model
from cluster.tables import folding_table, page
from cluster.training.acceptance import TEMPERATURES
from cluster.training.adding import with_head, write_head_entry
from cluster.training.data import DataSource
from cluster.training.head import CARD_FILE, train_head, warps_of
from cluster.training.head_card import HEADER, quality_rows
from cluster.training.head_plan import HeadPlan
from cluster.training.models import checked_target
from cluster.training.options import MOST_SEED, Pattern, Resume, TextField
from drafter_service.acceptance_head import MOST_BLOCKS
from drafter_service.training.examples import FEEDS, FROM_TARGET, ExampleLaw

DEFAULT_MINUTES = 10.0
DEFAULT_BLOCKS = 1


def head(
    config: ConfigArgument = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text, a .jsonl file, or a folder of them: one kind of prompt. May be given several times."
        ),
    ] = None,
    target: TargetName = "",
    drafter: Annotated[str, typer.Option(help="The drafter's name. Default: the target's first.")] = "",
    pattern: Pattern = "*",
    field: TextField = "text",
    depth: Annotated[
        int, typer.Option(min=0, max=MOST_BLOCKS, help="Residual blocks of the head (D).")
    ] = DEFAULT_BLOCKS,
    tied: Annotated[bool, typer.Option("--tied", help="All blocks share one set of parameters.")] = False,
    w_rej: Annotated[
        float, typer.Option(min=0.1, max=100.0, help="Weight of rejections in the loss (SpecDec++: 1, 3, 6 or 12).")
    ] = 1.0,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Temperature of the answers; several times for several. Default: 0, 0.7 and 1."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Top-k of the sampled answers; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Top-p of the sampled answers; 1 is off.")] = 1.0,
    draws: Annotated[int, typer.Option(min=1, max=32, help="Draws of the noise at each position.")] = 4,
    feed: Annotated[
        str,
        typer.Option(help="What the drafter has read before a row: text (the target's tokens) or mixed (SpecDec++)."),
    ] = FEEDS[0],
    mixing: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of tokens that are the target's and have no loss (r).")
    ] = FROM_TARGET,
    minutes: Annotated[
        float | None, typer.Option(help="Time for the answers to train on. (default 10)", show_default=False)
    ] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Chunks of answers, in place of --minutes.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of weights, prompts and noise.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the head. Default: DRAFTER-head beside CONFIG.")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the head into the drafter's entry of CONFIG; the rest is unchanged.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: those of the target.")] = None,
    resume: Resume = True,
) -> None:
    """Train an acceptance head (SpecDec++): the chances that a drafter's guesses come true, for one target.

    The target answers prompts of your texts; the head learns which candidates of the drafter are the answers' tokens.
    It is calibrated and measured on held-out texts of each --data. Run the same command again to resume a run that was
    stopped or killed. OUT gets the head and its card; OUT.training has the rest and may be deleted afterwards.
    """
    checked = given_config(config)
    name = checked.target_named(target)
    own = checked.drafters_of(name)
    if not own or (drafter and drafter not in own):
        there = ", ".join(own) or "none"
        raise BadRequest("--drafter", f"{drafter!r} is not a drafter of {name}; there is {there}")
    drafter = drafter or own[0]
    if feed not in FEEDS:
        raise BadRequest("--feed", f"must be one of {', '.join(FEEDS)}, got {feed!r}")
    kinds = {path.name: DataSource((path,), pattern, field) for path in data or ()}
    if len(kinds) != len(data or ()) or not kinds:
        raise BadRequest("--data", "name at least one file or folder, each with another last part of its path")
    for source in kinds.values():
        source.files()  # missing texts are reported before anything is loaded
    fetched = fetched_model(f"targets.{name}", checked.targets[name])
    folder = Path.cwd() if config is None else config.resolve().parent
    plan = HeadPlan(
        target_name=name,
        target=fetched,
        facts=checked_target(name, fetched),
        drafter_name=drafter,
        drafter=fetched_model(f"drafters.{drafter}", checked.drafters[drafter]),
        kinds=kinds,
        law=ExampleLaw(warps_of(tuple(temperature or TEMPERATURES), top_k, top_p), draws, feed, mixing),
        blocks=depth,
        tied=tied,
        rejection_weight=w_rej,
        minutes=DEFAULT_MINUTES if minutes is None and chunks is None else minutes,
        chunks=chunks,
        seed=seed,
        out=out if out is not None else folder / f"{drafter}-head",
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        command=shlex.join(["dendro", *sys.argv[1:]]),
    )
    entry = _entry(plan, folder)
    if write:
        if config is None:
            raise BadRequest("--write", "needs a configuration to write to: name one")
        with_head(config.read_text(), drafter, entry)  # refused before anything is trained
    torch.set_num_threads(threads if threads is not None else plan.target.threads)
    logging.set_verbosity_error()  # the tokenizer warns of long texts, and our texts are long
    logging.disable_progress_bar()
    run = train_head(plan, resume)
    if write and config is not None:
        write_head_entry(config, drafter, entry)
    console = page()
    console.print(folding_table("Held out", HEADER, quality_rows(run.done.facts("export")["qualities"])))
    console.print(f"The head is {plan.file}, its card {CARD_FILE} beside it.", markup=False, soft_wrap=True)
    done = f"{config} has" if write else f"Add to drafters.{drafter}"
    console.print(f"{done}: head: {entry}. {plan.work} may be deleted.", markup=False, soft_wrap=True)


def _entry(plan: HeadPlan, folder: Path) -> str:
    """The head's path in a configuration of this folder."""
    file = plan.file.resolve()
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)
