"""`dendro bench kernels`: measure the products of a decode step, report."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import torch
import typer
from dendro.errors import BadRequest
from tree_kernels.matmul import why_not_packed

from cluster.bench.kernels import SHAPES, aims_of, measure_products, products_of, rows_agree
from cluster.bench.kernels_report import facts_of, tables_of
from cluster.bench.kernels_report import plot as draw
from cluster.command_options import JsonFile
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import Default, MarkdownFile, PlotFile, numbers_in, present, with_bars

REPETITIONS = Default(21, quick=5)
ROWS = Default((1, 2, 4, 8, 16, 32, 64, 128), quick=(1, 8, 32))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def run_kernels(
    rows: tuple[int, ...], repetitions: int, dtype: str, threads: int, begin: Begin, shapes: Any = SHAPES
) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started, load = time.monotonic(), os.getloadavg()[0]
    torch.set_num_threads(threads)
    tables = []
    for inputs, outputs in shapes:
        step = begin(f"{inputs} x {outputs}", len(rows))
        products = products_of(inputs, outputs, DTYPES[dtype], threads)
        x = torch.randn(rows[-1], inputs, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
        tables.append(
            {
                "inputs": inputs,
                "outputs": outputs,
                "same_bits": rows_agree(products, rows, x),
                "rows": list(measure_products(products, rows, repetitions, x, step)),
            }
        )
    plan = {"dtype": dtype, "repetitions": repetitions, "load": load, "why_not_ours": why_not_packed()}
    head = report_head("kernels", started, True, 0, threads)
    return {**head, "plan": plan, "products": tables, "aims": aims_of(tables)}


def bench_kernels(
    quick: Annotated[bool, typer.Option("--quick", help="1, 8 and 32 rows, five repetitions.")] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    rows: Annotated[str | None, ROWS.option("Numbers of rows, separated by commas.")] = None,
    repetitions: Annotated[int | None, REPETITIONS.option("Repetitions of each product.", least=1)] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and rows: bfloat16, float16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of a product.")] = 2,
) -> None:
    """Measure products of few rows on this processor: ours, torch's plain and packed ones, and the times to read the
    weights and to multiply. Weights come from memory, not from a cache. Reports whether a row's bits depend on the
    number of rows.
    """
    if dtype not in DTYPES:
        raise BadRequest("dtype", f"must be one of {', '.join(DTYPES)}; got {dtype!r}")
    counts = tuple(sorted(numbers_in("rows", rows, int, 1))) if rows is not None else ROWS.at(quick)
    repeated = REPETITIONS.chosen(repetitions, quick)
    report = with_bars(lambda begin: run_kernels(counts, repeated, dtype, threads, begin))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw)
