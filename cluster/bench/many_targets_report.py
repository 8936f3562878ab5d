"""`dendro bench targets`: the report as tables. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.measure.report import Cells, Report, machine_facts, number, target_fact, with_interval

COLUMNS = ("target", "drafter", "shape", "tokens a round", "tokens/s (90 %)", "over off (90 %)", "late drafts")


def facts_of(report: Report) -> Iterator[str]:
    """The conditions of the measurement, a line each."""
    yield from machine_facts(report)
    for name, facts in report["targets"].items():
        yield target_fact(name, facts)
    for name, facts in report["drafters"].items():
        yield f"The drafter {name}: {facts['parameters']:,} parameters; it drafts for {', '.join(facts['targets'])}"
    yield (
        f"{report['prompts']} held-out prompts of {report['prompt_tokens']} tokens, answers of "
        f"{report['answer_tokens']}; the ways in a random order on each prompt. Tokens a round count the target's own; "
        "tokens/s are medians of answers without their first round; over off is the median of ratios by prompt"
    )
    yield (
        f"All targets and drafters ran in one cluster, with one pool for each; {report['shared_drafter']} serves all "
        "targets. No drafter was trained for this measurement"
    )
    yield (
        f"{report['identity']['answers_compared']} answers compared with those without speculation: "
        f"{len(report['identity']['differences'])} differ"
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """One table for each temperature and load."""
    for temperature in dict.fromkeys(row["temperature"] for row in report["rows"]):
        for at_once in (False, True):
            rows = [
                row for row in report["rows"] if (row["temperature"], row["both_at_once"]) == (temperature, at_once)
            ]
            load = "a request at each target at once" if at_once else "one request at a time"
            cells: list[tuple[str, ...]] = [
                (
                    row["target"],
                    row["drafter"],
                    row["shape"],
                    number(row["emitted_per_round"]),
                    with_interval(row["tokens_per_second"], 1),
                    with_interval(row["over_off"]),
                    str(row["late_drafts"]),
                )
                for row in rows
            ]
            yield f"Temperature {temperature:g}, {load}", COLUMNS, cells
