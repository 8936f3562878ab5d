"""The findings of `dendro bench load` for people and for machines. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.bench.load import PERCENTILES, WAYS
from cluster.bench.report import Cells, Report, aims_table, machine_facts

COLUMNS = (
    "",
    "tokens/s",
    "90 %",
    "over off",
    *(f"first token ms p{p}" for p in PERCENTILES),
    *(f"between tokens ms p{p}" for p in PERCENTILES),
    "guesses per token",
    "left out",
    "pages at most",
    "step overhead",
)
COLOURS = {"off": "#b8b8b8", WAYS[1]: "#d98e04", "auto": "#2a7f62"}


def facts_of(report: Report) -> Iterator[str]:
    """What the figures rest on, a line each."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"The costly target: {plan['parameters']:,} parameters in {plan['dtype']}, drafted for by {plan['drafter']}; "
        f"answers of {plan['tokens']} tokens after prompts of {plan['prompt_tokens']}, greedy; closed loops of "
        f"{plan['answers']} answers for each client, open loops of {plan['requests']} requests; "
        f"{plan['repetitions']} repetitions, interleaved"
    )
    for name, why in report["silent"].items():
        yield f"{name} could not be measured: {why}"


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    for load in dict.fromkeys(row["load"] for row in report["rows"]):
        yield load, COLUMNS, [_cells(row) for row in report["rows"] if row["load"] == load]
    yield aims_table(report)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    rate, over = row["tokens_per_second"], row.get("over_off")
    first, between = row["first_token_ms"], row["between_tokens_ms"]
    return (
        row["name"],
        f"{rate['median']:.1f}",
        f"{rate['low']:.1f}-{rate['high']:.1f}",
        f"{over['median']:.2f} ({over['low']:.2f}-{over['high']:.2f})" if over else "1",
        *(f"{first[f'p{p}']:.0f}" if first else "" for p in PERCENTILES),
        *(f"{between[f'p{p}']:.1f}" if between else "" for p in PERCENTILES),
        *(str(row.get(key, "")) for key in ("guesses_per_token", "trimmed_per_token", "pages_held_at_most")),
        f"{row['step_overhead']:.1%}" if row.get("step_overhead") is not None else "",
    )


def plot(report: Report, path: Path) -> None:
    """Tokens per second, and the wait between tokens, over the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if "client" in row["load"]]
    figure, (rates, waits) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        clients = [int(row["load"].split()[0]) for row in mine]
        found = [row["tokens_per_second"] for row in mine]
        colour = COLOURS.get(name)
        style = "-" if name in WAYS else "--"
        rates.plot(clients, [each["median"] for each in found], style, marker="o", color=colour, label=name)
        rates.fill_between(clients, [e["low"] for e in found], [e["high"] for e in found], color=colour, alpha=0.2)
        if name in WAYS:
            middle = [row["between_tokens_ms"]["p50"] for row in mine]
            late = [row["between_tokens_ms"]["p99"] for row in mine]
            waits.plot(clients, middle, "-", marker="o", color=colour, label=f"{name}, p50")
            waits.plot(clients, late, ":", marker="o", color=colour, label=f"{name}, p99")
    for axis, title in ((rates, "tokens per second (median, 90 % interval)"), (waits, "milliseconds between tokens")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("clients")
        axis.set_title(title)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
