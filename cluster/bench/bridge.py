"""`dendro bench bridge`: tokens per round with a drafter of another tokenizer, through each bridge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dendro.client import Asking
from dendro.speculation import Speculation

from cluster.bench.bridge_drafters import make_drafter
from cluster.config import BridgeChoice, Config, DrafterConfig, TargetConfig, demo_models
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.engines import load_bridge
from cluster.measure.bench import Bench, ReportTable, models, option, seed, temperatures
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.running import local_client
from cluster.training.acceptance import PROMPT_TOKENS

OFF = "off"
SHAPES = ("(1,1,1,1)", "(3,2,1)", "(3,2,2,1,1)")
THREADS = 1


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    prompts: int = option("Prompts.", 16, 3, least=1)
    tokens: int = option("Tokens of an answer.", 64, 32, least=1)
    temperatures: tuple[float, ...] = temperatures()
    out: Path = option("Folder of the made drafter; one that is there is not trained again.", Path("bridge-drafter"))
    minutes: float = option("Training of the made drafter.", 10.0, least=0)
    vocabulary: int = option("Tokens of its tokenizer.", 2048, least=257, most=65536)
    training_threads: int = option("Threads of its training.", 2, least=1)
    seed: int = seed()
    models: Path = models()


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
    target: Path, cases: Sequence[BridgeCase], prompts: Sequence[Sequence[int]], options: BridgeOptions, begin: Begin
) -> tuple[list[Row], list[str]]:
    """A row for each case and temperature, and the answers that speculation changed."""
    rows: list[Row] = []
    differences: list[str] = []
    plain: dict[float, list[tuple[int, ...]]] = {}
    for case in cases:
        ways = SHAPES if plain else (OFF, *SHAPES)
        step = begin(f"{case.drafter}, bridge {case.bridge}", len(options.temperatures) * len(ways) * len(prompts))
        async with local_client(case.config(target)) as client:
            for temperature in options.temperatures:
                row: Row = {"temperature": temperature, "drafter": case.drafter, "bridge": case.bridge, "per_round": {}}
                for shape in ways:
                    answers, per_round = await _answers(client, prompts, shape, temperature, options, step)
                    if shape == OFF:
                        plain[temperature] = answers
                        continue
                    row["per_round"][shape] = per_round
                    name = f"{case.drafter}, bridge {case.bridge}, {shape}, temperature {temperature:g}"
                    pairs = zip(answers, plain[temperature], strict=True)
                    differences += [name for answer, wanted in pairs if answer != wanted]
                rows.append(row)
    return rows, differences


async def _answers(
    client: Asking,
    prompts: Sequence[Sequence[int]],
    shape: str,
    temperature: float,
    options: BridgeOptions,
    step: Step,
) -> tuple[list[tuple[int, ...]], list[float]]:
    """The answers, and the tokens and the rows of their mean round."""
    answers, emitted, drafted, rounds = [], 0, 0, 0
    for prompt in prompts:
        done = await client.generate_text(
            prompt,
            max_new_tokens=options.tokens,
            temperature=temperature,
            seed=options.seed,
            ignore_end=True,
            speculation=Speculation.parse(shape),
        )
        stats = done.complete.speculation
        answers.append(tuple(done.token_ids))
        emitted, drafted, rounds = emitted + stats.emitted_tokens, drafted + stats.drafted_tokens, rounds + stats.rounds
        step()
    return answers, [round(emitted / rounds, 4), round(1 + drafted / rounds, 4)]


async def measure(options: BridgeOptions, begin: Begin) -> dict[str, Any]:
    models = demo_models(options.models)
    target = models / "target"
    if not (options.out / "model.safetensors").exists():
        torch.set_num_threads(options.training_threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        make_drafter(models / "mamba2", options.out, options.vocabulary, options.minutes, options.seed)
        torch.set_num_threads(THREADS)
    prompts = held_out_prompts(options.prompts, PROMPT_TOKENS, load_tokenizer(models), models)
    ids = [prompt.token_ids for prompt in prompts]
    rows, differences = await measure_bridges(target, cases_of(models / "mamba2", options.out), ids, options, begin)
    drafter = DrafterConfig(checkpoint=options.out.resolve(), bridge="string")
    bridge = load_bridge("other", drafter, "target", TargetConfig(checkpoint=target))
    return {"plan": {"common": str(bridge).partition("; ")[2]}, "rows": rows, "differences": differences}


BRIDGE = Bench(
    "bridge",
    "Train a small Mamba-2 with another tokenizer on the standard library's text, and measure the tokens that a round "
    "emits with it through either bridge, beside the demo's drafter. Exit status 1 where an answer differs from plain "
    "decoding.",
    "Three prompts, answers of 32 tokens.",
    BridgeOptions,
    measure,
    facts=(f"Held-out prompts of {PROMPT_TOKENS} tokens. The other drafter: {{common}}",),
    tables=(
        ReportTable(
            "Tokens per round, rows per round; temperature {temperature:g}",
            "rows",
            "drafter; bridge; * = per_round/*:.2f",
        ),
    ),
    threads=THREADS,
    code=("drafter_service/bridge",),
)
bench_bridge = BRIDGE.command()
