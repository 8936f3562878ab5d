"""`dendro bench bridge`: make a drafter of another tokenizer, measure it through both bridges, report."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cluster.bench.bridge import cases_of, facts_of, measure_bridges, tables_of
from cluster.bench.bridge_drafters import make_drafter
from cluster.command_options import JsonFile
from cluster.config import DEMO_MODELS, DrafterConfig, TargetConfig, demo_models
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.engines import load_bridge
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import (
    Default,
    MarkdownFile,
    Models,
    Temperatures,
    parse_temperatures,
    present,
    seed_option,
    with_bars,
)
from cluster.measure.targets import parameter_count

PROMPT_TOKENS = 128
PROMPTS = Default(16, quick=3)
TOKENS = Default(64, quick=32)
THREADS = 1


def run_bridge(
    models: Path,
    other: Path,
    minutes: float,
    prompts: int,
    tokens: int,
    temperatures: tuple[float, ...],
    seed: int,
    begin: Begin,
) -> dict[str, Any]:
    """Run the whole measurement; returns the report. other: the drafter's folder"""
    started, target = time.monotonic(), models / "target"
    given = held_out_prompts(prompts, PROMPT_TOKENS, load_tokenizer(models), models)
    ids = [prompt.token_ids for prompt in given]
    rows, differences = asyncio.run(
        measure_bridges(target, cases_of(models / "mamba2", other), ids, tokens, temperatures, seed, begin)
    )
    bridge = load_bridge(
        "other", DrafterConfig(checkpoint=other.resolve(), bridge="string"), "target", TargetConfig(checkpoint=target)
    )
    plan = {
        "prompts": prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": tokens,
        "minutes": minutes,
        "common": str(bridge).partition("; ")[2],
        "target": {"parameters": parameter_count(target), "dtype": "bfloat16"},
    }
    head = report_head("bridge", started, True, seed, THREADS)
    return {**head, "plan": plan, "rows": rows, "differences": differences, "aims": []}


def bench_bridge(
    quick: Annotated[bool, typer.Option("--quick", help="Three prompts, answers of 32 tokens.")] = False,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    models: Models = DEMO_MODELS,
    out: Annotated[
        Path, typer.Option(help="Folder of the made drafter; one that is there is not trained again.")
    ] = Path("bridge-drafter"),
    minutes: Annotated[float, typer.Option(min=0.01, help="Training of the made drafter.")] = 10,
    vocabulary: Annotated[int, typer.Option(min=257, max=65536, help="Tokens of its tokenizer.")] = 2048,
    threads: Annotated[int, typer.Option(min=1, help="Threads of its training.")] = 2,
    prompts: Annotated[int | None, PROMPTS.option("Prompts.", least=1)] = None,
    tokens: Annotated[int | None, TOKENS.option("Tokens of an answer.", least=1)] = None,
    temperatures: Temperatures = "0,1",
    seed: Annotated[int, seed_option("training and sampling")] = 0,
) -> None:
    """Train a small Mamba-2 with another tokenizer on the standard library's text, and measure the tokens that a round
    emits with it through either bridge, beside the demo's drafter. Exit status 1 where an answer differs from plain
    decoding.
    """
    drawn = parse_temperatures(temperatures)
    models = demo_models(models)
    if not (out / "model.safetensors").exists():
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        make_drafter(models / "mamba2", out, vocabulary, minutes, seed)
        torch.set_num_threads(THREADS)
    counts = PROMPTS.chosen(prompts, quick), TOKENS.chosen(tokens, quick)
    report = with_bars(lambda begin: run_bridge(models, out, minutes, *counts, drawn, seed, begin))
    present(report, facts_of(report), tables_of(report), json, markdown, differences=report["differences"])
