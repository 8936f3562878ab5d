"""`dendro bench context`: load the engine and the library, measure both at growing contexts, report."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from dendro.errors import BadRequest
from rich.console import Console

from cluster.bench.bookkeeping import BLOCKS, QUICK_BLOCKS, bookkeeping_aim, bookkeeping_row, measure_bookkeeping
from cluster.bench.command import PLAIN_WIDTH, THREADS, Bars, Which, parameter_count, target_config
from cluster.bench.context import (
    CHAIN,
    LIBRARY,
    OFF,
    READ_BYTES,
    SPARE,
    TREE,
    WAYS,
    LibrarySteps,
    fit_of,
    measure_context,
    read_bandwidth,
    rows_of,
    with_positions,
)
from cluster.bench.machine import describe_machine, describe_run
from cluster.bench.report import Cells, Report, aims_table, machine_facts, show_tables, write_reports
from cluster.config import DEMO_MODELS
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

CONTEXTS, QUICK_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192), (256, 1024, 2048)
REPETITIONS, QUICK_REPETITIONS = 15, 5
PROMPT_TOKENS = 256
COLOURS = {OFF: "#b8b8b8", CHAIN: "#5b8db8", TREE: "#2a7f62", LIBRARY: "#d98e04"}


def parse_contexts(text: str) -> tuple[int, ...]:
    """Parse `256,1024`: at least two distinct integers, each at least 2."""
    try:
        found = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise BadRequest("contexts", f"{text!r} is not a list of numbers such as 256,1024") from None
    if len(found) < 2 or found[0] < 2 or len(set(found)) != len(found):
        raise BadRequest("contexts", f"{text!r}: name at least two, each at least 2 tokens and named once")
    return found


async def run_context(
    name: str,
    contexts: tuple[int, ...],
    repetitions: int,
    blocks: int,
    models: Path,
    begin: Callable[[str, int], Callable[[], None]],
) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    config = target_config(models, name)
    (target,) = config.targets.values()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(THREADS)
    prompts = held_out_prompts(-(-contexts[-1] // PROMPT_TOKENS), PROMPT_TOKENS, load_tokenizer(models), models)
    ids = [token for prompt in prompts for token in prompt.token_ids]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = with_positions(target.checkpoint, contexts[-1] + 2 * SPARE, Path(folder))
        library = LibrarySteps(checkpoint, target.dtype, device)
        engine = VerifierEngine.load(
            checkpoint,
            VerifierOptions(
                name=name,
                dtype=getattr(torch, target.dtype),
                device=device,
                threads=THREADS,
                max_length=contexts[-1] + SPARE,
                max_sessions=1,
                share_prefixes=False,
            ),
        )
        await engine.start()
        try:
            step = begin(f"{name} target", len(contexts) * (repetitions + 1))
            lengths = await measure_context(engine, library, ids, contexts, repetitions, step)
        finally:
            await engine.stop()
    bookkeeping = await measure_bookkeeping(blocks, begin("bookkeeping", blocks + 1))
    layouts = engine.runner.target.layouts
    library_bytes = sum(each.kv_heads * (each.key_dim + each.value_dim) for each in layouts) * 2
    ours = engine.runner.target.token_bytes
    return {
        "bench": "context",
        "machine": describe_machine(THREADS),
        "settings": describe_run(started, local=True, seed=0),
        "plan": {
            "target": name,
            "parameters": parameter_count(target.checkpoint),
            "dtype": target.dtype,
            "repetitions": repetitions,
        },
        "read_gb_per_second": round(read_bandwidth(device) / 1e9, 2),
        "rows": rows_of(lengths),
        "fits": [fit_of(lengths, way, library_bytes if way == LIBRARY else ours) for way in WAYS],
        "bookkeeping": bookkeeping_row(bookkeeping),
        "aims": [bookkeeping_aim(bookkeeping)],
    }


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"The {plan['target']} target: {plan['parameters']:,} parameters in {plan['dtype']}, its last position raised "
        f"to the longest context (its output there is meaningless); {plan['repetitions']} repetitions, interleaved"
    )
    yield (
        f"A sum over {READ_BYTES >> 20} MiB reads {report['read_gb_per_second']:.1f} GB/s here. Ours keeps keys and "
        "values in float32, the library in the weights' type"
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    contexts = dict.fromkeys(row["context"] for row in report["rows"])
    rows = {(row["way"], row["context"]): row for row in report["rows"]}
    columns: tuple[str, ...] = (
        "context",
        *(f"{way} ms" for way in WAYS),
        "memory of a text MiB",
        "prefill ms per token",
    )
    cells: list[tuple[str, ...]] = []
    for context in contexts:
        times = [rows[way, context]["round_ms"] for way in WAYS]
        own = rows[OFF, context]
        cells.append(
            (
                f"{context:,}",
                *(f"{each['median']:.2f} ({each['low']:.2f}-{each['high']:.2f})" for each in times),
                f"{own['session_bytes'] / 2**20:.1f}",
                f"{own['prefill_ms_per_token']:.3f}",
            )
        )
    yield "A round, median and 90 %", columns, cells
    lines = ("", "fixed ms", "us per token", "90 %", "bytes per token", "GB/s", "largest residual")
    fits: list[tuple[str, ...]] = [
        (
            fit["way"],
            f"{fit['fixed_ms']:.2f}",
            f"{fit['slope_us_per_token']['median']:.3f}",
            f"{fit['slope_us_per_token']['low']:.3f}-{fit['slope_us_per_token']['high']:.3f}",
            f"{fit['bytes_per_token']:,}",
            "" if fit["read_gb_per_second"] is None else f"{fit['read_gb_per_second']:.2f}",
            f"{fit['largest_residual']:.1%}",
        )
        for fit in report["fits"]
    ]
    yield "Fitted lines", lines, fits
    spent = report["bookkeeping"]
    ratio = spent["long_over_short"]
    yield (
        "Bookkeeping of a round: loop, handles, proposers and peers' texts, without models",
        ("tokens of the text", "us", "90 %", "over the shortest", "90 %"),
        [
            (
                f"{int(tokens):,}",
                f"{each['median']:.0f}",
                f"{each['low']:.0f}-{each['high']:.0f}",
                f"{ratio['median']:.2f}" if number else "",
                f"{ratio['low']:.2f}-{ratio['high']:.2f}" if number else "",
            )
            for number, (tokens, each) in enumerate(spent["round_us"].items())
        ],
    )
    yield aims_table(report)


def plot(report: Report, path: Path) -> None:
    """Milliseconds of a round over the tokens before it, with the fitted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for fit in report["fits"]:
        mine = [row for row in report["rows"] if row["way"] == fit["way"]]
        contexts, colour = [row["context"] for row in mine], COLOURS[fit["way"]]
        times = [row["round_ms"] for row in mine]
        spread = [[each["median"] - each["low"] for each in times], [each["high"] - each["median"] for each in times]]
        axis.errorbar(contexts, [each["median"] for each in times], spread, fmt="o", color=colour, label=fit["way"])
        slope = fit["slope_us_per_token"]["median"] / 1e3
        axis.plot(contexts, [fit["fixed_ms"] + slope * context for context in contexts], "-", color=colour, alpha=0.6)
    axis.set_xlabel("tokens before the round")
    axis.set_title("milliseconds of a round (median, 90 % interval)")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bench_context(
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: three lengths, five repetitions.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Write a plot; the suffix sets its format.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    target: Annotated[Which, typer.Option(help="The demo target, or the costly one made from it.")] = Which.COSTLY,
    contexts: Annotated[
        str | None,
        typer.Option(help="Tokens, separated by commas. (default 256 to 8192, doubling; quick 256,1024,2048)"),
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Repetitions of each round. (default 15; quick 5)", show_default=False)
    ] = None,
    models: Annotated[Path, typer.Option(help="Folder written by `dendro train demo`.")] = DEMO_MODELS,
) -> None:
    """Measure a round by context length: time, memory and the bytes that must be read, without speculation, with a
    chain and with a tree, beside transformers' own decoding step. The engine runs in this process. Then the bookkeeping
    of a round, without models, in a text of 100,000 tokens and one of 1,000.
    """
    if target not in (Which.DEMO, Which.COSTLY):
        raise BadRequest("target", "one at a time: demo or costly")
    found = parse_contexts(contexts) if contexts is not None else QUICK_CONTEXTS if quick else CONTEXTS
    repeated = repetitions if repetitions is not None else QUICK_REPETITIONS if quick else REPETITIONS
    bars = Bars(Console(stderr=True))
    with bars.progress:
        blocks = QUICK_BLOCKS if quick else BLOCKS
        report = asyncio.run(run_context(target.value, found, repeated, blocks, models, bars.begin))
    console = Console()
    facts, tables = list(facts_of(report)), list(tables_of(report))
    show_tables(console if console.is_terminal else Console(width=PLAIN_WIDTH), facts, tables)
    write_reports(report, facts, tables, plot, json, markdown, plot_to)
