"""The report of `dendro bench speed` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.measure.measurement import GENERATE, LLAMA_CPP, LLAMA_CPP_FILE, OFF
from cluster.measure.ours import TenantRule
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
from cluster.measure.speed_categories import category_table, plot_categories

PARTS = {"draft": "draft", "verify": "verification", "queue": "queue", "hop": "hops between peers"}
"""Parts of a round, and their names in the plot."""
RATIO_COLUMNS = {
    GENERATE: "over generate",
    LLAMA_CPP: "over llama.cpp",
    LLAMA_CPP_FILE: "over llama.cpp own file",
    OFF: "over off",
}
"""The rows whose ratios are shown, where they were measured."""
SPLIT_COLUMNS = ("", *(f"{part} ms" for part in PARTS), "round ms", "hops", "kept of draft + verify", "shapes picked")
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


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    cores = report["machine"]["cores"]
    yield f"Load average at the start: {report['load_average']:.2f} processes, on {cores} cores"
    for name, target in report["targets"].items():
        check = target["identity"]
        agreed = f"{len(check['differences'])} differ" if check["differences"] else "all identical"
        yield (
            f"{target_fact(name, target)}, drafter {target['drafter']}; {_prompts_fact(target)}; "
            f"ours with speculation compared with ours without: {check['answers_compared']} answers, "
            f"{check['tokens_compared']:,} tokens, {agreed}" + (f"; {target['note']}" if target["note"] else "")
        )
        if target["best_settings"]:
            settings = (f"{each['setting']} at {each['temperature']:g}" for each in target["best_settings"])
            yield f"The library's best settings on the {name} target, chosen on other prompts: {', '.join(settings)}"
        yield from _llama_facts(name, target, [row for row in report["rows"] if row["target"] == name])


def _prompts_fact(target: Mapping[str, Any]) -> str:
    """How many prompts there were, of how many tokens; of which file, and whose answers."""
    times, longest = f"each {target['repetitions']} times", target["prompt_tokens"]
    if "prompt_file" not in target:
        return f"{target['prompts']} prompts of {longest} tokens, {times}"
    return f"{target['prompts']} {whose_prompts(target)}, {times}, answers up to their ends"


def whose_prompts(target: Mapping[str, Any]) -> str:
    """The file of the prompts, their lengths, and whose the answers were."""
    whose = "each answer of a tenant of its own" if target["tenants"] == TenantRule.ANSWERS else "a tenant for each row"
    return (
        f"prompts of {target['prompt_file']} of {target['shortest_prompt']} to {target['prompt_tokens']} tokens, the "
        f"chat template's with them, {whose}"
    )


def _llama_facts(name: str, target: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """llama.cpp's build and how many of its answers have the target's tokens, or why it was not measured."""
    facts, left_out = target["llama_cpp"]["facts"], target["llama_cpp"]["left_out"]
    equal = [
        f"{row['name']} {found['equal']} of {found['answers']}, "
        f"{found['tokens_before_difference']:.1%} of the tokens before the first difference"
        for row in rows
        if (found := row.get("equal_to_generate")) is not None
    ]
    if facts:
        yield (
            f"llama.cpp on the {name} target: llama-cpp-python {facts['version']} on the processor, with "
            f"{', '.join(facts['instructions'])}"
            + (f"; greedy answers equal to those of {GENERATE}: {'; '.join(equal)}" if equal else "")
        )
    for reason in dict.fromkeys(left_out.values()):
        missing = ", ".join(row for row, why in left_out.items() if why == reason)
        yield f"Not measured on the {name} target: {missing}; {reason}"


def different(report: Report) -> list[str]:
    """Our answers that speculation changed; expected to be none."""
    return [line for target in report["targets"].values() for line in target["identity"]["differences"]]


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    for group in dict.fromkeys((row["target"], row["temperature"]) for row in report["rows"]):
        rows, categories, fits, model = (
            [row for row in report[part] if (row["target"], row["temperature"]) == group]
            for part in ("rows", "categories", "step_fits", "cost_model")
        )
        title = f"{group[0]} target, temperature {group[1]:g}"
        yield _speed_table(title, rows)
        if categories:
            yield category_table(title, categories)
        if split := [_split_cells(row) for row in rows if "round_ms" in row]:
            yield f"{title}: parts of a round", SPLIT_COLUMNS, split
        if fits:
            yield f"{title}: a step's time by its rows n, fitted", FIT_COLUMNS, [_fit_cells(row) for row in fits]
        if model:
            predicted = f"{title}: predictions of the same fit to the other shapes' steps"
            yield predicted, MODEL_COLUMNS, [_model_cells(row) for row in model]
    if report["aims"]:
        yield aims_table(report)


def _speed_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Cells:
    names = {row["name"] for row in rows}
    compared = [row for row in RATIO_COLUMNS if row in names]
    over = (RATIO_COLUMNS[row] for row in compared)
    columns = ("", "tokens/s", "90 %", *over, "emitted per round", "first token ms", "decode tokens/s")
    return title, columns, [_speed_cells(row, compared) for row in rows]


def _speed_cells(row: Mapping[str, Any], compared: Sequence[str]) -> tuple[str, ...]:
    rate, over = row["tokens_per_second"], row["ratio_over"]
    return (
        row["name"],
        f"{rate['median']:.1f}",
        interval(rate, 1),
        *("1" if other == row["name"] else with_interval(over[other]) for other in compared),
        f"{row['emitted_per_round']:.2f}",
        f"{row['first_token_ms']:.0f}",
        number(row["decode_tokens_per_second"], 1),
    )


def _split_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    split = row["round_ms"]
    picked = ", ".join(f"{shape} {share:.0%}" for shape, share in list(row["arms"].items())[:4])
    return (
        row["name"],
        *(f"{split[part]:.2f}" for part in (*PARTS, "total")),
        f"{row['hop_share']['median']:.1%}",
        with_interval(row["kept"]) if "kept" in row else "",
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


def plot(report: Report, path: Path) -> None:
    """Bars of tokens per second with their intervals, below them the parts of a round, and the rates by category.

    One column for each target and temperature; the path's suffix sets the format.
    """
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault((row["target"], row["temperature"]), []).append(row)
    below = 3 if report["categories"] else 2
    with figure_at(path, below, len(groups), 5.2 * len(groups), 4.25 * below) as axes:
        for column, ((target, temperature), rows) in enumerate(groups.items()):
            _plot_rates(axes[0][column], rows[::-1])
            axes[0][column].set_title(f"{target} target, temperature {temperature:g}")
            _plot_split(axes[1][column], [row for row in rows[::-1] if "round_ms" in row])
            if below > 2:
                mine = [r for r in report["categories"] if (r["target"], r["temperature"]) == (target, temperature)]
                plot_categories(axes[2][column], mine)


def _plot_rates(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    middles, reach = medians(row["tokens_per_second"] for row in rows)
    others = {"transformers": "#8c8c8c", "llama.cpp": "#4a6fa5"}
    colours = [others.get(name.split()[0], "#2a7f62") for name in names]
    axis.barh(names, middles, xerr=reach, color=colours, ecolor="black", capsize=3)
    axis.set_xlabel("tokens per second (median and 90 % interval)")


def _plot_split(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    left = [0.0] * len(rows)
    for (part, label), colour in zip(PARTS.items(), ("#d98e04", "#2a7f62", "#b8b8b8", "#b23a48"), strict=True):
        widths = [row["round_ms"][part] for row in rows]
        axis.barh(names, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_xlabel("time of a round (ms)")
    if rows:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS), frameon=False, fontsize=8)
