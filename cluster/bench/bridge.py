"""Tokens per round with a drafter of another tokenizer, through each bridge, beside the demo's drafter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dendro.speculation import Speculation

from cluster.config import BridgeChoice, Config
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Cells, Report, Row, machine_facts, number, target_fact
from cluster.running import local_client

OFF = "off"
SHAPES = ("(1,1,1,1)", "(3,2,1)", "(3,2,2,1,1)")
NONE, STRING, INTERSECTION = "none", "string", "intersection"


@dataclass(frozen=True, slots=True)
class BridgeCase:
    """A drafter, and what is between its tokenizer and the target's."""

    drafter: str
    checkpoint: Path
    bridge: BridgeChoice

    def config(self, target: Path) -> Config:
        """The drafter is in float32: its guesses then depend on the text alone."""
        return Config.of(
            {
                "targets": {"target": {"checkpoint": target}},
                "drafters": {"drafter": {"checkpoint": self.checkpoint, "bridge": self.bridge, "dtype": "float32"}},
                "speculation": {"proposers": []},
            },
            Path.cwd(),
        )


def cases_of(demo: Path, other: Path) -> tuple[BridgeCase, ...]:
    """The demo's drafter as it is; the same through strings, which shows what the bridge itself costs; the other."""
    return (
        BridgeCase("demo", demo, "none"),
        BridgeCase("demo", demo, "string"),
        BridgeCase("other", other, "string"),
        BridgeCase("other", other, "intersection"),
    )


async def measure_bridges(
    target: Path,
    cases: Sequence[BridgeCase],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    temperatures: Sequence[float],
    seed: int,
    begin: Begin,
) -> tuple[list[Row], list[str]]:
    """Rows of all cases, and the answers that speculation changed."""
    rows: list[Row] = []
    differences: list[str] = []
    plain: dict[float, list[tuple[int, ...]]] = {}
    for case in cases:
        ways = SHAPES if plain else (OFF, *SHAPES)
        step = begin(f"{case.drafter}, bridge {case.bridge}", len(temperatures) * len(ways) * len(prompts))
        async with local_client(case.config(target)) as client:
            for temperature in temperatures:
                for shape in ways:
                    answers, row = await _row(client, prompts, shape, temperature, tokens, seed, step)
                    if shape == OFF:
                        plain[temperature] = answers
                        continue
                    rows.append({"drafter": case.drafter, "bridge": case.bridge, **row})
                    name = f"{case.drafter}, bridge {case.bridge}, {shape}, temperature {temperature:g}"
                    pairs = zip(answers, plain[temperature], strict=True)
                    differences += [name for answer, wanted in pairs if answer != wanted]
    return rows, differences


async def _row(
    client: Any,
    prompts: Sequence[Sequence[int]],
    shape: str,
    temperature: float,
    tokens: int,
    seed: int,
    step: Step,
) -> tuple[list[tuple[int, ...]], Row]:
    answers, emitted, drafted, accepted, rounds = [], 0, 0, 0, 0
    for prompt in prompts:
        done = await client.generate_text(
            prompt,
            max_new_tokens=tokens,
            temperature=temperature,
            seed=seed,
            ignore_end=True,
            speculation=Speculation.parse(shape),
        )
        stats = done.complete.speculation
        answers.append(tuple(done.token_ids))
        emitted, rounds = emitted + stats.emitted_tokens, rounds + stats.rounds
        drafted, accepted = drafted + stats.drafted_tokens, accepted + stats.accepted_tokens
        step()
    row = {"temperature": temperature, "shape": shape, "rounds": rounds, "emitted_per_round": emitted / rounds}
    return answers, row | {"guesses_per_round": drafted / rounds, "accepted_share": accepted / max(drafted, 1)}


def facts_of(report: Report) -> Iterator[str]:
    """What the tables need to be understood."""
    plan = report["plan"]
    yield from machine_facts(report)
    yield target_fact("demo", plan["target"])
    yield (
        f"{plan['prompts']} held-out prompts of {plan['prompt_tokens']} tokens, answers of {plan['tokens']}; the other "
        f"drafter: {plan['common']}, trained for {plan['minutes']:g} minutes"
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """Tokens per round, a row for each drafter and bridge."""
    found: dict[tuple[str, str], dict[tuple[float, str], Mapping[str, Any]]] = {}
    for row in report["rows"]:
        found.setdefault((row["drafter"], row["bridge"]), {})[row["temperature"], row["shape"]] = row
    columns = list(dict.fromkeys((row["temperature"], row["shape"]) for row in report["rows"]))
    heads = ("drafter", "bridge", *(f"T {temperature:g}, {shape}" for temperature, shape in columns))
    cells = [(*names, *(_cell(rows[column]) for column in columns)) for names, rows in found.items()]
    yield "Tokens per round, of rows per round", heads, cells


def _cell(row: Mapping[str, Any]) -> str:
    return f"{number(row['emitted_per_round'])} of {number(1 + row['guesses_per_round'], 1)}"
