"""The report of `dendro bench drafter` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.bench.drafter import (
    ACCEPTED,
    DRAFT_BARS,
    LAYERS,
    LEVEL_PARTS,
    LEVEL_ROWS,
    LEVELS,
    LLAMA,
    LOGITS,
    MAMBA,
    MAMBA2,
    RANKING,
    STEP_ROWS,
    TREE,
)
from cluster.bench.drafter_forms import DRAFT_PARTS, EAGER, FORMS, FUSED
from cluster.bench.drafter_heads import BLOCKS, WITHOUT
from cluster.measure.report import (
    Cells,
    Report,
    aims_table,
    figure_at,
    machine_facts,
    medians,
    number,
    with_interval,
)

MIB = 2**20
COLOURS = {LLAMA: "#b23a48", MAMBA: "#5b8db8", MAMBA2: "#2a7f62"}
STYLES = {EAGER: "--o"}
"""Lines of forms; others are drawn solid."""
OTHERS = tuple(form for form in FORMS if form != EAGER)
RATIOS = tuple(f"{EAGER} over {form}" for form in OTHERS)


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield f"Load average of the last minute when it started: {plan['load_average']:.2f}"
    sizes = ", ".join(f"{each['drafter']} {each['parameters']:,}" for each in plan["drafters"])
    yield f"Drafters of the demo pair in {plan['dtype']}, parameters: {sizes}"
    for each in plan["drafters"]:
        for form, why in each["missing"].items():
            yield f"{each['drafter']} was not measured in form {form}: {why}"
    yield (
        f"Everything {plan['repetitions']} times after a warm-up, forms in turns in random order, at temperature 1. "
        "Before the time starts, noise is computed and the form runs one forward, so that its weights are in the "
        "caches, as in a process that only drafts. No router, sockets or thread of an engine: a scheduler and a runner "
        "are called in turn. Ratios are of neighbouring measurements; aims are judged by the lower end of the interval"
    )
    yield (
        f"Levels: forwards of {', '.join(map(str, LEVEL_ROWS))} rows, the first of tree {LEVELS}, each repeated. "
        f"{LAYERS} and {LOGITS} are run again by themselves; {RANKING} is the rest of the whole forward: ranking with "
        f"noise, and copies. In form {FUSED} the whole forward is one call; {RANKING} is negative where that takes "
        f"less time than {LAYERS} and {LOGITS}, which are two calls"
    )
    yield (
        f"Drafts: texts of {plan['tokens']} tokens at first. Between two drafts a text grows by at most {ACCEPTED} "
        "guesses and a token of the corpus. Parts: the calls with their texts, planning (next), folds of accepted "
        "nodes, forwards with ranking (run), growth of trees (apply). Equal: trees with the tokens and parents of "
        f"{EAGER}'s, the warm-up's included"
    )
    yield (
        "Acceptance heads: random ones of the drafter's width, their blocks in bfloat16; the time does not depend on "
        "the weights. The same levels, each with the chances of its candidates: by the head, or calibrated from the "
        "scores without one"
    )
    judged = ", ".join(DRAFT_BARS)
    yield f"The aims for whole drafts are for {judged}. Sessions: each has a text, and all draft a tree {TREE} at once"
    yield (
        "Lengths: as in Figure 1 of Mamba Drafters for Speculative Decoding (arXiv 2506.01206), of drafters of equal "
        f"size. The {LLAMA} drafter's last position is raised to the longest text; its time and memory are those of "
        "a model trained for such texts, its guesses there are meaningless"
    )
    yield (
        "Memory of a text: the most that its slot may take (a Llama's buffers double), and the tensors that it was "
        "measured to hold. A step's temporaries: the peak of the tensors of a forward of one row. Both by "
        "torch.profiler, which counts neither what other libraries allocate nor the scratch memory that a fused "
        "drafter keeps from step to step. An engine keeps up to two slots for each text. All: weights, a text and "
        "a step"
    )


def _times(row: Mapping[str, Any], digits: int = 3) -> tuple[str, ...]:
    """Cells: milliseconds in each form, then the ratios."""
    return (
        *(with_interval(row["ms"].get(form), digits) for form in FORMS),
        *(with_interval(row["eager_over"].get(form)) for form in OTHERS),
    )


def _parts(rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...], parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Cells of one line per row and form: the row's keys, the form, milliseconds of the parts."""
    return [
        (*(str(row[key]) for key in keys), form, *(number(found[part], 3) for part in parts))
        for row in rows
        for form, found in row["parts_ms"].items()
    ]


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    in_forms = (*(f"{form} ms" for form in FORMS), *RATIOS)
    yield (
        "A level with ranking, median and 90 %",
        ("drafter", "rows", *in_forms),
        [(row["drafter"], f"{row['rows']}", *_times(row)) for row in report["rows"]],
    )
    yield (
        "Parts of a level, median ms",
        ("drafter", "rows", "form", *LEVEL_PARTS),
        _parts(report["rows"], ("drafter", "rows"), LEVEL_PARTS),
    )
    heads = (
        f"A level in form {FUSED} with an acceptance head of so many blocks, median and 90 %",
        ("drafter", "rows", f"{WITHOUT} ms", *(f"{blocks} blocks over {WITHOUT}" for blocks in BLOCKS)),
        [
            (
                row["drafter"],
                f"{row['rows']}",
                with_interval(row["ms"][WITHOUT], 3),
                *(with_interval(row["over_without"][str(blocks)], 3) for blocks in BLOCKS),
            )
            for row in report["heads"]
        ],
    )
    if report["heads"]:
        yield heads
    equal = tuple(f"equal, {form}" for form in OTHERS)
    yield (
        "A draft, median and 90 %",
        ("drafter", "shape", *in_forms, "trees", *equal),
        [
            (
                row["drafter"],
                row["shape"],
                *_times(row, 2),
                f"{row['trees']}",
                *(str(row["equal_trees"].get(form, "")) for form in OTHERS),
            )
            for row in report["drafts"]
        ],
    )
    yield (
        "Parts of a draft, median ms",
        ("drafter", "shape", "form", *DRAFT_PARTS),
        _parts(report["drafts"], ("drafter", "shape"), DRAFT_PARTS),
    )
    yield (
        f"Sessions that draft {TREE} at once, median and 90 %",
        ("drafter", "sessions", *in_forms, *(f"{form} ms per session" for form in FORMS), "trees", *equal),
        [
            (
                row["drafter"],
                f"{row['sessions']}",
                *_times(row),
                *(number(_per_session(row, form), 3) for form in FORMS),
                f"{row['trees']}",
                *(str(row["equal_trees"].get(form, "")) for form in OTHERS),
            )
            for row in report["sessions"]
        ],
    )
    yield (
        f"A level of {STEP_ROWS} row with ranking by the length of the text, median and 90 %",
        ("tokens", "drafter", *in_forms),
        [(f"{row['context']:,}", row["drafter"], *_times(row)) for row in report["lengths"]],
    )
    memory = ("weights", "slot", "text", "step", "total")
    yield (
        "Memory by the length of the text, KiB",
        ("tokens", "drafter", "form", "weights", "slot at most", "text, measured", "a step's temporaries", "all"),
        [
            (
                f"{row['context']:,}",
                row["drafter"],
                row["form"],
                *(f"{row[f'{part}_bytes'] / 1024:,.1f}" for part in memory),
            )
            for row in report["memory"]
        ],
    )
    yield aims_table(report)


def _per_session(row: Mapping[str, Any], form: str) -> float | None:
    return row["ms"][form]["median"] / row["sessions"] if form in row["ms"] else None


def plot(report: Report, path: Path) -> None:
    """Milliseconds of a step of one row, and MiB of a text, over the tokens of the text."""
    lengths = list(dict.fromkeys(row["context"] for row in report["memory"]))
    with figure_at(path, 1, 2, 11, 4.5) as ((times, memory),):
        for name, form in dict.fromkeys((row["drafter"], row["form"]) for row in report["memory"]):
            look = {"color": COLOURS[name], "label": f"{name}, {form}"}
            steps = [row for row in report["lengths"] if row["drafter"] == name]
            middles, reach = medians(row["ms"][form] for row in steps)
            style = STYLES.get(form, "-o")
            times.errorbar([row["context"] for row in steps], middles, reach, fmt=style, **look)
            held = [row for row in report["memory"] if (row["drafter"], row["form"]) == (name, form)]
            contexts = [row["context"] for row in held]
            memory.plot(contexts, [row["text_bytes"] / MIB for row in held], style, **look)
        for axis in (times, memory):
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.set_xlabel("tokens of the text")
            axis.legend(frameon=False, fontsize=8)
        times.set_ylim(bottom=0)
        times.set_ylabel("time (ms)")
        times.set_title("a level of one row with ranking (median and 90 % interval)")
        memory.set_yscale("log")
        memory.set_ylabel("memory (MiB)")
        memory.set_title("memory of one text, without weights")
