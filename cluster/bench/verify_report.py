"""The report of `dendro bench verify` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.bench.verify import by_temperature
from cluster.measure.report import (
    Cells,
    Report,
    aims_table,
    figure_at,
    machine_facts,
    medians,
    target_fact,
    with_interval,
)

COLOURS = {"coupled": "#2a7f62", "multi-step": "#b23a48", "block": "#e09f3e", "naive": "#8c8c8c"}


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"{target_fact(plan['target'], plan)}; drafter {plan['drafter']} in {plan['drafter_dtype']}; "
        f"{plan['prompts']} held-out prompts of {plan['prompt_tokens']} tokens of each kind "
        f"({', '.join(plan['kinds'])}), answers of {plan['tokens']} tokens, {plan['repetitions']} to each prompt, with "
        "seeds of their own"
    )
    yield (
        "Every round drafts the whole tree, and verifies it. Medians over answers; ratios are paired by prompt and "
        "seed; in parentheses the 90 % interval. Prompts are not timed"
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """A table of each temperature, then the aims."""
    columns = (
        "mode", "children", "tree", "rounds", "emitted per round", "over coupled", "tokens/s", "over coupled's",
    )  # fmt: skip
    for temperature, rows in by_temperature(report["rows"]).items():
        cells: list[tuple[str, ...]] = [
            (
                row["mode"],
                str(row["children"]),
                row["shape"],
                str(row["rounds"]),
                with_interval(row["emitted_per_round"]),
                with_interval(row["emitted_over_coupled"]),
                with_interval(row["tokens_per_s"], 0),
                with_interval(row["speed_over_coupled"]),
            )
            for row in rows
        ]
        yield f"Temperature {temperature:g}", columns, cells
    yield aims_table(report)


def plot(report: Report, path: Path) -> None:
    """Emitted tokens per round by children, a panel for each temperature."""
    groups = by_temperature(report["rows"])
    with figure_at(path, 1, len(groups), 5.0 * len(groups), 3.6) as axes:
        for axis, (temperature, rows) in zip(axes[0], groups.items(), strict=True):
            for mode in dict.fromkeys(row["mode"] for row in rows):
                mine = [row for row in rows if row["mode"] == mode]
                centre, bars = medians(row["emitted_per_round"] for row in mine)
                children = [row["children"] for row in mine]
                axis.errorbar(children, centre, bars, marker="o", capsize=3, label=mode, color=COLOURS[mode])
            axis.set_title(f"temperature {temperature:g}")
            axis.set_xlabel("children of a row")
            axis.set_ylabel("emitted tokens per round")
            axis.set_xticks(sorted({row["children"] for row in rows}))
            axis.legend()
