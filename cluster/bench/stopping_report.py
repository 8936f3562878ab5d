"""The report of `dendro bench stopping` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.measure.report import (
    Cells,
    Report,
    aims_table,
    figure_at,
    machine_facts,
    number,
    target_fact,
    with_interval,
)

RULES = {"length": "fixed length", "h": "fixed h", "marginal": "marginal rule"}
COLOURS = {"length": "#8c8c8c", "h": "#2a7f62", "marginal": "#b23a48"}


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    forms = " and ".join(f"{name}s within {shape}" for name, shape in plan["forms"].items())
    yield (
        f"{target_fact(plan['target'], plan)}; "
        f"{plan['prompts']} held-out prompts of {plan['prompt_tokens']} tokens of each kind "
        f"({', '.join(plan['kinds'])}), answers of {plan['tokens']} tokens"
    )
    yield (
        f"Drafts of {plan['drafter']} in {plan['drafter_dtype']}: {forms}, recorded once at every position of the "
        "answers; every rule is replayed on them. Discard rate: guesses discarded per emitted token; verification "
        "rate: verifications per emitted token. The marginal rule is judged in its second pass over the answers"
    )
    yield (
        "Tokens per second are predicted: tokens over the round times of measured costs, without router, hops and "
        f"queues. Costs are medians of {plan['repetitions']}, interleaved, in one process. A chain of fixed length is "
        "drafted in one call for all levels, where the drafter is fused; a draft that may stop takes a call a level"
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    yield _compared(report)
    rows = report["rows"]
    for form, temperature in dict.fromkeys((row["form"], row["temperature"]) for row in rows):
        mine = [row for row in rows if (row["form"], row["temperature"]) == (form, temperature)]
        yield _rates(form, temperature, mine)
    if report["live"]:
        yield _live(report)
    yield from _costs(report)
    yield aims_table(report)


def _compared(report: Report) -> Cells:
    columns = (
        "",
        "closest length's verifications over the sweep's",
        "best h",
        "tokens/s",
        "best length",
        "tokens/s",
        "marginal rule, tokens/s",
        "over the best h",
        "by prompt",
    )
    cells: list[tuple[str, ...]] = [
        (
            f"{row['form']}, {row['kind']}, {row['temperature']:g}",
            f"{row['front_over_closest']:.3f} (length {row['closest_length']}, {row['lengths_compared']} compared)",
            f"{row['best_h']:g}",
            number(row["best_h_tokens_per_second"], 1),
            str(row["best_length"]),
            number(row["best_length_tokens_per_second"], 1),
            number(row["marginal_tokens_per_second"], 1),
            number(row["marginal_over_best_h"], 3),
            with_interval(row["marginal_by_prompt"], 3),
        )
        for row in report["compared"]
    ]
    return "Fixed lengths, the sweep of h and the marginal rule", columns, cells


def _rates(form: str, temperature: float, rows: Sequence[Mapping[str, Any]]) -> Cells:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    found = {(row["rule"], row["value"], row["kind"]): row for row in rows}
    columns = ("", "", *(f"{kind}: discard / verification / tokens/s" for kind in kinds))
    cells: list[tuple[str, ...]] = []
    for rule, value in dict.fromkeys((row["rule"], row["value"]) for row in rows):
        each = (found[rule, value, kind] for kind in kinds)
        values = (
            f"{row['discard_rate']:.3f} / {row['verification_rate']:.3f} / {row['tokens_per_second']:.1f}"
            for row in each
        )
        cells.append((RULES[rule], value, *values))
    return f"Every rule: {form}s, temperature {temperature:g}", columns, cells


def _live(report: Report) -> Cells:
    columns = ("", "", "rounds", "emitted per round", "tokens/s in real time", "over off")
    cells: list[tuple[str, ...]] = [
        (
            f"{row['temperature']:g}",
            row["arm"],
            str(row["rounds"]),
            f"{row['emitted_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            with_interval(row["over_off"], 3),
        )
        for row in report["live"]
    ]
    return "In real time: drafter and verifier in this process, without a router; the arms take turns", columns, cells


def _costs(report: Report) -> Iterator[Cells]:
    """Drafts by their levels, then steps by their rows: a line for each temperature."""
    for title, steps in (("Drafts in ms by levels", False), ("Steps in ms by rows", True)):
        lines: dict[str, dict[int, float]] = {}
        for row in report["costs"]:
            if (row["what"] == "verifier step") is steps:
                lines.setdefault(f"{row['what']}, {row['temperature']:g}", {})[row["count"]] = row["ms"]
        counts = sorted({count for found in lines.values() for count in found})
        cells: list[tuple[str, ...]] = [
            (name, *(number(found.get(count), 1 if steps else 2) for count in counts)) for name, found in lines.items()
        ]
        yield title, ("", *map(str, counts)), cells


def plot(report: Report, path: Path) -> None:
    """Verification rate by discard rate (SpecDec++, Figure 3): a row for each form and temperature, a column a kind."""
    rows = report["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = list(dict.fromkeys((row["form"], row["temperature"]) for row in rows))
    with figure_at(path, len(lines), len(kinds), 4.6 * len(kinds), 3.6 * len(lines)) as axes:
        for line, (form, temperature) in enumerate(lines):
            for column, kind in enumerate(kinds):
                axis = axes[line][column]
                at = (form, temperature, kind)
                _plot_rates(axis, [row for row in rows if (row["form"], row["temperature"], row["kind"]) == at])
                axis.set_title(f"{form}s, {kind}, temperature {temperature:g}", fontsize=9)


def _plot_rates(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for rule, label in RULES.items():
        mine = [row for row in rows if row["rule"] == rule]
        style = "*" if rule == "marginal" else "o-"
        size = 13 if rule == "marginal" else 4
        discards, verifications = ([row[f"{name}_rate"] for row in mine] for name in ("discard", "verification"))
        axis.plot(discards, verifications, style, color=COLOURS[rule], markersize=size, label=label)
        for row, discard, verification in zip(mine, discards, verifications, strict=True):
            if rule != "marginal":
                axis.annotate(row["value"], (discard, verification), fontsize=6, color=COLOURS[rule])
    axis.set_xlabel("discard rate")
    axis.set_ylabel("verification rate")
    axis.legend(frameon=False, fontsize=7)
