"""`dendro bench bridge`: tokens per round with a drafter of another tokenizer, through each bridge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from dendro.answer import Completion
from dendro.speculation import Speculation

from cluster.bench.bridge_drafters import make_drafter
from cluster.bench.compared import Answers, differing, emitted_per_round, stats_of
from cluster.config import BridgeChoice, Config, DrafterConfig, TargetConfig, demo_models
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.engines import load_bridge
from cluster.measure.bench import Bench, ReportTable, models, option, seed, temperatures
from cluster.measure.measurement import Begin
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

    def __str__(self) -> str:
        return f"{self.drafter}, bridge {self.bridge}"

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


Way = tuple[BridgeCase, float, str]
"""A case, a temperature and a shape."""


async def answers_of(
    target: Path, cases: Sequence[BridgeCase], prompts: Sequence[Sequence[int]], options: BridgeOptions, begin: Begin
) -> dict[Way, list[Completion]]:
    """The answers of each case; plain decoding is asked at the first one."""
    found: dict[Way, list[Completion]] = {}
    for case in cases:
        ways = list(product(options.temperatures, SHAPES if found else (OFF, *SHAPES)))
        step = begin(str(case), len(ways) * len(prompts))
        async with local_client(case.config(target)) as client:
            for temperature, shape in ways:
                own = found[case, temperature, shape] = list[Completion]()
                for prompt in prompts:
                    done = await client.generate_text(
                        prompt,
                        max_new_tokens=options.tokens,
                        temperature=temperature,
                        seed=options.seed,
                        ignore_end=True,
                        speculation=Speculation.parse(shape),
                    )
                    own.append(done)
                    step()
    return found


def rows_of(answers: Answers[Way]) -> list[Row]:
    """A row for each case and temperature; of each shape the tokens and the rows of its mean round."""
    rows: dict[tuple[BridgeCase, float], Row] = {}
    for (case, temperature, shape), own in answers.items():
        head = {"temperature": temperature, "drafter": case.drafter, "bridge": case.bridge, "per_round": {}}
        row = rows.setdefault((case, temperature), head)
        if shape != OFF:
            stats = stats_of(own)
            drafted = sum(each.drafted_tokens for each in stats) / sum(each.rounds for each in stats)
            row["per_round"][shape] = [round(emitted_per_round(own), 4), round(1 + drafted, 4)]
    return list(rows.values())


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
    cases = cases_of(models / "mamba2", options.out)
    answers = await answers_of(target, cases, ids, options, begin)
    differences = differing(answers, lambda way: (cases[0], way[1], OFF))
    drafter = DrafterConfig(checkpoint=options.out.resolve(), bridge="string")
    bridge = load_bridge("other", drafter, "target", TargetConfig(checkpoint=target))
    return {"plan": {"common": str(bridge).partition("; ")[2]}, "rows": rows_of(answers), "differences": differences}


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
