"""The report of `dendro bench kernels` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.bench.kernels import MULTIPLY, OURS, PACKED, PLAIN, READ
from cluster.measure.report import Cells, Report, aims_table, figure_at, machine_facts, medians, with_interval

COLOURS = {OURS: "#2a7f62", PLAIN: "#d98e04", PACKED: "#5b8db8", READ: "#b8b8b8", MULTIPLY: "#8c6bb1"}
BITS = {True: "the same", False: "DIFFERENT", None: "not compared"}


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"{plan['dtype']}, {plan['repetitions']} repetitions, interleaved; load average at the start "
        f"{plan['load']:.1f}; weights are read from memory: copies that no cache holds together take turns"
    )
    yield (
        "multiplying: the time of a product's multiply-adds at the rate of torch's float32 product of matrices in a "
        "cache, with the same threads"
    )
    if any(row["over_ours"] for table in report["products"] for row in table["rows"]):
        yield "Q4_1, Q8_0, Q4_K and Q6_K: ours with weights in these forms; results have the unpacked weights' bits"
    if plan["why_not_ours"]:
        yield f"Our products are not available: {plan['why_not_ours']}"


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    for table in report["products"]:
        ways = list(table["rows"][0]["ms"])
        cells = [
            (
                str(row["rows"]),
                *(with_interval(row["ms"][way]) for way in ways),
                with_interval(row["over_reading"]),
                with_interval(row["over_bound"]),
                with_interval(row["over_library"]),
                *map(with_interval, row["over_ours"].values()),
            )
            for row in table["rows"]
        ]
        title = (
            f"{table['inputs']} x {table['outputs']}; bits of a row for all numbers of rows: {BITS[table['same_bits']]}"
        )
        yield (
            title,
            (
                "rows",
                *(f"{way} ms" for way in ways),
                "ours over reading",
                "ours over the larger of reading and multiplying",
                "ours over the library's best",
                *(f"{form} over ours" for form in table["rows"][0]["over_ours"]),
            ),
            cells,
        )
    yield aims_table(report)


def plot(report: Report, path: Path) -> None:
    """Milliseconds of a product over its rows, one panel for each shape."""
    tables = report["products"]
    with figure_at(path, 1, len(tables), 4.5 * len(tables), 4) as (axes,):
        for axis, table in zip(axes, tables, strict=True):
            rows = [row["rows"] for row in table["rows"]]
            for way in table["rows"][0]["ms"]:
                middles, reach = medians(row["ms"][way] for row in table["rows"])
                axis.errorbar(rows, middles, reach, fmt="o-", color=COLOURS.get(way), label=way)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("rows")
            axis.set_ylabel("time of a product (ms)")
            axis.set_title(f"{table['inputs']} x {table['outputs']}")
            axis.legend(frameon=False, fontsize=8)
