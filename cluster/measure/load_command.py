"""`dendro bench load`: its options, what it loads, and its report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dendro.client import AsyncClient
from dendro.errors import BadRequest

from cluster import deploy
from cluster.command_options import given_config
from cluster.config import Config, TargetConfig
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.baselines import library_process
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, judged_as, models, option, prompt_file, seed
from cluster.measure.hops import hop_process
from cluster.measure.load import FIXED, WAYS, GrpcDoor, Loader, LoadPlan, measure_load, rows_of
from cluster.measure.measurement import AUTO, OFF, Begin
from cluster.measure.ours import TenantClients, TenantRule
from cluster.measure.own_target import FIXED_ARM_BAR, NEVER_SLOWER, own_arms, own_prompts, own_target, prompt_facts
from cluster.measure.pairs import FIRST_S, PAIRS, PairsPlan, measure_pairs, rows_against_off
from cluster.measure.report import Row
from cluster.measure.speed import OWN, Identity
from cluster.measure.surface import BARE, SURFACE, WHOLE, both_doors, router_stats, surface_rows
from cluster.measure.targets import COSTLY, DEMO, target_config, target_facts
from cluster.prompt_files import QUESTIONS
from cluster.running import running_cluster
from cluster.tables import PLAIN_WIDTH
from cluster.training.acceptance import PROMPT_TOKENS

CLIENTS, PAIRED_CLIENTS, PAIRED_TEMPERATURES = (1, 2, 4, 8, 16, 32), (1, 4, 8, 32), (0.0, 0.8)
SURFACE_CLIENTS, SURFACE_PAIRS = (16,), 6
ANSWERS, REPETITIONS, REQUESTS = 2, 5, 16
ARRIVALS = {False: (0.25, 0.5, 0.75, 1.0), True: (0.5,)}
"""Rates of the open loops, as shares of the capacity, without and with --quick."""
BUNDLED = "bundled"
"""The costly target, among what is judged."""
Loaded = tuple[list[Row], Identity, dict[str, Any]]
"""What a run gives: rows, compared answers, and facts for the report."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    config: Path | None = option(
        "The YAML file of a cluster whose target is loaded with the prompts of a file. Default: the bundled targets.",
        None,
        argument=True,
        shown=False,
    )
    prompt_file: Path | None = prompt_file()
    prompts: int = option("Number of prompts, the same of each category.", 32, least=1)
    clients: tuple[int, ...] = option(
        "Clients of the closed loops, separated by commas. Default: 1,2,4,8,16,32; quick: 1,4; with --against-off: "
        "1,4,8,32; with --surface: 16.",
        (),
        (1, 4),
        least=1,
        of=int,
        shown=False,
    )
    tokens: int = option("New tokens of every answer.", 64, 32, least=2)
    answers: int | None = option(
        "Answers for every client of a closed loop. Default: 2; quick: 1; with --against-off: 64 in all.",
        None,
        1,
        least=1,
        shown=False,
    )
    requests: int = option("Requests of every open loop.", REQUESTS, least=1)
    repetitions: int | None = option("Repetitions of every block. Default: 5; quick: 1.", None, 1, least=1, shown=False)
    seed: int = seed()
    against_off: bool = option(
        "Only the policy and no speculation, in alternating blocks at 1, 4, 8 and 32 clients, each from a fresh "
        "router, for a minute of the policy or longer: 20 minutes.",
        False,
    )
    surface: bool = option(
        "Only HTTP with TLS, keys, metrics and traces beside bare gRPC, in alternating blocks at 16 clients: 4 "
        "minutes. Needs openssl and the extra trace.",
        False,
    )
    target: str = option(
        "With CONFIG the name of its target; else demo or costly, with --against-off. (default demo)", "", shown=False
    )
    tenants: TenantRule = option(
        "With prompts of a file: each answer of a tenant of its own, or all of a row of one tenant.", TenantRule.ANSWERS
    )
    temperatures: tuple[float, ...] = option(
        "Sampling temperatures with --against-off. (default 0,0.8)", (), of=float, shown=False
    )
    models: Path = models()
    quick: bool = False

    @property
    def own(self) -> bool:
        """Whether a target or prompts of the user's are loaded."""
        return self.config is not None or self.prompt_file is not None

    def __post_init__(self) -> None:
        if not self.own and self.target not in ("", *((DEMO, COSTLY) if self.against_off else ())):
            raise BadRequest("target", "has an effect with --against-off (demo or costly) or CONFIG (its own) alone")
        if not self.own and self.tenants is not TenantRule.ANSWERS:
            raise BadRequest("tenants", "has an effect with CONFIG or --prompt-file alone")
        if self.temperatures and not self.against_off:
            raise BadRequest("temperatures", "has an effect with --against-off alone; all else is greedy")
        if self.surface and (self.against_off or self.own):
            raise BadRequest(
                "surface", "is of the costly target alone, without --against-off, CONFIG and --prompt-file"
            )
        if self.against_off and (self.requests != REQUESTS or self.seed):
            raise BadRequest("against-off", "has neither open loops of requests, nor an order drawn by a seed")


@dataclass(frozen=True, slots=True)
class LoadSubject:
    """A configuration of one target, and what is known of the prompts for it."""

    config: Config
    prompts: tuple[tuple[int, ...], ...]
    rule: TenantRule | None = None  # None: all answers are of one tenant
    to_end: bool = False  # True if an end-of-text token ends an answer
    facts: Mapping[str, Any] = field(default_factory=lambda: {"prompt_tokens": PROMPT_TOKENS})

    @property
    def name(self) -> str:
        (name,) = self.config.targets
        return name

    @property
    def target(self) -> TargetConfig:
        return self.config.targets[self.name]

    def loader(self, client: AsyncClient, tokens: int, temperature: float = 0.0) -> Loader:
        door = GrpcDoor(TenantClients(client, self.rule), partial(stats_of, self.name), temperature, self.to_end)
        return Loader(lambda way: door, self.prompts, tokens, self.to_end)


def with_room(config: Config, texts: int) -> Config:
    """The configuration of one target with room for so many texts at every replica."""

    def roomy(served: Mapping[str, Any]) -> dict[str, Any]:
        rooms = {name: {"max_sessions": max(texts, each.max_sessions)} for name, each in served.items()}
        return {name: each.model_copy(update=rooms[name]) for name, each in served.items()}

    return config.model_copy(update={"targets": roomy(config.targets), "drafters": roomy(config.drafters)})


async def stats_of(target: str) -> Mapping[str, int]:
    """Counters of the running cluster's verifier and router, as a GrpcDoor takes them."""
    verifier, router = await asyncio.gather(
        asyncio.to_thread(deploy.deployment_stats, f"verifier-{target}"), asyncio.to_thread(router_stats)
    )
    return verifier | router


def subject_of(options: LoadOptions) -> LoadSubject:
    if not options.own:
        found = held_out_prompts(options.prompts, PROMPT_TOKENS, load_tokenizer(options.models), options.models)
        name = DEMO if options.against_off and options.target != COSTLY else COSTLY
        return LoadSubject(target_config(options.models, name), tuple(prompt.token_ids for prompt in found))
    file, chosen = options.prompt_file or QUESTIONS, own_target(given_config(options.config), options.target)
    mine = own_prompts(chosen, file, options.prompts, options.tokens)
    ids = tuple(prompt.token_ids for prompt in mine)
    facts = prompt_facts(file, mine, options.tenants) | {"prompt_tokens": max(map(len, ids))}
    return LoadSubject(chosen, ids, options.tenants, to_end=True, facts=facts)


async def run_against_off(options: LoadOptions, loaded: LoadSubject, begin: Begin) -> Loaded:
    plan = PairsPlan(
        ways=(AUTO, OFF),
        settings={f" at {temperature:g}": temperature for temperature in options.temperatures or PAIRED_TEMPERATURES},
        clients=options.clients or PAIRED_CLIENTS,
        answers=options.answers,
        pairs=options.repetitions or REPETITIONS,
        least_s=FIRST_S if options.repetitions is None else 0.0,
    )
    config, identity = with_room(loaded.config, max(plan.clients)), Identity()

    @asynccontextmanager
    async def fresh_router(temperature: float) -> AsyncIterator[Loader]:
        async with running_cluster(config.private()) as address, AsyncClient(address, proxy=False) as client:
            loader = loaded.loader(client, options.tokens, temperature)
            yield loader
            identity.add(loader.identity)

    blocks = await measure_pairs(plan, fresh_router, begin("blocks", plan.blocks))
    return rows_against_off(blocks), identity, {"fresh": True}


async def run_surface(options: LoadOptions, loaded: LoadSubject, begin: Begin) -> Loaded:
    async with both_doors(with_room(loaded.config, max(options.clients or SURFACE_CLIENTS))) as (doors, sent):
        loader = Loader(doors.__getitem__, loaded.prompts, options.tokens)
        plan = PairsPlan(
            ways=(WHOLE, BARE),
            settings={f", {each}": replace(loader, speculation=each) for each in (OFF, AUTO)},  # one identity
            clients=options.clients or SURFACE_CLIENTS,
            answers=options.answers or 1,
            pairs=options.repetitions or SURFACE_PAIRS,
            warm=(BARE, WHOLE),
        )
        blocks = await measure_pairs(plan, nullcontext, begin("blocks", plan.blocks))
        return surface_rows(blocks), loader.identity, {"traces": sent()}


async def run_loads(options: LoadOptions, loaded: LoadSubject, begin: Begin) -> Loaded:
    plan = LoadPlan(
        prompts=loaded.prompts,
        tokens=options.tokens,
        clients=options.clients or CLIENTS,
        answers=options.answers or ANSWERS,
        arrivals=ARRIVALS[options.quick],
        requests=options.requests,
        repetitions=options.repetitions or REPETITIONS,
        seed=options.seed,
        ways=(OFF, *own_arms(loaded.config), AUTO) if options.own else WAYS,
    )
    config, target = with_room(loaded.config, max(plan.clients)), loaded.target
    async with (
        running_cluster(config.private()) as address,
        AsyncClient(address, proxy=False) as client,
        library_process(target.checkpoint, None, target.dtype, target.threads) as library,
        hop_process() as hop_us,
    ):
        loader = loaded.loader(client, plan.tokens)
        blocks, silent = await measure_load(plan, loader, library, hop_us, begin("loads", plan.blocks))
    failed = "; ".join(f"{way}: {why}" for way, why in silent.items())
    return rows_of(blocks, plan.ways, OWN if options.own else BUNDLED), loader.identity, {"silent": failed}


async def run_load(options: LoadOptions, begin: Begin) -> dict[str, Any]:
    loaded = subject_of(options)
    run = run_surface if options.surface else run_against_off if options.against_off else run_loads
    rows, identity, facts = await run(options, loaded, begin)
    given = {"target": loaded.name, **target_facts(loaded.config), **loaded.facts, "tokens": options.tokens}
    return {
        "threads": loaded.target.threads,
        "plan": given | {"compared": identity.answers_compared} | facts,
        "identity": identity.as_json(),
        "differences": identity.differences,
        "rows": rows,
    }


OVER_ARM = "policy over the best fixed arm, {load}: {best}"
OVER_BETTER = f"policy over the better of off and {FIXED}, {{load}}: {{best}}"
OVER_HOP = "router's processor time a round over a bare gRPC hop's, {name}, {load}"
OVER_BARE = "HTTP with TLS, keys, metrics and traces over bare gRPC, {load}"
bundled = partial(judged_as, BUNDLED)

LOAD = Bench(
    "load",
    "Load a cluster with many clients, on the costly target: closed loops of increasing numbers of clients, then "
    "Poisson arrivals; without speculation, with one tree and with the policy, beside transformers' batches.\n\n"
    "Takes about 25 minutes on two cores. With CONFIG or --prompt-file it loads a target of your own after prompts of "
    "your own, by default some questions of this package, with each of its arms. Exits with status 1 if ours answered "
    "differently with speculation than without.",
    "One or two minutes: few clients, one repetition.",
    LoadOptions,
    run_load,
    facts=(
        "{target} target: {parameters:,} parameters in {dtype}, drafter {drafter}; answers of at most {tokens} tokens "
        "after prompts of at most {prompt_tokens}; {compared} answers compared with the first ones to their prompts",
        "Prompts of {prompt_file}, of {shortest_prompt} tokens or more, the chat template's with them; answers up to "
        "their ends; a tenant for each of the {tenants}",
        "Pairs of blocks in alternating order at each load, from a fresh router: {fresh}",
        "Clusters of both ways ran at once, each in processes of its own, and their blocks took turns; the one with "
        "the surface had its metrics read every 5 s and sent 1 % of its answers' traces, in {traces} requests; clients "
        "of both were in one process on this machine",
        "Could not be measured: {silent}",
    ),
    tables=(
        ReportTable(
            "{load}",
            "rows",
            "row = name; tokens/s = tokens_per_second:.1f; over off = over_off:.2f; over bare gRPC = over_bare:.3f; "
            "first token ms * = first_token_ms/*:.0f; between tokens ms * = between_tokens_ms/*:.1f; between parts "
            "ms * = between_parts_ms/*:.1f; guesses per token = guesses_per_token:.2f; left out = "
            "trimmed_per_token:.2f; step overhead = step_overhead:.1%; router ms a round "
            "= router_ms:.2f; client ms a round = client_ms:.2f; over a hop's = router_over_hop:.1f; rounds by shape "
            "= shapes:.0%",
        ),
    ),
    aims=(
        Aim("policy over off, {load}", "rows", "over_off", least=NEVER_SLOWER, where=judged_as(OWN, AUTO)),
        Aim(OVER_ARM, "rows", "over_best", least=FIXED_ARM_BAR, where=judged_as(OWN, AUTO)),
        Aim("policy over off, {load}", "rows", "over_off", least=1.0, end="low", where=bundled(AUTO, clients=1)),
        Aim(OVER_BETTER, "rows", "over_best", least=0.97, end="high", where=bundled(AUTO)),
        Aim("off, {load} over one", "rows", "over_one", least=5.0, where=bundled(OFF, clients=16)),
        Aim("a step's own overhead, off, {load}", "rows", "step_overhead", most=0.1, where=bundled(OFF, clients=16)),
        *(
            Aim(OVER_HOP, "rows", "router_over_hop", most=bar, where=bundled(way, clients=32))
            for way, bar in ((OFF, 1.5), (AUTO, 3.0))
        ),
        Aim(OVER_BARE, "rows", "over_bare", least=0.95, where=judged_as(SURFACE, WHOLE)),
        *(
            Aim(name, "rows", path, least=least, most=most, where=judged_as(PAIRS, AUTO))
            for name, path, least, most in (
                ("policy over off, {load}", "over_off", NEVER_SLOWER, None),
                ("policy over off, {load}, first {first_s} s", "first_minute_over_off", NEVER_SLOWER, None),
                ("first token of the policy over that of off, {load}", "first_token_over_off", None, 1.05),
            )
        ),
    ),
    plots=(
        *(
            Plot("rows", "clients", shown, "{name}", log="x", where=lambda row: row["clients"])
            for shown in ("tokens per second = tokens_per_second", "ms between tokens * = between_tokens_ms/*")
        ),
        Plot(
            "rows",
            "share of capacity = share",
            "ms to the first token * = first_token_ms/*",
            "{name}",
            where=lambda row: row["share"],
        ),
    ),
    local=False,
    width=PLAIN_WIDTH + 30,
    code=("cluster/router", "cluster/policies", "verifier_service", "drafter_service"),
)
