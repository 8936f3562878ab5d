"""A bench's report as tables, Markdown, JSON and plot. Nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Report = Mapping[str, Any]
MET = {True: "met", False: "MISSED", None: "not judged"}
PARTS = ("draft", "verify", "queue", "hop")
SPEED_COLUMNS = (
    "",
    "tokens/s",
    "90 %",
    "over generate",
    "over off",
    "emitted per round",
    "first token ms",
    "decode tokens/s",
)
SPLIT_COLUMNS = ("", *(f"{part} ms" for part in PARTS), "round ms", "hops", "shapes picked")
MODEL_COLUMNS = (
    "",
    "rows",
    "verify ms",
    "predicted",
    "decode tokens/s",
    "predicted tokens/s",
    "picked by the policy",
)
FIT_COLUMNS = ("form", "c ms", "k ms", "k2 ms")
AIM_COLUMNS = ("aim", "value", "90 %", "bar", "", "why")


def _ratio(row: Mapping[str, Any], other: str) -> str:
    found = row["ratio_over"].get(other)
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})" if found else "1"


def _speed_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    rate, decode = row["tokens_per_second"], row["decode_tokens_per_second"]
    return (
        row["name"],
        f"{rate['median']:.1f}",
        f"{rate['low']:.1f}-{rate['high']:.1f}",
        _ratio(row, "transformers generate"),
        _ratio(row, "off"),
        f"{row['emitted_per_round']:.2f}",
        f"{row['first_token_ms']:.0f}",
        "" if decode is None else f"{decode:.1f}",
    )


def _split_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    split = row["round_ms"]
    picked = ", ".join(f"{shape} {share:.0%}" for shape, share in list(row["arms"].items())[:4])
    return (
        row["name"],
        *(f"{split[part]:.2f}" for part in PARTS),
        f"{split['total']:.2f}",
        f"{row['hop_share']['median']:.1%}",
        picked,
    )


def _model_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        str(row["rows"]),
        f"{row['verify_ms']:.2f}",
        f"{row['predicted_verify_ms']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['predicted_tokens_per_second']:.1f}",
        f"{row['picked_share']:.0%}",
    )


def _fit_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (row["form"], *(f"{row[name]:g}" if name in row else "" for name in ("c_ms", "k_ms", "k2_ms")))


def _aim_cells(aim: Mapping[str, Any]) -> tuple[str, ...]:
    interval = aim["interval"]
    return (
        aim["aim"],
        "" if aim["value"] is None else f"{aim['value']:.3f}",
        f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "",
        f"{aim['bar']:g}",
        MET[aim["met"]],
        aim.get("why", ""),
    )


Cells = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns and rows of a table."""


def aims_table(report: Report) -> Cells:
    """The aims, and whether they were met."""
    return "Aims", AIM_COLUMNS, [_aim_cells(aim) for aim in report["aims"]]


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table of `dendro bench speed`, in order."""
    groups = dict.fromkeys((row["target"], row["temperature"]) for row in report["rows"])
    for target, temperature in groups:
        rows = [row for row in report["rows"] if (row["target"], row["temperature"]) == (target, temperature)]
        title = f"{target} target, temperature {temperature:g}"
        yield title, SPEED_COLUMNS, [_speed_cells(row) for row in rows]
        split = [_split_cells(row) for row in rows if "round_ms" in row]
        if split:
            yield f"{title}: parts of a round", SPLIT_COLUMNS, split
        fits = [row for row in report["step_fits"] if (row["target"], row["temperature"]) == (target, temperature)]
        model = [row for row in report["cost_model"] if (row["target"], row["temperature"]) == (target, temperature)]
        if fits:
            yield f"{title}: a step's time by its rows n, fitted", FIT_COLUMNS, [_fit_cells(row) for row in fits]
        if model:
            yield (
                f"{title}: predictions of the same fit to the other shapes' steps",
                MODEL_COLUMNS,
                [*map(_model_cells, model)],
            )
    if report["aims"]:
        yield aims_table(report)


def machine_facts(report: Report) -> Iterator[str]:
    """Lines about the machine, the date and the settings of a measurement."""
    machine, settings = report["machine"], report["settings"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    environment = ", ".join(f"{name}={value}" for name, value in machine["environment"].items())
    yield f"Command: `{settings['command']}`"
    where = "the engines in the bench's process" if settings["local"] else "Ray Serve, gRPC and Redis"
    yield f"Date: {settings['date']}; commit {settings['commit']}; took {settings['seconds']:.0f} s; ours on {where}"
    yield (
        f"Hardware: {machine['processor']}, {machine['cores']} cores, accelerator {machine['accelerator'] or 'none'}; "
        f"{machine['threads']} threads for each engine"
    )
    yield f"Software: Python {machine['python']}, {libraries}; environment {environment or 'default'}"


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of `dendro bench speed`."""
    yield from machine_facts(report)
    for name, target in report["targets"].items():
        check = target["identity"]
        agreed = f"{len(check['differences'])} differ" if check["differences"] else "all identical"
        yield (
            f"The {name} target: {target['parameters']:,} parameters in {target['dtype']}, "
            f"drafter {target['drafter']}; "
            f"{target['prompts']} prompts of {target['prompt_tokens']} tokens, each {target['repetitions']} times; "
            f"ours with speculation compared with ours without: {check['answers_compared']} answers, "
            f"{check['tokens_compared']:,} tokens, {agreed}" + (f"; {target['note']}" if target["note"] else "")
        )


def show(console: Console, report: Report) -> None:
    """Print the report of `dendro bench speed`."""
    show_tables(console, facts_of(report), tables_of(report))
    for target in report["targets"].values():
        for line in target["identity"]["differences"][:10]:
            console.print(f"DIFFERENT: {line}", style="red", markup=False)


def show_tables(console: Console, facts: Iterable[str], tables: Iterable[Cells]) -> None:
    """Print facts and tables."""
    for fact in facts:
        console.print(fact, highlight=False, markup=False)
    for title, columns, rows in tables:
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            left = index == 0 or column in ("why", "shapes picked")
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)


def as_markdown(report: Report, facts: Iterable[str], tables: Iterable[Cells], command: str = "") -> str:
    """The report as Markdown. command: the title; default: the bench's command."""
    lines = [f"# {command or 'dendro bench ' + report['bench']}", "", *(f"- {fact}" for fact in facts)]
    for title, columns, rows in tables:
        lines += ["", f"## {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def write_reports(
    report: Report,
    facts: Iterable[str],
    tables: Iterable[Cells],
    draw: Callable[[Report, Path], None],
    json: Path | None,
    markdown: Path | None,
    plot: Path | None,
) -> None:
    """Write a bench's report in every format that has a path."""
    for path in (json, markdown, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json is not None:
        json.write_text(as_json(report))
    if markdown is not None:
        markdown.write_text(as_markdown(report, facts, tables))
    if plot is not None:
        draw(report, plot)


def as_json(report: Report) -> str:
    return json.dumps(report, indent=1) + "\n"


def plot(report: Report, path: Path) -> None:
    """Bars of tokens per second with their intervals, and below them the parts of a round.

    One column for each target and temperature; the path's suffix sets the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault((row["target"], row["temperature"]), []).append(row)
    figure, axes = pyplot.subplots(2, len(groups), figsize=(5.2 * len(groups), 8.5), squeeze=False)
    for column, ((target, temperature), rows) in enumerate(groups.items()):
        _plot_rates(axes[0][column], rows)
        axes[0][column].set_title(f"{target} target, temperature {temperature:g}")
        _plot_split(axes[1][column], [row for row in rows if "round_ms" in row])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_rates(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [row["name"] for row in rows][::-1]
    rates = [row["tokens_per_second"] for row in rows][::-1]
    middles = [rate["median"] for rate in rates]
    reach = [[rate["median"] - rate["low"] for rate in rates], [rate["high"] - rate["median"] for rate in rates]]
    colours = ["#8c8c8c" if name.startswith("transformers") else "#2a7f62" for name in names]
    axis.barh(names, middles, xerr=reach, color=colours, ecolor="black", capsize=3)
    axis.set_xlabel("tokens per second (median, 90 % interval)")


def _plot_split(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [row["name"] for row in rows][::-1]
    left = [0.0] * len(rows)
    for part, colour in zip(PARTS, ("#d98e04", "#2a7f62", "#b8b8b8", "#b23a48"), strict=True):
        widths = [row["round_ms"][part] for row in rows][::-1]
        axis.barh(names, widths, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_xlabel("milliseconds of a round")
    if rows:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS), frameon=False)
