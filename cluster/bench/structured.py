"""What structured answers cost: the masks of a round, with and without a tree, and the rounds of whole answers, with a
drafter that follows the structure and with one that does not."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from dendro.answer import Completion
from dendro.client import Asking
from dendro.grammars import Grammars, GrammarText
from dendro.options import Options
from dendro.shapes import LevelShape
from dendro.speculation import Speculation
from dendro.structure import Structure
from dendro.text import Finish
from dendro.tree import DraftTree

from cluster.bench.schemas import random_schema
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Cells, Report, Row, machine_facts, number

OFF = "off"
WAYS = (OFF, "(3,2,1)", "auto")
TREE = LevelShape((3, 2, 1))
UNSTRUCTURED = "none"
SCHEMAS = "random schemas"
FOLLOWS, IGNORES = "follows it", "ignores it"
"""What the drafter does with the structure."""
CASES = (
    *((SCHEMAS, way, FOLLOWS) for way in WAYS),
    *((SCHEMAS, way, IGNORES) for way in WAYS if way != OFF),
    *((UNSTRUCTURED, way, FOLLOWS) for way in WAYS),
)
"""Structures, ways and drafters of the measured answers."""


async def measure_structured(
    clients: Mapping[str, Asking],
    grammars_of: Callable[[], Grammars],
    prompt: str,
    schemas: int,
    tokens: int,
    temperatures: Sequence[float],
    seed: int,
    begin: Begin,
) -> tuple[list[Row], list[str]]:
    """Rows of answers and of masks, and the answers that speculation changed. clients: by what their drafters do with
    structures   grammars_of: makes a compiler that has compiled nothing"""
    rows: list[Row] = []
    differences: list[str] = []
    structures = [Structure.json_schema(random_schema(Random(seed + index))) for index in range(schemas)]
    for temperature in temperatures:
        step = begin(f"answers at temperature {temperature:g}", len(CASES) * schemas)
        found: dict[tuple[str, str, str], list[Completion]] = {case: [] for case in CASES}
        for index, structure in enumerate(structures):  # the cases take turns
            for kind, way, drafter in CASES:
                structured = kind == SCHEMAS
                options: Options = {
                    "max_new_tokens": tokens,
                    "temperature": temperature,
                    "seed": seed + index,
                    "structure": structure if structured else None,
                    "ignore_end": not structured,
                    "speculation": Speculation.parse(way),
                }
                done = await clients[drafter].generate_text(prompt, **options)
                found[kind, way, drafter].append(done)
                if done.token_ids != found[kind, OFF, FOLLOWS][index].token_ids:
                    differences.append(f"temperature {temperature:g}, {kind}, {way}, drafter {drafter}, schema {index}")
                step()
        rows += [_answers_row(temperature, *case, answers) for case, answers in found.items()]
        step = begin(f"masks at temperature {temperature:g}", schemas)
        rows += await _mask_rows(grammars_of(), temperature, structures, found[SCHEMAS, OFF, FOLLOWS], step)
    return rows, differences


def _answers_row(temperature: float, kind: str, way: str, drafter: str, answers: Sequence[Completion]) -> Row:
    stats = [each.complete.speculation for each in answers]
    rounds, emitted = sum(each.rounds for each in stats), sum(each.emitted_tokens for each in stats)
    after, decode_us = sum(each.decode_tokens for each in stats), sum(each.decode_us for each in stats)
    return {
        "measured": "answers",
        "temperature": temperature,
        "structure": kind,
        "way": way,
        "drafter": "-" if way == OFF or kind == UNSTRUCTURED else drafter,
        "answers": len(answers),
        "ended": sum(each.complete.finish is not Finish.LENGTH for each in answers),
        "tokens": emitted,
        "emitted_per_round": emitted / rounds,
        "draft_ms_per_round": sum(each.draft_us for each in stats) / rounds / 1e3,
        "verify_ms_per_round": sum(each.verify_us for each in stats) / rounds / 1e3,
        "tokens_per_s": 1e6 * after / decode_us if decode_us else None,
    }


async def _mask_rows(
    grammars: Grammars, temperature: float, structures: Sequence[Structure], answers: Sequence[Completion], step: Step
) -> list[Row]:
    """Masks along finished answers: of the root alone, and of a tree of TREE whose rows are all allowed."""
    compile_us: list[float] = []
    times: dict[int, list[float]] = {}
    await grammars.compiled(Structure.regex("a"))  # reads the tokenizer
    for structure, answer in zip(structures, answers, strict=True):
        began = time.perf_counter()
        grammar = await grammars.compiled(structure)
        compile_us.append(1e6 * (time.perf_counter() - began))
        text = grammar.text(0)
        ids = list(answer.token_ids)
        for place in range(len(ids)):
            text.follow(ids[:place])
            for tree in (DraftTree.root_only(0), _allowed_tree(text, ids[place:])):
                began = time.perf_counter()
                text.masks(tree)
                times.setdefault(tree.rows, []).append(1e6 * (time.perf_counter() - began))
        step()
    return [
        {
            "measured": "masks",
            "temperature": temperature,
            "rows": rows,
            "rounds": len(found),
            "median_us": statistics.median(found),
            "mean_us": statistics.fmean(found),
            "p99_us": float(np.quantile(found, 0.99)),
            "compile_ms": statistics.median(compile_us) / 1e3,
        }
        for rows, found in sorted(times.items())
        if rows in (1, TREE.rows)
    ]


def _allowed_tree(text: GrammarText, rest: Sequence[int]) -> DraftTree:
    """A tree of TREE below the text: at each row the first tokens that the structure allows, on the answer's path its
    own first. Fewer rows where the structure allows fewer."""
    tokens, parents, level = [0], [-1], [(0, True)]
    for depth, width in enumerate(TREE.widths):
        masks, below = text.masks(DraftTree.of(tokens, parents)), []
        for row, right in level:
            allowed = masks.allowed(row)
            others = np.flatnonzero(allowed)[: width + 1].tolist() if allowed is not None else []
            own = [rest[depth]] if right and depth < len(rest) else []
            for token in [*own, *(token for token in others if token not in own)][:width]:
                below.append((len(tokens), bool(own) and token == own[0]))
                tokens.append(token)
                parents.append(row)
        level = below
    return DraftTree.of(tokens, parents)


def facts_of(report: Report) -> Iterator[str]:
    """What the tables need to be understood."""
    plan = report["plan"]
    yield from machine_facts(report)
    yield (
        f"The demo's target and drafter, after {json.dumps(plan['prompt'])}; {plan['schemas']} random schemas, answers "
        f"of at most {plan['tokens']} tokens; structure none: as many answers without one, of exactly so many tokens. "
        f"The drafter {FOLLOWS}: its guesses are masked; {IGNORES}: `structures: false` in its configuration"
    )


def tables_of(report: Report) -> Iterator[Cells]:
    """The answers' rounds, and the time of masks."""
    answers = [row for row in report["rows"] if row["measured"] == "answers"]
    masks = [row for row in report["rows"] if row["measured"] == "masks"]
    heads = ("structure", "T", "way", "drafter", "ended", "tokens", "tokens per round")
    yield (
        "Answers",
        (*heads, "draft ms per round", "verify ms per round", "tokens/s"),
        [
            (
                row["structure"],
                f"{row['temperature']:g}",
                row["way"],
                row["drafter"],
                f"{row['ended']} of {row['answers']}",
                str(row["tokens"]),
                number(row["emitted_per_round"]),
                number(row["draft_ms_per_round"]),
                number(row["verify_ms_per_round"]),
                number(row["tokens_per_s"], 0),
            )
            for row in answers
        ],
    )
    times = ("median us", "mean us", "99 % below us", "us per emitted token", "compile ms")
    yield "Masks", ("masks of", "T", "rounds", *times), [_mask_cells(row, answers) for row in masks]


def _mask_cells(row: Row, answers: Sequence[Row]) -> tuple[str, ...]:
    """us per emitted token: the mean, by the tokens that a round without a tree or with one of TREE emits."""
    way = OFF if row["rows"] == 1 else str(TREE)
    emitted: Any = next(
        each["emitted_per_round"]
        for each in answers
        if (each["structure"], each["way"], each["temperature"]) == (SCHEMAS, way, row["temperature"])
        and each["drafter"] != IGNORES
    )
    return (
        f"{row['rows']} row{'s' * (row['rows'] > 1)}",
        f"{row['temperature']:g}",
        str(row["rounds"]),
        number(row["median_us"], 0),
        number(row["mean_us"], 0),
        number(row["p99_us"], 0),
        number(row["mean_us"] / emitted, 0),
        number(row["compile_ms"], 1),
    )
