"""`dendro bench load`: start a cluster and the library, load both, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.client import AsyncClient
from dendro.errors import BadRequest

from cluster import deploy
from cluster.bench.against_off import BLOCK_ANSWERS, FIRST_S, PairsPlan, aims_against_off, measure_against_off
from cluster.bench.baselines import BaselineProcess
from cluster.bench.hops import hop_process
from cluster.bench.load import CONTINUOUS_REPETITIONS, Loader, LoadPlan, aims_of, measure_load, rows_of
from cluster.bench.load_report import facts_of, tables_of
from cluster.bench.load_report import plot as draw
from cluster.bench.machine import report_head
from cluster.bench.measurement import Begin
from cluster.bench.options import (
    Default,
    MarkdownFile,
    Models,
    PlotFile,
    numbers_in,
    parse_temperatures,
    present,
    seed_option,
    with_bars,
)
from cluster.bench.targets import COSTLY, DEMO, THREADS, Which, parameter_count, target_config
from cluster.command_options import JsonFile
from cluster.config import DEMO_MODELS, Config
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.engines import engine_environment
from cluster.running import running_cluster
from cluster.tables import PLAIN_WIDTH
from cluster.training.acceptance import PROMPT_TOKENS

CLIENTS = Default((1, 2, 4, 8, 16, 32), quick=(1, 4))
PAIRED_CLIENTS, PAIRED_TEMPERATURES = Default((1, 4, 8, 32), quick=(1, 4)), "0,0.8"
ARRIVALS = Default((0.25, 0.5, 0.75, 1.0), quick=(0.5,))
TOKENS = Default(64, quick=32)
ANSWERS = Default(2, quick=1)
REQUESTS = 16
REPETITIONS = Default(5, quick=1)
PROMPTS = 32


def parse_clients(text: str) -> tuple[int, ...]:
    """Parse `1,4,16`: distinct integers, each at least 1."""
    return tuple(sorted(numbers_in("clients", text, int, 1)))


def config_for(models: Path, name: str, texts: int) -> Config:
    """The configuration of a target with room for so many texts at every replica."""
    config = target_config(models, name)
    (target,) = config.targets.values()
    target = target.model_copy(update={"max_sessions": max(texts, target.max_sessions)})
    drafters = {
        drafter: each.model_copy(update={"max_sessions": max(texts, each.max_sessions)})
        for drafter, each in config.drafters.items()
    }
    return config.model_copy(update={"targets": {name: target}, "drafters": drafters})


async def stats_of(target: str) -> Mapping[str, int]:
    """Counters of the running cluster's verifier and router, as a Loader takes them."""
    verifier, router = await asyncio.gather(
        *(asyncio.to_thread(deploy.deployment_stats, name) for name in (f"verifier-{target}", "router"))
    )
    return verifier | {f"router_{name}": value for name, value in router.items()}


async def run_against_off(plan: PairsPlan, name: str, models: Path, progress: Begin) -> dict[str, Any]:
    """Run the policy's comparison with no speculation on the target of that name; returns the report."""
    started = time.monotonic()
    config = config_for(models, name, max(plan.clients))
    (target,) = config.targets.values()

    @asynccontextmanager
    async def fresh_router(temperature: float) -> AsyncIterator[Loader]:
        async with running_cluster(config) as address, AsyncClient(address, proxy=False) as client:
            yield Loader(client, plan.prompts, plan.tokens, partial(stats_of, name), temperature)

    blocks = await measure_against_off(plan, fresh_router, progress("blocks", plan.blocks))
    return {
        **report_head("load", started, False, 0, THREADS),
        "plan": {
            "target": name,
            "parameters": parameter_count(target.checkpoint),
            "dtype": target.dtype,
            "drafter": ", ".join(config.drafters),
            "tokens": plan.tokens,
            "prompt_tokens": PROMPT_TOKENS,
            "answers": plan.answers or f"{BLOCK_ANSWERS} / clients",
            "pairs": plan.pairs,
        },
        "silent": {},
        "rows": rows_of(blocks),
        "aims": aims_against_off(blocks),
    }


async def run_load(plan: LoadPlan, models: Path, progress: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    config = config_for(models, COSTLY, max(plan.clients))
    (target,) = config.targets.values()
    library = BaselineProcess(target.checkpoint, None, target.dtype, target.threads, engine_environment(target.threads))
    try:
        async with (
            running_cluster(config) as address,
            AsyncClient(address, proxy=False) as client,
            library,
            hop_process() as hops,
        ):
            loader = Loader(client, plan.prompts, plan.tokens, partial(stats_of, COSTLY))
            step = progress("loads", plan.blocks)
            blocks, silent = await measure_load(plan, loader, library, hops.hop_us, step)
    finally:
        library.stop()
    return {
        **report_head("load", started, False, plan.seed, THREADS),
        "plan": {
            "target": COSTLY,
            "parameters": parameter_count(target.checkpoint),
            "dtype": target.dtype,
            "drafter": ", ".join(config.drafters),
            "tokens": plan.tokens,
            "prompt_tokens": PROMPT_TOKENS,
            "answers": plan.answers,
            "requests": plan.requests,
            "repetitions": plan.repetitions,
            "continuous_repetitions": min(CONTINUOUS_REPETITIONS, plan.repetitions),
        },
        "silent": silent,
        "rows": rows_of(blocks),
        "aims": aims_of(blocks, plan.clients),
    }


def bench_load(
    quick: Annotated[bool, typer.Option("--quick", help="One or two minutes: few clients, one repetition.")] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    clients: Annotated[str | None, CLIENTS.option("Clients of the closed loops, separated by commas.")] = None,
    tokens: Annotated[int | None, TOKENS.option("New tokens of every answer.", least=2)] = None,
    answers: Annotated[int | None, ANSWERS.option("Answers for every client of a closed loop.", least=1)] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of every open loop.")] = REQUESTS,
    repetitions: Annotated[int | None, REPETITIONS.option("Repetitions of every block.", least=1)] = None,
    seed: Annotated[int, seed_option("the order and of the arrivals")] = 0,
    against_off: Annotated[
        bool,
        typer.Option(
            "--against-off",
            help="Only the policy and no speculation, in alternating blocks at 1, 4, 8 and 32 clients, each from a "
            "fresh router, for a minute of the policy or longer: 20 minutes.",
        ),
    ] = False,
    target: Annotated[
        Which | None,
        typer.Option(
            help="The demo or the costly target, with --against-off. (default demo)",
            metavar="<demo|costly>",
            show_default=False,
        ),
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="Sampling temperatures with --against-off. (default 0,0.8)", show_default=False)
    ] = None,
    models: Models = DEMO_MODELS,
) -> None:
    """Load a cluster with many clients, on the costly target: closed loops of increasing numbers of clients, then
    Poisson arrivals; without speculation, with one tree and with the policy, beside transformers' batches.

    Takes about 25 minutes on two cores.
    """
    if target is not None and not against_off:
        raise BadRequest("target", "has an effect with --against-off alone; all else is on the costly target")
    if target not in (None, Which.DEMO, Which.COSTLY):
        raise BadRequest("target", f"is {target}, but load has the demo and the costly target")
    if temperatures is not None and not against_off:
        raise BadRequest("temperatures", "has an effect with --against-off alone; all else is greedy")
    if against_off and (plot is not None or requests != REQUESTS or seed):
        raise BadRequest("against-off", "has neither a plot, nor open loops of requests, nor an order drawn by a seed")
    found = held_out_prompts(PROMPTS, PROMPT_TOKENS, load_tokenizer(models), models)
    prompts = tuple(prompt.token_ids for prompt in found)
    if against_off:
        pairs = PairsPlan(
            prompts=prompts,
            tokens=TOKENS.chosen(tokens, quick),
            clients=parse_clients(clients) if clients is not None else PAIRED_CLIENTS.at(quick),
            temperatures=parse_temperatures(temperatures or PAIRED_TEMPERATURES),
            answers=ANSWERS.quick if quick and answers is None else answers,
            pairs=REPETITIONS.chosen(repetitions, quick),
            least_s=0.0 if quick or repetitions is not None else FIRST_S,
        )
        name = COSTLY if target is Which.COSTLY else DEMO
        report = with_bars(lambda begin: asyncio.run(run_against_off(pairs, name, models, begin)))
        present(report, facts_of(report), tables_of(report), json, markdown, width=PLAIN_WIDTH + 30)
        return
    plan = LoadPlan(
        prompts=prompts,
        tokens=TOKENS.chosen(tokens, quick),
        clients=parse_clients(clients) if clients is not None else CLIENTS.at(quick),
        answers=ANSWERS.chosen(answers, quick),
        arrivals=ARRIVALS.at(quick),
        requests=requests,
        repetitions=REPETITIONS.chosen(repetitions, quick),
        seed=seed,
    )
    report = with_bars(lambda begin: asyncio.run(run_load(plan, models, begin)))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw, width=PLAIN_WIDTH + 30)
