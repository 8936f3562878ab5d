"""`dendro bench structured`: answers to random JSON schemas, with and without trees, by drafters that follow the
schemas and that ignore them, and the time of their masks."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer
from dendro.grammars import Grammars
from tree_layers.checkpoint import read_facts

from cluster.bench.structured import FOLLOWS, IGNORES, facts_of, measure_structured, tables_of
from cluster.checkpoint_tokenizer import load_tokenizer, token_bytes_of
from cluster.command_options import JsonFile
from cluster.config import demo_config
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import (
    Default,
    MarkdownFile,
    Temperatures,
    parse_temperatures,
    present,
    seed_option,
    with_bars,
)
from cluster.running import local_client

PROMPT = "config = json.loads("
SCHEMAS = Default(40, quick=4)
TOKENS = Default(128, quick=64)


def run_structured(
    schemas: int, tokens: int, temperatures: tuple[float, ...], seed: int, begin: Begin
) -> dict[str, Any]:
    """Run the whole measurement on the demo's models, in this process; returns the report."""
    started, config = time.monotonic(), demo_config()
    target = next(iter(config.targets.values()))
    vocabulary = read_facts(target.checkpoint, target.tokenizer).vocabulary

    def grammars_of() -> Grammars:
        return Grammars(lambda: token_bytes_of(load_tokenizer(target.tokenizer_folder)), vocabulary)

    without = {name: drafter.model_copy(update={"structures": False}) for name, drafter in config.drafters.items()}

    async def run() -> tuple[list[dict[str, Any]], list[str]]:
        plan = grammars_of, PROMPT, schemas, tokens, temperatures, seed, begin
        async with (
            local_client(config) as follows,
            local_client(config.model_copy(update={"drafters": without})) as ignores,
        ):
            return await measure_structured({FOLLOWS: follows, IGNORES: ignores}, *plan)

    rows, differences = asyncio.run(run())
    plan = {"schemas": schemas, "tokens": tokens, "prompt": PROMPT}
    head = report_head("structured", started, True, seed, target.threads)
    return {**head, "plan": plan, "rows": rows, "differences": differences, "aims": []}


def bench_structured(
    quick: Annotated[bool, typer.Option("--quick", help="Four schemas, answers of at most 64 tokens.")] = False,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    schemas: Annotated[int | None, SCHEMAS.option("Random schemas.", least=1)] = None,
    tokens: Annotated[int | None, TOKENS.option("The most tokens of an answer.", least=1)] = None,
    temperatures: Temperatures = "0,1",
    seed: Annotated[int, seed_option("schemas and sampling")] = 0,
) -> None:
    """Measure answers to random JSON schemas on the demo's models, beside answers without a structure: tokens per
    round, draft and verification time with speculation off, fixed and chosen, by a drafter that follows the structure
    and by one that ignores it, and the time of a round's masks with and without a tree. Exit status 1 where an answer
    differs from plain decoding.
    """
    drawn = parse_temperatures(temperatures)
    counts = SCHEMAS.chosen(schemas, quick), TOKENS.chosen(tokens, quick)
    report = with_bars(lambda begin: run_structured(*counts, drawn, seed, begin))
    present(report, facts_of(report), tables_of(report), json, markdown, differences=report["differences"])
