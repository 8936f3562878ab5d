"""The report of `dendro bench load` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.measure.load import PERCENTILES, WAYS
from cluster.measure.measurement import BATCH, CONTINUOUS
from cluster.measure.report import (
    Cells,
    Report,
    aims_table,
    figure_at,
    interval,
    machine_facts,
    target_fact,
    with_interval,
)
from cluster.measure.speed_report import whose_prompts

COLUMNS = (
    "",
    "tokens/s",
    "90 %",
    "over off",
    *(f"first token ms p{p}" for p in PERCENTILES),
    *(f"between tokens ms p{p}" for p in PERCENTILES),
    "guesses per token",
    "left out",
    "pages in use",
    "step overhead",
    "router ms a round",
    "hop ms",
    "rounds by shape",
)
COLOURS = {"off": "#b8b8b8", WAYS[1]: "#d98e04", "auto": "#2a7f62"}


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan, check = report["plan"], report["identity"]
    agreed = f"{len(check['differences'])} differ" if check["differences"] else "all identical"
    yield (
        f"Each answer compared with the first one to its prompt: {check['answers_compared']} answers, "
        f"{check['tokens_compared']:,} tokens, {agreed}"
    )
    answers = f"answers of {plan['tokens']} tokens after prompts of {plan['prompt_tokens']}"
    if "prompt_file" in plan:
        answers = f"answers up to their ends, of at most {plan['tokens']} tokens; {whose_prompts(plan)}"
    if "pairs" in plan:
        yield (
            f"{target_fact(plan['target'], plan)}, drafter {plan['drafter']}; {answers}; closed loops of "
            f"{plan['answers']} answers for each client; "
            f"{plan['pairs']} pairs of blocks or more in alternating order at each load, from a fresh router"
        )
        return
    yield (
        f"{target_fact(plan['target'], plan)}, drafter {plan['drafter']}; "
        f"{answers}, greedy; closed loops of "
        f"{plan['answers']} answers for each client, open loops of {plan['requests']} requests; "
        f"{plan['repetitions']} repetitions, interleaved; {CONTINUOUS} in {plan['continuous_repetitions']} of them"
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
        interval(rate, 1),
        with_interval(over) or "1",
        *(f"{first[f'p{p}']:.0f}" if first else "" for p in PERCENTILES),
        *(f"{between[f'p{p}']:.1f}" if between else "" for p in PERCENTILES),
        *(str(row.get(key, "")) for key in ("guesses_per_token", "trimmed_per_token", "pages_in_use")),
        f"{row['step_overhead']:.1%}" if row.get("step_overhead") is not None else "",
        f"{row['router_ms']['median']:.2f} ({interval(row['router_ms'], 2)})" if "router_ms" in row else "",
        f"{row['hop_us'] / 1e3:.3f}" if row.get("hop_us") else "",
        ", ".join(f"{share:.0%} {name}" for name, share in row.get("shapes", {}).items()),
    )


def plot(report: Report, path: Path) -> None:
    """Tokens per second and the wait between tokens over the number of clients; the waits over the rate of arrival."""
    closed = [row for row in report["rows"] if "client" in row["load"]]
    arriving = [row for row in report["rows"] if "client" not in row["load"]]
    with figure_at(path, 2, 2, 11, 9) as ((rates, between), (open_first, open_between)):
        for name in dict.fromkeys(row["name"] for row in closed):
            mine = [row for row in closed if row["name"] == name]
            clients, found = _loads(mine), [row["tokens_per_second"] for row in mine]
            colour, style = COLOURS.get(name), "--" if name in (BATCH, CONTINUOUS) else "-"
            rates.plot(clients, [each["median"] for each in found], style, marker="o", color=colour, label=name)
            rates.fill_between(clients, [e["low"] for e in found], [e["high"] for e in found], color=colour, alpha=0.2)
        _plot_waits(between, closed, "between_tokens_ms")
        _plot_waits(open_first, arriving, "first_token_ms")
        _plot_waits(open_between, arriving, "between_tokens_ms")
        for axis, title, below in (
            (rates, "tokens per second (median and 90 % interval)", "clients"),
            (between, "time between tokens (ms)", "clients"),
            (open_first, "time to first token (ms)", "rate of arrivals (share of capacity)"),
            (open_between, "time between tokens (ms)", "rate of arrivals (share of capacity)"),
        ):
            axis.set_title(title)
            axis.set_xlabel(below)
            if below == "clients":
                axis.set_xscale("log", base=2)
            axis.legend(frameon=False, fontsize=8)


def _loads(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The number of clients, or the share of the capacity."""
    return [float(row["load"].split()[0]) for row in rows]


def _plot_waits(axis: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """The median and the 99th percentile of our ways over the load."""
    for name in dict.fromkeys(row["name"] for row in rows if row["name"] not in (BATCH, CONTINUOUS)):
        mine = [row for row in rows if row["name"] == name]
        for percentile, style in (("p50", "-"), ("p99", ":")):
            values = [row[key][percentile] for row in mine]
            axis.plot(_loads(mine), values, style, marker="o", color=COLOURS[name], label=f"{name}, {percentile}")
