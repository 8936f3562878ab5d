"""`dendro train drafter`: the options, and the lines for the configuration."""

from __future__ import annotations

import os

# Set before torch is imported: idle OpenMP threads must not spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from dendro.errors import BadRequest
from rich.console import Console
from transformers.utils import logging

from cluster.command_options import ConfigArgument, TargetName, given_config
from cluster.config import TargetConfig
from cluster.hub import fetched_model
from cluster.prompt_files import tokenizer_of
from cluster.training.adding import entry_line, with_drafter, write_drafter
from cluster.training.data import DataSource
from cluster.training.drafter import train_drafter
from cluster.training.models import checked_target, start_from
from cluster.training.openings import read_openings
from cluster.training.options import MOST_SEED, Pattern, Resume, TextField
from cluster.training.plan import LABELS, DrafterPlan, Length
from drafter_service.training.batches import DRAFTER_ROWS
from drafter_service.training.sizes import SIZES, STUDENT_KINDS, StudentKind, StudentSize
from drafter_service.training.together import train_together

DEFAULT_MINUTES = 30.0


def size_of(kind: StudentKind, name: str | None, layers: int | None, width: int | None) -> StudentSize:
    """The size of a new drafter, by name (default: tiny) or by numbers. Raises BadRequest, naming the option."""
    if layers is None and width is None:
        if (name or "tiny") not in SIZES[kind]:
            raise BadRequest("--size", f"must be one of {', '.join(SIZES[kind])}, got {name!r}")
        return SIZES[kind][name or "tiny"]
    if layers is None or width is None:
        raise BadRequest("--layers", "and --width belong together")
    if name is not None:
        raise BadRequest("--size", "cannot be given together with --layers and --width")
    try:
        return StudentSize(width, layers)
    except ValueError as error:
        raise BadRequest("--width", str(error)) from error


def drafter_entry(plan: DrafterPlan, folder: Path) -> dict[str, Any]:
    """The drafter's entry in a configuration of this folder."""
    out, target = plan.out.resolve(), plan.target
    inside = out.is_relative_to(folder)
    entry: dict[str, Any] = {"checkpoint": str(out.relative_to(folder) if inside else out)}
    entry |= {"targets": [plan.target_name], "dtype": target.dtype, "threads": target.threads}
    resources: dict[str, float] = {"cpu": target.resources.cpu}
    if target.resources.gpu:
        resources["gpu"] = target.resources.gpu
    return entry | {"resources": resources}


def drafter(
    config: ConfigArgument = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A text, a .jsonl file, or a folder of them. May be given several times."),
    ] = None,
    openings: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines; each `opening` begins questions that the target asks itself.", show_default=False
        ),
    ] = None,
    target: TargetName = "",
    pattern: Pattern = "*",
    field: TextField = "text",
    kind: Annotated[
        str | None, typer.Option(help="mamba, mamba2 or llama. (default mamba2)", show_default=False)
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=256,
            help="Tokens that a new drafter guesses, the target's likeliest. (default: all)",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="tiny, 30m, 130m or 370m. (default tiny)", show_default=False)
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers, beside --width, in place of --size.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width, beside --layers.")] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Continue a checkpoint: a folder, or a name on the hub. Its vocabulary becomes the target's.",
        ),
    ] = None,
    from_tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer of --from, where its folder has none.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for labels and training. (default 30)", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the distillation, in place of --minutes.")] = None,
    pretrain: Annotated[float, typer.Option(help="Share of the training on text alone, before the labels.")] = 0.0,
    labels: Annotated[
        str,
        typer.Option(help="disk: the target labels before the training, each label is used often. fly: during it."),
    ] = "disk",
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step, of all GPUs together.")] = DRAFTER_ROWS,
    row_tokens: Annotated[int, typer.Option(min=32, help="Tokens of a row of training.")] = 256,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of weights and of texts.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint. Default: TARGET-KIND beside CONFIG.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the drafter's entry into CONFIG; the rest is unchanged.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. (default: all of the machine)", show_default=False)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that train together. (default: one a GPU)", show_default=False),
    ] = None,
    resume: Resume = True,
    fuse: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile forwards, where a C++ compiler is installed.")
    ] = True,
) -> None:
    """Train a drafter for a target on your texts, and print its entry for the configuration.

    The target labels the texts, and text that it writes itself; the drafter, a new one or one to continue, is distilled
    from these labels. Run the same command again to resume a run that was stopped or killed. OUT gets an ordinary
    checkpoint with a card; OUT.training has the rest and may be deleted afterwards. Uses all GPUs of the machine.
    """
    checked = given_config(config)
    name = checked.target_named(target)
    plan = _plan(
        name,
        fetched_model(f"targets.{name}", checked.targets[name]),
        DataSource(tuple(data or ()), pattern, field),
        openings,
        kind,
        (size, layers, width),
        start,
        from_tokenizer,
        Length(DEFAULT_MINUTES if minutes is None and steps is None else minutes, steps, pretrain),
        labels,
        vocabulary,
        (rows, row_tokens),
        seed,
        fuse,
    )
    gpus = torch.cuda.device_count()
    if processes is None:
        processes = max(1, gpus)
    elif gpus and processes > gpus:
        raise BadRequest("--processes", f"must be at most the {gpus} GPUs of the machine, got {processes}")
    if rows % processes:
        raise BadRequest("--rows", f"must be a multiple of the {processes} processes, got {rows}")
    folder = Path.cwd() if config is None else config.resolve().parent
    plan = replace(plan, out=out if out is not None else folder / f"{name}-{plan.kind}")
    if not plan.out.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise BadRequest("--out", f"the name {plan.out.name!r} may have letters, digits, '-', '_' and '.'")
    entry = drafter_entry(plan, folder)
    if write:
        if config is None:
            raise BadRequest("--write", "needs a configuration to write to: name one")
        with_drafter(config.read_text(), plan.out.name, entry)  # refused before anything is trained
    if processes == 1:
        train_quietly(None, plan, resume, threads or torch.get_num_threads())
    else:
        each = max(1, (threads or torch.get_num_threads()) // processes)
        train_together(processes, train_quietly, plan, resume, each)
    if write and config is not None:
        write_drafter(config, plan.out.name, entry)
    _show_result(plan, config, entry, write)


def train_quietly(processes: Accelerator | None, plan: DrafterPlan, resume: bool, threads: int) -> None:
    """Train with so many CPU threads, in this process or as one of several, without the libraries' own messages."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()  # the tokenizer warns of long texts, and our texts are long
    logging.disable_progress_bar()
    if processes is not None:
        plan = replace(plan, device=processes.device)
    train_drafter(plan, resume, processes=processes)


def _plan(
    name: str,
    target: TargetConfig,
    source: DataSource,
    openings: Path | None,
    kind: str | None,
    size: tuple[str | None, int | None, int | None],
    start: Path | None,
    from_tokenizer: Path | None,
    length: Length,
    labels: str,
    vocabulary: int | None,
    rows: tuple[int, int],
    seed: int,
    fuse: bool,
) -> DrafterPlan:
    facts = checked_target(name, target)
    source.files()  # missing texts are reported before anything is loaded
    wanted, begun = kind or "mamba2", None
    if start is not None:
        if kind is not None or size != (None, None, None):
            raise BadRequest("--from", "has the kind and the size: leave out --kind, --size, --layers and --width")
        if vocabulary is not None:
            raise BadRequest("--vocabulary", "is of a new drafter; --from has its own")
        begun = start_from(start, from_tokenizer, facts)
        wanted = begun.facts.model_type
    elif from_tokenizer is not None:
        raise BadRequest("--from-tokenizer", "belongs to --from")
    found = next((each for each in STUDENT_KINDS if each == wanted), None)
    if found is None:
        raise BadRequest("--kind", f"must be one of {', '.join(STUDENT_KINDS)}, got {wanted!r}")
    labelling = next((each for each in LABELS if each == labels), None)
    if labelling is None:
        raise BadRequest("--labels", f"must be one of {', '.join(LABELS)}, got {labels!r}")
    if vocabulary is not None and labelling == "fly":
        raise BadRequest("--vocabulary", "is chosen by labels on disk: leave out --labels fly")
    return DrafterPlan(
        target_name=name,
        target=target,
        facts=facts,
        source=source,
        kind=found,
        size=size_of(found, *size) if begun is None else None,
        start=begun,
        length=length,
        row_tokens=rows[1],
        seed=seed,
        out=Path(),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        compile_forward=fuse,
        command=shlex.join(["dendro", *sys.argv[1:]]),
        labels=labelling,
        vocabulary=vocabulary,
        rows=rows[0],
        openings=() if openings is None else read_openings(openings, tokenizer_of(target, name)),
    )


def _show_result(plan: DrafterPlan, config: Path | None, entry: dict[str, Any], written: bool) -> None:
    named = "CONFIG" if config is None else str(config)
    lines = [
        f"The drafter is in {plan.out}, with its card. {'Written into' if written else 'Add to'} {named}:",
        f"\ndrafters:\n  {plan.out.name}: {entry_line(entry)}\n",
        f"Then `dendro tune {named} --target {plan.target_name} --write` finds its trees, and `dendro serve {named}` "
        f"serves it. {plan.work} may be deleted.",
    ]
    console = Console(highlight=False)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
