"""`dendro bench context`: load the engine and the library, measure both at growing contexts, report."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from dendro.errors import BadRequest

from cluster.bench.bookkeeping import BLOCKS, QUICK_BLOCKS, bookkeeping_aims, bookkeeping_rows, measure_bookkeeping
from cluster.bench.context import (
    CONTEXTS,
    LIBRARY,
    SPARE,
    WAYS,
    LibrarySteps,
    fit_of,
    measure_context,
    read_bandwidth,
    rows_of,
    with_positions,
)
from cluster.bench.context_report import facts_of, tables_of
from cluster.bench.context_report import plot as draw
from cluster.command_options import JsonFile
from cluster.config import DEMO_MODELS
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.in_process import verifier_of
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import Default, MarkdownFile, Models, PlotFile, numbers_in, present, with_bars
from cluster.measure.targets import THREADS, Which, parameter_count, target_config

LENGTHS = Default(CONTEXTS, quick=(256, 1024, 2048))
REPETITIONS = Default(15, quick=5)
PROMPT_TOKENS = 256


def parse_contexts(text: str) -> tuple[int, ...]:
    """Parse `256,1024`: at least two distinct integers, each at least 2."""
    return tuple(sorted(numbers_in("contexts", text, int, 2, count=2)))


async def run_context(
    name: str,
    contexts: tuple[int, ...],
    repetitions: int,
    blocks: int,
    models: Path,
    begin: Begin,
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
        length = contexts[-1] + SPARE
        async with verifier_of(name, target, length, checkpoint=checkpoint, device=device) as engine:
            step = begin(f"{name} target", len(contexts) * (repetitions + 1))
            lengths = await measure_context(engine, library, ids, contexts, repetitions, step)
    bookkeeping = await measure_bookkeeping(blocks, begin("bookkeeping", blocks + 1))
    layouts = engine.runner.target.layouts
    library_bytes = sum(each.kv_heads * (each.key_dim + each.value_dim) for each in layouts) * 2
    ours = engine.runner.target.token_bytes
    return {
        **report_head("context", started, True, 0, THREADS),
        "plan": {
            "target": name,
            "parameters": parameter_count(target.checkpoint),
            "dtype": target.dtype,
            "repetitions": repetitions,
        },
        "read_gb_per_second": round(read_bandwidth(device) / 1e9, 2),
        "rows": rows_of(lengths),
        "fits": [fit_of(lengths, way, library_bytes if way == LIBRARY else ours) for way in WAYS],
        "bookkeeping": bookkeeping_rows(bookkeeping),
        "aims": bookkeeping_aims(bookkeeping),
    }


def bench_context(
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: three lengths, five repetitions.")] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    target: Annotated[Which, typer.Option(help="The demo target, or the costly one made from it.")] = Which.COSTLY,
    contexts: Annotated[str | None, LENGTHS.option("Tokens, separated by commas.")] = None,
    repetitions: Annotated[int | None, REPETITIONS.option("Repetitions of each round.", least=1)] = None,
    models: Models = DEMO_MODELS,
) -> None:
    """Measure a round by context length: time, memory and the bytes that must be read, without speculation, with a
    chain and with a tree, beside transformers' own decoding step. The engine runs in this process. Then the bookkeeping
    of a round, without models, in a text of 100,000 tokens and one of 1,000.
    """
    if target not in (Which.DEMO, Which.COSTLY):
        raise BadRequest("target", "one at a time: demo or costly")
    found = parse_contexts(contexts) if contexts is not None else LENGTHS.at(quick)
    repeated = REPETITIONS.chosen(repetitions, quick)
    blocks = QUICK_BLOCKS if quick else BLOCKS
    report = with_bars(lambda begin: asyncio.run(run_context(target.value, found, repeated, blocks, models, begin)))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw)
