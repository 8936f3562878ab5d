"""`dendro bench tree-scan`: time one layer's trees in every way, and measure their memory."""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer
from dendro.errors import BadRequest
from transformers.utils import logging
from tree_kernels.tree_attention import NEAR_CHOICES

from cluster.bench.tree_scan import (
    BEAM_STEPS,
    BEAM_WIDTHS,
    SIZES,
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
from cluster.bench.tree_scan_report import facts_of, tables_of
from cluster.bench.tree_scan_report import plot as draw
from cluster.command_options import JsonFile
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import Default, MarkdownFile, PlotFile, present, seed_option, with_bars
from cluster.measure.targets import THREADS

REPETITIONS = Default(20, quick=5)


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
    begin: Begin,
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
        **report_head("tree-scan", started, True, seed, THREADS),
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


def bench_tree_scan(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds: binary trees alone, five repetitions.")
    ] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    size: Annotated[str, typer.Option(help="Published Mamba-2 model of the layer's size: 130m to 2.7b.")] = "130m",
    block: Annotated[
        int, typer.Option(help="Tokens of a block: 16, 32 or 64, at least the depth of the deepest tree.")
    ] = 16,
    repetitions: Annotated[int | None, REPETITIONS.option("Repetitions of each step.", least=1)] = None,
    seed: Annotated[int, seed_option("weights, inputs and beams")] = 0,
) -> None:
    """Time a tree in a state-space layer: packed, as a batch of its paths, and by transformers' chunk scan; and measure
    the memory of a model with trees, relative to plain decoding. Runs on the CPU, in this process.
    """
    repeated = REPETITIONS.chosen(repetitions, quick)
    published = parse_size(size)
    report = with_bars(lambda begin: run_tree_scan(published, block, repeated, quick, seed, begin))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw)
