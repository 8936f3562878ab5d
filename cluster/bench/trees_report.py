"""The report of `dendro bench trees` as facts, tables and plot. Nothing is measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.measure.report import (
    Cells,
    Report,
    aims_table,
    figure_at,
    interval,
    machine_facts,
    number,
    target_fact,
    with_interval,
)

ARM_COLUMNS = ("", "rows", "emitted per round", "draft ms", "verify ms", "tokens/s", "90 %", "over off")
CONFIGURATIONS = ("(3,3,2,1)", "(3,2,2,1,1)", "(2,2,2,1,1,1)", "(3,2,1)", "(1,1,1,1)")
"""The columns of the paper's Table 5, and the demo's best ones."""
CHAIN_OR_TREE = (
    "(1,1,1,1)",
    f"({','.join('1' * 15)})",
    "(3,2,1)",
    "dynamic(4,5,15)",
    "dynamic(8,8,15)",
    "dynamic(16,15,15)",
    "(3,2,2,1,1)",
)
"""A chain of 5 rows, a chain and three trees of 16 rows, and the paper's tree."""
COLOURS = ("#2a7f62", "#d98e04", "#5b8db8", "#b23a48", "#8c8c8c", "#7a5195", "#b8b8b8", "#c9a227", "#3d405b", "#81b29a")


def facts_of(report: Report) -> Iterator[str]:
    """Lines about the conditions of the measurement."""
    yield from machine_facts(report)
    plan = report["plan"]
    yield (
        f"{target_fact(plan['target'], plan)}; "
        f"{plan['prompts']} prompts of {plan['prompt_tokens']} tokens of each kind ({', '.join(plan['kinds'])}), "
        f"answers of {plan['tokens']} tokens, recorded once: all arms and policies are replayed on the same answers"
    )
    yield (
        f"Trees grown at {plan['places']:,} positions by {plan['drafter']} in {plan['drafter_dtype']}; rounds of "
        f"other static shapes follow from ranks; where both were done ({', '.join(plan['checked_shapes'])}) "
        f"{plan['disagreements']} of {plan['places'] * len(plan['checked_shapes']):,} rounds differ"
    )
    yield (
        "Tokens per second are predicted: tokens over the round times of the cost table, without router, hops and "
        f"queues. Costs are medians of {plan['repetitions']}, interleaved, in one process. Trees of a drafter are "
        "replayed without the proposals that the router would merge into them. Proposals are those "
        "of prompt lookup; policies get them before they choose, as in the router"
    )
    check = report["live"]
    if check:
        yield (
            f"Measured in real time with drafter and verifier: {sum(row['rounds'] for row in check)} rounds, "
            f"{sum(row['differences'] for row in check)} of them emitted another number of tokens than replayed. Only "
            "those of dynamic trees may: the drafter's confidences are calibrated further after the recording"
        )


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['tokens_per_second']['median']:.1f}" if row["tokens_per_second"] else ""


def _arm_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    rate = row["tokens_per_second"]
    return (
        row["arm"],
        str(row["tree_rows"]),
        f"{row['emitted_per_round']:.2f}",
        number(row["draft_ms"]),
        number(row["verify_ms"]),
        _rate(row),
        interval(rate),
        with_interval(row["over_off"], 3),
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """Every table, in order."""
    yield from _chain_or_tree(report)
    yield from _configurations(report)
    yield from _search(report)
    arms, drafter = report["rows"], report["plan"]["drafter"]
    for temperature in dict.fromkeys(row["temperature"] for row in arms):
        for kind in dict.fromkeys(row["kind"] for row in arms):
            mine = [
                _arm_cells(row)
                for row in arms
                if (row["kind"], row["temperature"], row["drafter"]) == (kind, temperature, drafter)
            ]
            yield f"Every arm: {kind}, temperature {temperature:g}, {drafter}", ARM_COLUMNS, mine
    yield from _policies(report)
    yield from _ablation(report)
    yield from _causes(report)
    yield from _calibration(report)
    yield from _costs(report)
    if report["live"]:
        yield _live(report)
    if report["context"]:
        yield _context(report)
    yield aims_table(report)


def _chain_or_tree(report: Report) -> Iterator[Cells]:
    """Chains and trees, as in Table 4 of the Mamba-drafters paper."""
    found = {(row["kind"], row["temperature"], row["drafter"], row["arm"]): row for row in report["rows"]}
    columns = ("", "", "rows", "emitted per round", "draft ms", "tokens/s", "over off")
    cells: list[tuple[str, ...]] = []
    drafter = report["plan"]["drafter"]
    for kind, temperature in dict.fromkeys((row["kind"], row["temperature"]) for row in report["rows"]):
        for arm in CHAIN_OR_TREE:
            row = found[kind, temperature, drafter, arm]
            at = f"{kind}, {temperature:g}"
            head = (at, arm, str(row["tree_rows"]), f"{row['emitted_per_round']:.2f}", number(row["draft_ms"]))
            cells.append((*head, _rate(row), with_interval(row["over_off"], 3)))
    yield "Chain or tree (as Table 4 of the Mamba-drafters paper)", columns, cells


def _configurations(report: Report) -> Iterator[Cells]:
    """Table 5: tokens per second and N by configuration and drafter; N alone if a drafter is not served."""
    rows = report["rows"]
    found = {(row["kind"], row["temperature"], row["drafter"], row["arm"]): row for row in rows}
    cells: list[tuple[str, ...]] = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            for drafter in dict.fromkeys(row["drafter"] for row in rows):
                mine = [found[kind, temperature, drafter, arm] for arm in CONFIGURATIONS]
                values = (" / ".join(filter(None, (_rate(row), f"{row['emitted_per_round']:.2f}"))) for row in mine)
                cells.append((f"{kind}, {temperature:g}", drafter, *values))
    yield "Tokens/s / emitted per round by configuration (as Table 5)", ("", "drafter", *CONFIGURATIONS), cells


def _search(report: Report) -> Iterator[Cells]:
    """Table 6: the paper's arms with search off and on."""
    kinds = dict.fromkeys(row["kind"] for row in report["policies"])
    drafter = report["plan"]["drafter"]  # policies are replayed with it
    mine = [row for row in report["rows"] if row["drafter"] == drafter]
    arms = {(row["kind"], row["temperature"], row["arm"]): row for row in mine}
    for temperature in dict.fromkeys(row["temperature"] for row in report["policies"]):
        cells = [
            (f"off, {arm}", *(_rate(arms[kind, temperature, arm]) for kind in kinds))
            for arm in ("(3,2,2,1)", *CONFIGURATIONS[:3])
        ]
        searched = [row for row in report["policies"] if (row["arms"], row["temperature"]) == ("paper", temperature)]
        for policy in dict.fromkeys(row["policy"] for row in searched):
            by_kind = {row["kind"]: row for row in searched if row["policy"] == policy}
            cells.append((f"on, {policy}", *(_rate(by_kind[kind]) for kind in kinds)))
        title = f"Search among the paper's three arms, tokens/s, temperature {temperature:g} (as Table 6)"
        yield title, ("search", *kinds), cells


def _policies(report: Report) -> Iterator[Cells]:
    columns = (
        "",
        "",
        "tokens/s",
        "best fixed arm",
        "tokens/s",
        "over best arm",
        "regret",
        "cold regret",
        "best arm's share",
        "over off",
    )
    for temperature in dict.fromkeys(row["temperature"] for row in report["policies"]):
        cells: list[tuple[str, ...]] = []
        for row in report["policies"]:
            if (row["temperature"], row["arms"]) != (temperature, "configured"):
                continue
            cells.append(
                (
                    row["policy"],
                    row["kind"],
                    _rate(row),
                    row["best_arm"],
                    f"{row['best_arm_tokens_per_second']['median']:.1f}",
                    with_interval(row["over_best"], 3),
                    f"{row['regret']:.1%}",
                    f"{row['cold_regret']:.1%}",
                    f"{row['best_arm_share']:.0%}",
                    with_interval(row["over_off"], 3),
                )
            )
        yield f"Policies on the configured arms, temperature {temperature:g}", columns, cells


def _ablation(report: Report) -> Iterator[Cells]:
    columns = ("", "tree", "emitted per round", "over the best static")
    for temperature, size in dict.fromkeys((row["temperature"], row["tree_rows"]) for row in report["ablation"]):
        cells: list[tuple[str, ...]] = [
            (row["way"], row["shape"], f"{row['emitted_per_round']:.3f}", with_interval(row["over_best_static"], 3))
            for row in report["ablation"]
            if (row["temperature"], row["tree_rows"]) == (temperature, size)
        ]
        yield (
            f"What makes a dynamic tree: {size} rows, temperature {temperature:g} (EAGLE-2's ablation)",
            columns,
            cells,
        )


def _causes(report: Report) -> Iterator[Cells]:
    columns = (
        "",
        "dynamic tree",
        "all levels right",
        "token past the candidates",
        "value too low",
        "tokens lost by that",
        "static emits as many",
        "static more",
        "dynamic more",
    )
    cells: list[tuple[str, ...]] = [
        (
            f"{row['temperature']:g}",
            row["shape"],
            f"{row['all_levels_right']:.1%}",
            f"{row['past_the_candidates']:.1%}",
            f"{row['left_out_by_value']:.1%}",
            f"{row['tokens_lost_by_leaving_out']:.2f}",
            f"{row['static_emits_as_many']:.1%}",
            f"{row['static_emits_more']:.1%}",
            f"{row['dynamic_emits_more']:.1%}",
        )
        for row in report["causes"]
    ]
    yield "How rounds of dynamic trees end, and the best static tree at the same positions", columns, cells


def _calibration(report: Report) -> Iterator[Cells]:
    columns = ("", "confidence", "expected error", *(f"{ten / 10:.1f}-{ten / 10 + 0.1:.1f}" for ten in range(10)))
    cells: list[tuple[str, ...]] = []
    for row in report["calibration"]:
        bins = {round(10 * each["from"]): each for each in row["bins"]}
        shares = (f"{bins[ten]['accepted']:.2f} ({bins[ten]['guesses']})" if ten in bins else "" for ten in range(10))
        cells.append((f"{row['temperature']:g}", row["confidence"], f"{row['expected_error']:.4f}", *shares))
    yield "Share accepted (guesses) by stated confidence (as Figure 6 of EAGLE-2)", columns, cells


def _costs(report: Report) -> Iterator[Cells]:
    steps: dict[str, dict[str, float]] = {}
    for row in report["costs"]:
        steps.setdefault(f"{row['what']}, temperature {row['temperature']:g}", {})[str(row["rows"])] = row["ms"]
    rows = sorted({rows for found in steps.values() for rows in found}, key=int)
    cells: list[tuple[str, ...]] = [
        (name, *(number(found.get(count)) for count in rows)) for name, found in steps.items()
    ]
    yield "Costs in ms by rows", ("", *rows), cells


def _live(report: Report) -> Cells:
    columns = ("", "", "rounds", "tokens/s in real time", "predicted", "emitted as replayed")
    cells: list[tuple[str, ...]] = [
        (
            f"{row['temperature']:g}",
            row["arm"],
            str(row["rounds"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['predicted_tokens_per_second']:.1f}",
            "yes" if not row["differences"] else f"NO, {row['differences']} rounds",
        )
        for row in report["live"]
    ]
    return "In real time: drafter and verifier in this process, without a router", columns, cells


def _context(report: Report) -> Cells:
    """Table 2 of the Mamba-drafters paper: tokens per second, N and memory by text length."""
    columns = (
        "context",
        "",
        "emitted per round",
        "tokens/s in real time",
        "over off",
        "verifier MiB",
        "drafter MiB",
        "Transformer drafter MiB",
    )
    cells: list[tuple[str, ...]] = [
        (
            f"{row['context']:,}",
            row["arm"],
            f"{row['emitted_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['over_off']:.2f}",
            f"{row['verifier_peak_bytes'] / 2**20:.1f}",
            f"{row['drafter_peak_bytes'] / 2**20:.2f}",
            f"{row['transformer_drafter_bytes'] / 2**20:.2f}",
        )
        for row in report["context"]
    ]
    title = "Longer texts (as Table 2): in real time, peak memory of one text; the target's output there is meaningless"
    return title, columns, cells


def plot(report: Report, path: Path) -> None:
    """For each temperature: the ablation, calibration, and the best policy's arm shares for each kind."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in report["ablation"]))
    kinds = list(dict.fromkeys(row["kind"] for row in report["shares"]))
    colours = _colours_of(report["shares"])
    rows = 2 + len(kinds)
    with figure_at(path, rows, len(temperatures), 7 * len(temperatures), 3.3 * rows) as axes:
        for column, temperature in enumerate(temperatures):
            at = [axes[row][column] for row in range(rows)]
            _plot_ablation(at[0], [row for row in report["ablation"] if row["temperature"] == temperature])
            at[0].set_title(f"temperature {temperature:g}: acceptance length")
            _plot_calibration(at[1], [row for row in report["calibration"] if row["temperature"] == temperature])
            for kind, axis in zip(kinds, at[2:], strict=True):
                for row in report["shares"]:
                    if (row["kind"], row["temperature"]) == (kind, temperature):
                        _plot_shares(axis, row, colours)


def _plot_ablation(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    sizes = list(dict.fromkeys(row["tree_rows"] for row in rows))
    for index, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        mine = {row["tree_rows"]: row["emitted_per_round"] for row in rows if row["way"] == way}
        bars = [at + 0.16 * (index - 2) for at, size in enumerate(sizes) if size in mine]
        axis.bar(bars, [mine[size] for size in sizes if size in mine], 0.15, color=COLOURS[index], label=way)
    axis.set_xticks(range(len(sizes)), [f"{size} rows" for size in sizes])
    axis.set_ylabel("tokens per round")
    axis.legend(frameon=False, fontsize=7, loc="upper left")
    axis.set_ylim(top=axis.get_ylim()[1] * 1.35)


def _plot_calibration(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    axis.plot([0, 1], [0, 1], "--", color="#b8b8b8")
    for index, row in enumerate(rows):
        stated, accepted = ([each[name] for each in row["bins"]] for name in ("stated", "accepted"))
        label = f"{row['confidence']} (error {row['expected_error']:.3f})"
        axis.plot(stated, accepted, "o-", color=COLOURS[index], label=label)
    axis.set_xlabel("confidence of the drafter")
    axis.set_ylabel("share of guesses accepted")
    axis.legend(frameon=False, fontsize=8)


def _colours_of(shares: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Arm -> colour, the same in every plot; the arms chosen most come first."""
    totals: Counter[str] = Counter()
    for row in shares:
        for window in row["shares"]:
            totals.update(window)
    return {arm: COLOURS[index % len(COLOURS)] for index, (arm, _) in enumerate(totals.most_common())}


def _plot_shares(axis: Any, row: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Stacked shares of the arms by windows of rounds."""
    windows = row["shares"]
    arms = [arm for arm in colours if any(arm in window for window in windows)]
    rounds = [row["window_rounds"] * index for index in range(len(windows))]
    stacks = [[window.get(arm, 0.0) for window in windows] for arm in arms]
    axis.stackplot(rounds, stacks, labels=arms, colors=[colours[arm] for arm in arms], step="post")
    axis.axvline(row["second_pass_from_round"], color="black", linewidth=0.8)
    axis.set_title(f"{row['kind']}: shapes chosen by {row['policy']}", fontsize=9)
    axis.set_xlabel("rounds")
    axis.set_ylabel("share of rounds")
    axis.set_ylim(0, 1)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
