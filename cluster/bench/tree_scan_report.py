"""The report of `dendro bench tree-scan` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.bench.tree_scan import LIBRARY, NEWEST, PACKED, UNROLLED, WAYS
from cluster.measure.report import Cells, Report, aims_table, figure_at, machine_facts, medians, with_interval
from verifier_service.models.head import HEAD_ROWS

MIB = 2**20
COLOURS = {PACKED: "#2a7f62", UNROLLED: "#5b8db8", LIBRARY: "#d98e04", NEWEST: "#b23a48"}


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"One Mamba-2 layer of mamba2-{plan['size']}'s size, random weights: {plan['heads']} heads of {plan['width']}, "
        f"{plan['groups']} group, state width {plan['state']}; inputs in bfloat16, decays and sums in float32"
    )
    yield (
        f"The tree's root is {plan['ring_tokens']} tokens after the checkpoint, in blocks of {plan['block']}; "
        f"{plan['repetitions']} repetitions of everything, interleaved, after a warm-up"
    )
    yield (
        "Times are of the convolution and the scan, from the linear layer's output to y, in every way; without "
        "linear layers, folds, and the index lists that all layers of a step share"
    )
    yield (
        f"{PACKED}: each row of the tree once. {UNROLLED}: all rows of all paths from the root to a leaf, by the same "
        "kernels in one batch that reads the checkpoint once. Both are padded to 8 rows"
    )
    yield (
        f"{LIBRARY}: `mamba2_chunk_scan` in PyTorch over the paths as a batch, the ring's tokens in front, already "
        "convolved, in one chunk (the published 256 would pad each path to 256 tokens)"
    )
    yield (
        f"{NEWEST}: the same from a state after the text's last token: less work, for an engine that keeps such states "
        "and does not need the same bits in prefill, plain decoding and trees"
    )
    yield (
        "Before measuring: every packed row has the bits of the same row on its own path; the library's answers are "
        f"within {plan['largest_difference']:.1e} of ours, relative"
    )
    yield (
        "Temporaries: peak bytes of torch tensors allocated by the call, its result included, by torch.profiler; "
        "allocations of libraries outside torch are not counted"
    )
    yield (
        "Memory of a model: weights in bfloat16, embeddings counted once; one text's checkpoints and ring, for "
        "an engine whose deepest tree is this one; scratch for the rows of this step, padded to 8; the "
        "temporaries of a whole step, linear layers and float32 logits of "
        f"at most {HEAD_ROWS} rows at a time among them. Not counted: the engine's float32 copy of the head, the "
        "text states of its own checks, scratch and temporaries of prompts"
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    rows = report["rows"]
    columns = ("tree", "rows", "paths", "rows unrolled", *(f"{way} ms" for way in WAYS))
    yield (
        "A layer's step, median and 90 %",
        columns,
        [
            (
                row["tree"],
                f"{row['rows']}",
                f"{row['paths']}",
                f"{row['unrolled_rows']}",
                *(with_interval(row["ms"][way]) for way in WAYS),
            )
            for row in rows
        ],
    )
    others = tuple(way for way in WAYS if way != PACKED)
    yield (
        "Over packed, median and 90 % of paired ratios",
        ("tree", "rows", *others),
        [(row["tree"], f"{row['rows']}", *(with_interval(row["over_packed"][way]) for way in others)) for row in rows],
    )
    yield (
        "Temporaries of a layer's step, MiB",
        ("tree", "rows", *WAYS),
        [
            (row["tree"], f"{row['rows']}", *(f"{row['temporary_bytes'][way] / MIB:.2f}" for way in WAYS))
            for row in rows
        ],
    )
    parts = ("weights", "kept", "scratch", "temporary", "logits", "total")
    yield (
        "Memory of a whole model and one text, MiB",
        (
            "model",
            "step",
            "rows",
            "weights",
            "checkpoints and ring",
            "scratch",
            "temporaries",
            "of them logits",
            "all",
            "over plain",
        ),
        [
            (
                each["model"],
                each["step"],
                f"{each['rows']}",
                *(f"{each[f'{part}_bytes'] / MIB:.2f}" for part in parts),
                f"{each['over_plain']:.3f}",
            )
            for each in report["memory"]
        ],
    )
    yield aims_table(report)


def plot(report: Report, path: Path) -> None:
    """Milliseconds of a step over a tree's rows, and the ratios of the other ways to packed."""
    rows = sorted(report["rows"], key=lambda row: row["rows"])
    counts = [row["rows"] for row in rows]
    with figure_at(path, 1, 2, 11, 4.5) as ((times, ratios),):
        for axis, key, ways in ((times, "ms", WAYS), (ratios, "over_packed", WAYS[1:])):
            for way in ways:
                middles, reach = medians(row[key][way] for row in rows)
                axis.errorbar(counts, middles, reach, fmt="o", color=COLOURS[way], label=way, alpha=0.8)
            axis.set_yscale("log")
            axis.set_xlabel("rows of the tree")
            axis.legend(frameon=False, fontsize=8)
        times.set_title("time of a layer's step (median and 90 % interval)")
        times.set_ylabel("time (ms)")
        ratios.set_title("time of a layer's step over that of packed rows")
        ratios.set_ylabel("ratio")
        ratios.axhline(1, color="black", linewidth=0.8)
