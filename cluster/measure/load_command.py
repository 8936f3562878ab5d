"""`dendro bench load`: start a cluster and the library, load both, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.client import AsyncClient
from dendro.errors import BadRequest

from cluster import deploy
from cluster.command_options import JsonFile, given_config
from cluster.config import DEMO_MODELS, Config, TargetConfig
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.engines import engine_environment
from cluster.measure.against_off import BLOCK_ANSWERS, FIRST_S, PairsPlan, aims_against_off, measure_against_off
from cluster.measure.baselines import BaselineProcess
from cluster.measure.hops import hop_process
from cluster.measure.load import (
    CONTINUOUS_REPETITIONS,
    WAYS,
    Loader,
    LoadPlan,
    aims_of,
    measure_load,
    own_aims,
    rows_of,
)
from cluster.measure.load_report import facts_of, tables_of
from cluster.measure.load_report import plot as draw
from cluster.measure.machine import report_head
from cluster.measure.measurement import AUTO, OFF, Begin
from cluster.measure.options import (
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
from cluster.measure.ours import TenantRule
from cluster.measure.own_target import own_arms, own_prompts, own_target, prompt_facts
from cluster.measure.speed import Identity
from cluster.measure.targets import COSTLY, DEMO, parameter_count, target_config
from cluster.prompt_files import QUESTIONS, PromptFile
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


@dataclass(frozen=True, slots=True)
class LoadSubject:
    """A configuration of one target, and what is known of the prompts for it."""

    config: Config
    rule: TenantRule | None = None  # None: all answers are of one tenant
    to_end: bool = False  # whether answers stop at their ends
    facts: Mapping[str, Any] = field(default_factory=lambda: {"prompt_tokens": PROMPT_TOKENS})

    @property
    def name(self) -> str:
        (name,) = self.config.targets
        return name

    @property
    def target(self) -> TargetConfig:
        return self.config.targets[self.name]

    def loader(self, client: AsyncClient, plan: LoadPlan | PairsPlan, temperature: float = 0.0) -> Loader:
        stats = partial(stats_of, self.name)
        return Loader(client, plan.prompts, plan.tokens, stats, temperature, self.rule, self.to_end)

    def report_facts(self) -> dict[str, Any]:
        return {
            "target": self.name,
            "parameters": parameter_count(self.target.checkpoint),
            "dtype": self.target.dtype,
            "drafter": ", ".join(self.config.drafters) or "none",
            **self.facts,
        }


def with_room(config: Config, texts: int) -> Config:
    """The configuration of one target with room for so many texts at every replica."""
    ((name, target),) = config.targets.items()
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


async def run_against_off(plan: PairsPlan, loaded: LoadSubject, progress: Begin) -> dict[str, Any]:
    """Run the policy's comparison with no speculation on a target; returns the report."""
    started = time.monotonic()
    config, identity = with_room(loaded.config, max(plan.clients)), Identity()

    @asynccontextmanager
    async def fresh_router(temperature: float) -> AsyncIterator[Loader]:
        async with running_cluster(config.private()) as address, AsyncClient(address, proxy=False) as client:
            loader = loaded.loader(client, plan, temperature)
            yield loader
            identity.add(loader.identity)

    blocks = await measure_against_off(plan, fresh_router, progress("blocks", plan.blocks))
    return {
        **report_head("load", started, False, 0, loaded.target.threads),
        "plan": {
            **loaded.report_facts(),
            "tokens": plan.tokens,
            "answers": plan.answers or f"{BLOCK_ANSWERS} / clients",
            "pairs": plan.pairs,
        },
        "silent": {},
        "identity": identity.as_json(),
        "rows": rows_of(blocks),
        "aims": aims_against_off(blocks),
    }


async def run_load(plan: LoadPlan, loaded: LoadSubject, progress: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    config, target = with_room(loaded.config, max(plan.clients)), loaded.target
    quiet = engine_environment(target.threads) | {"TQDM_DISABLE": "1"}  # no bars of weights that are unpacked
    library = BaselineProcess(target.checkpoint, None, target.dtype, target.threads, quiet)
    try:
        async with (
            running_cluster(config.private()) as address,
            AsyncClient(address, proxy=False) as client,
            library,
            hop_process() as hops,
        ):
            loader = loaded.loader(client, plan)
            step = progress("loads", plan.blocks)
            blocks, silent = await measure_load(plan, loader, library, hops.hop_us, step)
    finally:
        library.stop()
    return {
        **report_head("load", started, False, plan.seed, target.threads),
        "plan": {
            **loaded.report_facts(),
            "tokens": plan.tokens,
            "answers": plan.answers,
            "requests": plan.requests,
            "repetitions": plan.repetitions,
            "continuous_repetitions": min(CONTINUOUS_REPETITIONS, plan.repetitions),
        },
        "silent": silent,
        "identity": loader.identity.as_json(),
        "rows": rows_of(blocks, plan.ways),
        "aims": own_aims(blocks, plan.ways[:-1]) if loaded.to_end else aims_of(blocks, plan.clients),
    }


def bench_load(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="The YAML file of a cluster whose target is loaded with the prompts of a file. Default: the bundled "
            "targets.",
            show_default=False,
        ),
    ] = None,
    prompt_file: PromptFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="One or two minutes: few clients, one repetition.")] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts, the same of each category.")] = PROMPTS,
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
        str | None,
        typer.Option(
            help="With CONFIG the name of its target; else demo or costly, with --against-off. (default demo)",
            show_default=False,
        ),
    ] = None,
    tenants: Annotated[
        TenantRule,
        typer.Option(help="With prompts of a file: each answer of a tenant of its own, or all of a row of one tenant."),
    ] = TenantRule.ANSWERS,
    temperatures: Annotated[
        str | None, typer.Option(help="Sampling temperatures with --against-off. (default 0,0.8)", show_default=False)
    ] = None,
    models: Models = DEMO_MODELS,
) -> None:
    """Load a cluster with many clients, on the costly target: closed loops of increasing numbers of clients, then
    Poisson arrivals; without speculation, with one tree and with the policy, beside transformers' batches.

    Takes about 25 minutes on two cores. With CONFIG or --prompt-file it loads a target of your own after prompts of
    your own, by default some questions of this package, with each of its arms. Exits with status 1 if ours answered
    differently with speculation than without.
    """
    own = config is not None or prompt_file is not None
    if not own:
        _check_bundled(target, against_off, tenants)
    if temperatures is not None and not against_off:
        raise BadRequest("temperatures", "has an effect with --against-off alone; all else is greedy")
    if against_off and (plot is not None or requests != REQUESTS or seed):
        raise BadRequest("against-off", "has neither a plot, nor open loops of requests, nor an order drawn by a seed")
    ids: tuple[tuple[int, ...], ...]
    if own:
        file, chosen = prompt_file or QUESTIONS, own_target(given_config(config), target or "")
        mine = own_prompts(chosen, file, prompts, TOKENS.chosen(tokens, quick))
        ids = tuple(prompt.token_ids for prompt in mine)
        facts = prompt_facts(file, mine, tenants) | {"prompt_tokens": max(map(len, ids))}
        loaded = LoadSubject(chosen, tenants, to_end=True, facts=facts)
    else:
        found = held_out_prompts(prompts, PROMPT_TOKENS, load_tokenizer(models), models)
        ids = tuple(prompt.token_ids for prompt in found)
        name = DEMO if against_off and target != COSTLY else COSTLY
        loaded = LoadSubject(target_config(models, name))
    if against_off:
        pairs = PairsPlan(
            prompts=ids,
            tokens=TOKENS.chosen(tokens, quick),
            clients=parse_clients(clients) if clients is not None else PAIRED_CLIENTS.at(quick),
            temperatures=parse_temperatures(temperatures or PAIRED_TEMPERATURES),
            answers=ANSWERS.quick if quick and answers is None else answers,
            pairs=REPETITIONS.chosen(repetitions, quick),
            least_s=0.0 if quick or repetitions is not None else FIRST_S,
        )
        _present(with_bars(lambda begin: asyncio.run(run_against_off(pairs, loaded, begin))), json, markdown, None)
        return
    plan = LoadPlan(
        prompts=ids,
        tokens=TOKENS.chosen(tokens, quick),
        clients=parse_clients(clients) if clients is not None else CLIENTS.at(quick),
        answers=ANSWERS.chosen(answers, quick),
        arrivals=ARRIVALS.at(quick),
        requests=requests,
        repetitions=REPETITIONS.chosen(repetitions, quick),
        seed=seed,
        ways=(OFF, *own_arms(loaded.config), AUTO) if own else WAYS,
    )
    _present(with_bars(lambda begin: asyncio.run(run_load(plan, loaded, begin))), json, markdown, plot)


def _check_bundled(target: str | None, against_off: bool, tenants: TenantRule) -> None:
    if target is not None and not against_off:
        raise BadRequest("target", "has an effect with --against-off or CONFIG; all else is on the costly target")
    if target not in (None, DEMO, COSTLY):
        raise BadRequest(
            "target", f"is {target}, but load has the demo and the costly target; with CONFIG, name its own"
        )
    if tenants is not TenantRule.ANSWERS:
        raise BadRequest("tenants", "has an effect with CONFIG or --prompt-file alone")


def _present(report: dict[str, Any], json: Path | None, markdown: Path | None, plot: Path | None) -> None:
    differences = report["identity"]["differences"]
    width = PLAIN_WIDTH + 30
    present(
        report, facts_of(report), tables_of(report), json, markdown, plot, draw, differences=differences, width=width
    )
