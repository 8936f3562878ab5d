"""The report of `dendro bench context` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.bench.bookkeeping import LONG, SHORT
from cluster.bench.context import CHAIN, LIBRARY, OFF, READ_BYTES, TREE, WAYS
from cluster.measure.report import (
    Cells,
    Report,
    aims_table,
    figure_at,
    interval,
    machine_facts,
    medians,
    number,
    target_fact,
    with_interval,
)

COLOURS = {OFF: "#b8b8b8", CHAIN: "#5b8db8", TREE: "#2a7f62", LIBRARY: "#d98e04"}


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"{target_fact(plan['target'], plan)}, its last position raised to the longest context (its output there is "
        f"meaningless); {plan['repetitions']} repetitions, interleaved"
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
                *map(with_interval, times),
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
            interval(fit["slope_us_per_token"], 3),
            f"{fit['bytes_per_token']:,}",
            number(fit["read_gb_per_second"]),
            f"{fit['largest_residual']:.1%}",
        )
        for fit in report["fits"]
    ]
    yield "Fitted lines", lines, fits
    yield (
        "Bookkeeping of a round: loop, handles, proposers and peers' texts, without models",
        ("text", f"{SHORT:,} tokens, us", "90 %", f"{LONG:,} tokens, us", "90 %", "long over short", "90 %"),
        [
            (
                row["text"],
                f"{row['short_us']['median']:.0f}",
                interval(row["short_us"], 0),
                f"{row['long_us']['median']:.0f}",
                interval(row["long_us"], 0),
                f"{row['long_over_short']['median']:.2f}",
                interval(row["long_over_short"]),
            )
            for row in report["bookkeeping"]
        ],
    )
    yield aims_table(report)


def plot(report: Report, path: Path) -> None:
    """Milliseconds of a round over the tokens before it, with the fitted lines."""
    with figure_at(path, 1, 1, 7, 4.5) as ((axis,),):
        for fit in report["fits"]:
            mine = [row for row in report["rows"] if row["way"] == fit["way"]]
            contexts, colour = [row["context"] for row in mine], COLOURS[fit["way"]]
            middles, reach = medians(row["round_ms"] for row in mine)
            axis.errorbar(contexts, middles, reach, fmt="o", color=colour, label=fit["way"])
            slope = fit["slope_us_per_token"]["median"] / 1e3
            fitted = [fit["fixed_ms"] + slope * context for context in contexts]
            axis.plot(contexts, fitted, "-", color=colour, alpha=0.6)
        axis.set_xlabel("tokens before the round")
        axis.set_ylabel("time of a round (ms)")
        axis.set_title("time of a round by context length (median and 90 % interval)")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
