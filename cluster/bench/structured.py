"""`dendro bench structured`: the masks of a round, with and without a tree, and the rounds of whole answers, with a
drafter that follows the structure and with one that ignores it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from tree_layers.checkpoint import read_facts

from cluster.bench.compared import differing, stats_of
from cluster.bench.schemas import random_schema
from cluster.checkpoint_tokenizer import load_tokenizer, token_bytes_of
from cluster.config import demo_config
from cluster.measure.bench import Bench, ReportTable, option, seed, temperatures
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.running import local_client

PROMPT = "config = json.loads("
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


@dataclass(frozen=True, slots=True)
class StructuredOptions:
    schemas: int = option("Random schemas.", 40, 4, least=1)
    tokens: int = option("The most tokens of an answer.", 128, 64, least=1)
    temperatures: tuple[float, ...] = temperatures()
    seed: int = seed()


async def measure(options: StructuredOptions, begin: Begin) -> dict[str, Any]:
    config = demo_config()
    target = next(iter(config.targets.values()))
    vocabulary = read_facts(target.checkpoint, target.tokenizer).vocabulary

    def grammars_of() -> Grammars:
        return Grammars(lambda: token_bytes_of(load_tokenizer(target.tokenizer_folder)), vocabulary)

    without = {name: drafter.model_copy(update={"structures": False}) for name, drafter in config.drafters.items()}
    async with (
        local_client(config) as follows,
        local_client(config.model_copy(update={"drafters": without})) as ignores,
    ):
        return await measure_structured({FOLLOWS: follows, IGNORES: ignores}, grammars_of, options, begin)


async def measure_structured(
    clients: Mapping[str, Asking], grammars_of: Callable[[], Grammars], options: StructuredOptions, begin: Begin
) -> dict[str, Any]:
    """clients: by what their drafters do with structures   grammars_of: makes a compiler that has compiled nothing"""
    answered: list[Row] = []
    masks: list[Row] = []
    differences: list[str] = []
    structures = [
        Structure.json_schema(random_schema(Random(options.seed + index))) for index in range(options.schemas)
    ]
    for temperature in options.temperatures:
        step = begin(f"answers at temperature {temperature:g}", len(CASES) * options.schemas)
        found: dict[tuple[str, str, str], list[Completion]] = {case: [] for case in CASES}
        for index, structure in enumerate(structures):  # the cases take turns
            for kind, way, drafter in CASES:
                structured = kind == SCHEMAS
                request: Options = {
                    "max_new_tokens": options.tokens,
                    "temperature": temperature,
                    "seed": options.seed + index,
                    "structure": structure if structured else None,
                    "ignore_end": not structured,
                    "speculation": Speculation.parse(way),
                }
                done = await clients[drafter].generate_text(PROMPT, **request)
                found[kind, way, drafter].append(done)
                step()
        different = differing(found, lambda case: (case[0], OFF, FOLLOWS))
        differences += [f"temperature {temperature:g}, {line}" for line in different]
        answered += [_answers_row(temperature, *case, answers) for case, answers in found.items()]
        step = begin(f"masks at temperature {temperature:g}", options.schemas)
        emitted = {  # rows of a round -> tokens that it emits
            rows: _answers_row(temperature, SCHEMAS, way, FOLLOWS, found[SCHEMAS, way, FOLLOWS])["emitted_per_round"]
            for rows, way in ((1, OFF), (TREE.rows, str(TREE)))
        }
        for row in await _mask_rows(grammars_of(), structures, found[SCHEMAS, OFF, FOLLOWS], step):
            masks.append({"temperature": temperature, **row, "us_per_token": row["mean_us"] / emitted[row["rows"]]})
    return {"plan": {}, "answers": answered, "masks": masks, "differences": differences}


def _answers_row(temperature: float, kind: str, way: str, drafter: str, answers: Sequence[Completion]) -> Row:
    stats = stats_of(answers)
    rounds, emitted = sum(each.rounds for each in stats), sum(each.emitted_tokens for each in stats)
    after, decode_us = sum(each.decode_tokens for each in stats), sum(each.decode_us for each in stats)
    return {
        "temperature": temperature,
        "structure": kind,
        "way": way,
        "drafter": "-" if way == OFF or kind == UNSTRUCTURED else drafter,
        "ended": f"{sum(each.complete.finish is not Finish.LENGTH for each in answers)} of {len(answers)}",
        "tokens": emitted,
        "emitted_per_round": emitted / rounds,
        "draft_ms_per_round": sum(each.draft_us for each in stats) / rounds / 1e3,
        "verify_ms_per_round": sum(each.verify_us for each in stats) / rounds / 1e3,
        "tokens_per_s": 1e6 * after / decode_us if decode_us else None,
    }


async def _mask_rows(
    grammars: Grammars, structures: Sequence[Structure], answers: Sequence[Completion], step: Step
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


STRUCTURED = Bench(
    "structured",
    "Measure answers to random JSON schemas on the demo's models, beside answers without a structure: tokens per "
    "round, draft and verification time with speculation off, fixed and chosen, by a drafter that follows the "
    "structure and by one that ignores it, and the time of a round's masks with and without a tree. Exit status 1 "
    "where an answer differs from plain decoding.",
    "Four schemas, answers of at most 64 tokens.",
    StructuredOptions,
    measure,
    facts=(
        f"The demo's target and drafter, after `{PROMPT}`; structure none: as many answers without one, of exactly so "
        f"many tokens. The drafter {FOLLOWS}: its guesses are masked; {IGNORES}: `structures: false` in its "
        "configuration",
    ),
    tables=(
        ReportTable(
            "Answers",
            "answers",
            "structure; T = temperature:g; way; drafter; ended; tokens; tokens per round = emitted_per_round:.2f; "
            "draft ms per round = draft_ms_per_round:.2f; verify ms per round = verify_ms_per_round:.2f; tokens/s = "
            "tokens_per_s:.0f",
        ),
        ReportTable(
            "Masks",
            "masks",
            "rows of a mask = rows; T = temperature:g; rounds; median us = median_us:.0f; mean us = mean_us:.0f; 99 % "
            "below us = p99_us:.0f; us per emitted token = us_per_token:.0f; compile ms = compile_ms:.1f",
        ),
    ),
    threads=1,
    code=("protos/dendro/grammars.py", "protos/dendro/schemas.py", "verifier_service", "drafter_service"),
)
bench_structured = STRUCTURED.command()
