"""`dendro bench tree-scan`: time one layer's trees in every way, and measure their memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from dendro.errors import BadRequest
from rich.console import Console
from transformers.utils import logging
from tree_kernels.tree_attention import NEAR_CHOICES

from cluster.bench.command import PLAIN_WIDTH, THREADS, Bars
from cluster.bench.machine import describe_machine, describe_run
from cluster.bench.report import Cells, Report, aims_table, machine_facts, show_tables, write_reports
from cluster.bench.tree_scan import (
    BEAM_STEPS,
    BEAM_WIDTHS,
    HEAD_ROWS,
    LIBRARY,
    NEWEST,
    PACKED,
    SIZES,
    UNROLLED,
    WAYS,
    ScanLayer,
    ScanMemory,
    ScanModelSize,
    aims_of,
    beams,
    binary,
    measure_tree_scan,
    model_memory,
    plain_of,
    rows_of_report,
    shapes_of,
)

REPETITIONS, QUICK_REPETITIONS = 20, 5
MIB = 2**20
COLOURS = {PACKED: "#2a7f62", UNROLLED: "#5b8db8", LIBRARY: "#d98e04", NEWEST: "#b23a48"}


def parse_size(text: str) -> ScanModelSize:
    """The sizes of a published model."""
    if text not in SIZES:
        raise BadRequest("size", f"{text!r} is none of {', '.join(SIZES)}")
    return SIZES[text]


def run_tree_scan(
    size: ScanModelSize,
    block: int,
    repetitions: int,
    quick: bool,
    seed: int,
    begin: Callable[[str, int], Callable[[], None]],
) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    if block not in NEAR_CHOICES:
        raise BadRequest("block", f"{block} is none of {', '.join(map(str, NEAR_CHOICES))}")
    torch.set_num_threads(THREADS)
    logging.set_verbosity_error()  # the library warns of missing kernels; the report states it
    shapes = shapes_of(quick, seed)
    layer = ScanLayer(size, block, max(shape.unrolled_rows for shape in shapes), seed)
    found, far = measure_tree_scan(layer, shapes, repetitions, begin(f"a layer of {size.name}", repetitions + 1))
    sizes = (size,) if quick else tuple(SIZES.values())
    trees = (binary(0), binary(5), beams(BEAM_STEPS[-1], BEAM_WIDTHS[-1], seed))
    step = begin("memory of models", len(sizes))
    memory = []
    for each in sizes:
        memory += model_memory(each, block, trees)
        step()
    rows = rows_of_report(found)
    return {
        "bench": "tree-scan",
        "machine": describe_machine(THREADS),
        "settings": describe_run(started, local=True, seed=seed),
        "plan": {
            "size": size.name,
            "heads": size.heads,
            "width": size.width,
            "groups": size.groups,
            "state": size.state,
            "layers": size.layers,
            "block": block,
            "ring_tokens": layer.root - block,
            "repetitions": repetitions,
            "largest_difference": far,
        },
        "rows": rows,
        "memory": [_memory(each, plain_of(memory, each)) for each in memory],
        "aims": aims_of(rows, memory),
    }


def _memory(each: ScanMemory, plain: ScanMemory) -> dict[str, Any]:
    return {
        "model": each.size,
        "step": each.name if each.rows > 1 else "plain decoding",
        "rows": each.rows,
        "weights_bytes": each.weights,
        "kept_bytes": each.kept,
        "scratch_bytes": each.scratch,
        "temporary_bytes": each.temporaries,
        "logits_bytes": each.logits,
        "total_bytes": each.total,
        "over_plain": round(each.total / plain.total, 4),
    }


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"One Mamba-2 layer of mamba2-{plan['size']}'s size, random weights: {plan['heads']} heads of {plan['width']}, "
        f"{plan['groups']} group, state width {plan['state']}; inputs in bfloat16, decays and sums in float32"
    )
    yield (
        f"The tree's root is {plan['ring_tokens']} tokens after the checkpoint, in blocks of {plan['block']}; "
        f"{plan['repetitions']} repetitions of everything, interleaved, after a warm-up"
    )
    yield (
        "Times are of the convolution and the scan, from the linear layer's output to y, in every way; without "
        "linear layers, folds, and the index lists that all layers of a step share"
    )
    yield (
        f"{PACKED}: each row of the tree once. {UNROLLED}: all rows of all paths from the root to a leaf, by the same "
        "kernels in one batch that reads the checkpoint once. Both are padded to 8 rows"
    )
    yield (
        f"{LIBRARY}: `mamba2_chunk_scan` in PyTorch over the paths as a batch, the ring's tokens in front, already "
        "convolved, in one chunk (the published 256 would pad each path to 256 tokens)"
    )
    yield (
        f"{NEWEST}: the same from a state after the text's last token: less work, for an engine that keeps such states "
        "and does not need the same bits in prefill, plain decoding and trees"
    )
    yield (
        "Before measuring: every packed row has the bits of the same row on its own path; the library's answers are "
        f"within {plan['largest_difference']:.1e} of ours, relative"
    )
    yield (
        "Temporaries: peak bytes of torch tensors allocated by the call, its result included, by torch.profiler; "
        "allocations of libraries outside torch are not counted"
    )
    yield (
        "Memory of a model: weights in bfloat16, embeddings counted once; one text's checkpoints and ring, for "
        "an engine whose deepest tree is this one; scratch for the rows of this step, padded to 8; the "
        "temporaries of a whole step, linear layers and float32 logits of "
        f"at most {HEAD_ROWS} rows at a time among them. Not counted: the engine's float32 copy of the head, the "
        "text states of its own checks, scratch and temporaries of prompts"
    )


def _spread(estimate: Any, digits: int = 2) -> str:
    return f"{estimate['median']:.{digits}f} ({estimate['low']:.{digits}f}-{estimate['high']:.{digits}f})"


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    rows = report["rows"]
    columns = ("tree", "rows", "paths", "rows unrolled", *(f"{way} ms" for way in WAYS))
    yield (
        "A layer's step, median and 90 %",
        columns,
        [
            (
                row["tree"],
                f"{row['rows']}",
                f"{row['paths']}",
                f"{row['unrolled_rows']}",
                *(_spread(row["ms"][way]) for way in WAYS),
            )
            for row in rows
        ],
    )
    others = tuple(way for way in WAYS if way != PACKED)
    yield (
        "Over packed, median and 90 % of paired ratios",
        ("tree", "rows", *others),
        [(row["tree"], f"{row['rows']}", *(_spread(row["over_packed"][way]) for way in others)) for row in rows],
    )
    yield (
        "Temporaries of a layer's step, MiB",
        ("tree", "rows", *WAYS),
        [
            (row["tree"], f"{row['rows']}", *(f"{row['temporary_bytes'][way] / MIB:.2f}" for way in WAYS))
            for row in rows
        ],
    )
    parts = ("weights", "kept", "scratch", "temporary", "logits", "total")
    yield (
        "Memory of a whole model and one text, MiB",
        (
            "model",
            "step",
            "rows",
            "weights",
            "checkpoints and ring",
            "scratch",
            "temporaries",
            "of them logits",
            "all",
            "over plain",
        ),
        [
            (
                each["model"],
                each["step"],
                f"{each['rows']}",
                *(f"{each[f'{part}_bytes'] / MIB:.2f}" for part in parts),
                f"{each['over_plain']:.3f}",
            )
            for each in report["memory"]
        ],
    )
    yield aims_table(report)


def plot(report: Report, path: Path) -> None:
    """Milliseconds of a step over a tree's rows, and the ratios of the other ways to packed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    rows = sorted(report["rows"], key=lambda row: row["rows"])
    counts = [row["rows"] for row in rows]
    for axis, key, ways in ((times, "ms", WAYS), (ratios, "over_packed", WAYS[1:])):
        for way in ways:
            found = [row[key][way] for row in rows]
            middles = [each["median"] for each in found]
            reach = [
                [each["median"] - each["low"] for each in found],
                [each["high"] - each["median"] for each in found],
            ]
            axis.errorbar(counts, middles, reach, fmt="o", color=COLOURS[way], label=way, alpha=0.8)
        axis.set_yscale("log")
        axis.set_xlabel("rows of the tree")
        axis.legend(frameon=False, fontsize=8)
    times.set_title("milliseconds of a layer's step (median, 90 % interval)")
    ratios.set_title("times as long as packed")
    ratios.axhline(1, color="black", linewidth=0.8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bench_tree_scan(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds: binary trees alone, five repetitions.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Write a plot; the suffix sets its format.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    size: Annotated[str, typer.Option(help="Published Mamba-2 model of the layer's size: 130m to 2.7b.")] = "130m",
    block: Annotated[
        int, typer.Option(help="Tokens of a block: 16, 32 or 64, at least the depth of the deepest tree.")
    ] = 16,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Repetitions of each step. (default 20; quick 5)", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, inputs and beams.")] = 0,
) -> None:
    """Time a tree in a state-space layer: packed, as a batch of its paths, and by transformers' chunk scan; and measure
    the memory of a model with trees, relative to plain decoding. Runs on the CPU, in this process.
    """
    repeated = repetitions if repetitions is not None else QUICK_REPETITIONS if quick else REPETITIONS
    bars = Bars(Console(stderr=True))
    with bars.progress:
        report = run_tree_scan(parse_size(size), block, repeated, quick, seed, bars.begin)
    console = Console()
    facts, tables = list(facts_of(report)), list(tables_of(report))
    show_tables(console if console.is_terminal else Console(width=PLAIN_WIDTH), facts, tables)
    write_reports(report, facts, tables, plot, json, markdown, plot_to)
