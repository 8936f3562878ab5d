"""`dendro certify`: the system that is checked, the order of the checks, the report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.client import Asking, AsyncClient
from dendro.engine import started
from dendro.errors import BadRequest
from dendro.shapes import BeamShape, DynamicShape, MarginalShape, NodeShape, UntilShape

from cluster.arms import Arm, parsed_arms
from cluster.certify import checks
from cluster.certify.outward import command as outward
from cluster.certify.parameters import identity_under_parameters
from cluster.certify.promises import Promise, failed, machine_and_libraries, report, run_facts, tables
from cluster.certify.stop_strings import STOP_LAWS, stop_strings_end_answers
from cluster.command_options import (
    Authority,
    ConfigArgument,
    JsonFile,
    KeyFile,
    Local,
    given_config,
    given_credentials,
    given_key,
    write_report,
)
from cluster.config import Config, TargetConfig
from cluster.demo.prompts import served_prompts
from cluster.engines import verifier_options
from cluster.hub import fetched, pinned
from cluster.measure.measurement import Begin
from cluster.measure.options import MarkdownFile, present, with_bars
from cluster.measure.report import as_json
from cluster.model_paths import resolved_path
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.running import local_client, running_cluster
from drafter_service.options import DTYPES
from verifier_service.engine import VerifierEngine

FarClient = Callable[[], AsyncClient]
"""Makes a client of a running cluster."""
OnChecked = Callable[[Promise], None]
"""Takes a promise that has been checked."""
PROMPT_TOKENS = 128
OF_EACH_KIND = (
    NodeShape((2, 1, 1)),
    BeamShape(3, 2),
    DynamicShape(2, 3, 5),
    UntilShape(DynamicShape(1, 6, 6), 0.5),
    MarginalShape(DynamicShape(2, 3, 5)),
)
"""Shapes of the kinds that no default arm has."""


@dataclass(frozen=True, slots=True)
class CertifySize:
    """Numbers of prompts, answer tokens and draws."""

    greedy_prompts: int
    greedy_tokens: int
    prompts: int
    tokens: int
    draws: int
    far_draws: int
    own_prompts: int
    own_tokens: int
    stop_draws: int  # draws of stop strings for each answer
    combinations: int  # number of combinations of parameters


FULL = CertifySize(32, 128, 8, 64, 20_000, 2_000, 2, 48, 6, 200)
QUICK = CertifySize(3, 32, 2, 24, 4_000, 200, 1, 24, 3, 8)


@asynccontextmanager
async def _serving(config: Config, local: bool) -> AsyncIterator[Asking]:
    if local:
        async with local_client(config) as client:
            yield client
        return
    async with running_cluster(config.private()) as address, AsyncClient(address, proxy=False) as far:
        yield far


def _with_dtype(config: Config, dtype: str) -> Config:
    """A copy of the configuration with the targets in another dtype."""
    targets = {name: target.model_copy(update={"dtype": dtype}) for name, target in config.targets.items()}
    return config.model_copy(update={"targets": targets})


def _prompts(count: int, folder: Path) -> list[checks.Prompt]:
    return [*served_prompts(count, PROMPT_TOKENS, CheckpointTokenizer(folder, ""))]


def fixed_arms(config: Config, target: str, drafters: Sequence[str]) -> list[str]:
    """The arms that requests fix: those of the configuration, and a shape of each kind, of each drafter of the target.
    They name their drafter where there are several."""
    arms = (
        Arm(maker, shape).name(len(drafters) > 1)
        for drafter, shape in (*parsed_arms(config.arm_texts(target)), *(("", shape) for shape in OF_EACH_KIND))
        if not shape.off and config.targets[target].holds(shape)
        for maker in (drafters if shape.drafted else config.makers_of(target, shape))
        if drafter in ("", maker)
    )
    return list(dict.fromkeys(arms))


async def run_certify(
    config: Config, far: FarClient | None, local: bool, size: CertifySize, begin: Begin, on_checked: OnChecked
) -> list[Promise]:
    """Check all promises, one after the other.

    on_checked: is called with each promise as soon as it is checked; the list has them in the order of their letters.
    far: makes clients of a running cluster, whose first target is then checked, with the dtype and drafters that the
    cluster reports; engines that are started beside it have no drafter.
    """
    name, target = next(iter(config.targets.items()))
    drafters = config.drafters_of(name)
    if far is not None:
        async with far() as client:
            there = (await client.models())[0]
        config = _with_dtype(config, there.dtype).model_copy(update={"drafters": {}})
        name, target = next(iter(config.targets.items()))
        drafters = there.drafters
    shapes = fixed_arms(config, name, drafters)
    prompts = _prompts(max(size.greedy_prompts, size.prompts), target.tokenizer_folder)
    found: list[Promise] = []

    def add(promise: Promise) -> None:
        found.append(promise)
        on_checked(promise)

    # (a) is checked in float32: on a cluster in that dtype, or on local engines beside a running cluster.
    ways = ["off", "auto"]
    step = begin("(a) greedy against transformers", size.greedy_prompts * len(ways))
    exact = _with_dtype(config, "float32")
    async with _serving(exact, local or far is not None) as service:
        add(
            await checks.greedy_against_transformers(
                service, target.checkpoint, prompts[: size.greedy_prompts], size.greedy_tokens, ways, step
            )
        )

    dtype = DTYPES[target.dtype]
    async with started(await asyncio.to_thread(_own_engine, name, target)) as engine:
        hello = await engine.hello()
        bitwise = hello.exactness == "bitwise"
        margin_of = None if bitwise else checks.margin_in(target.checkpoint, dtype)
        step = begin("(d) planted faults", 4)
        add(await checks.planted_faults_are_noticed(engine.logits_of, prompts[0], size.own_tokens, step))
        own = len(checks.SHAPES_OF_ITS_OWN) * len(checks.TEMPERATURES_OF_ITS_OWN)
        step = begin("(e) the target drafts for itself", own * size.own_prompts)
        add(await checks.the_target_drafts_for_itself(engine, prompts[: size.own_prompts], size.own_tokens, step))

        async def served(service: Asking) -> None:
            chosen = prompts[: size.prompts]
            ways = 1 + len(shapes) + len(checks.ways_to_choose())
            step = begin("(b) identity under sampling", len(checks.LAWS) * ways * len(chosen))
            below = checks.MARGINS[target.dtype]
            identity = await checks.identity_under_sampling(
                service, chosen, size.tokens, shapes, margin_of, below, step
            )
            identity.found.append(f"the verifier's exactness, in {target.dtype}: {_exactness(engine)}")
            add(identity)
            step = begin("(c) the law", size.far_draws)
            add(
                await checks.law_of_the_sampler(service, engine.logits_of, prompts[0], size.draws, size.far_draws, step)
            )
            step = begin("(f) parameters", size.combinations)
            given = size.tokens, size.combinations, shapes, hello.vocabulary
            add(await identity_under_parameters(service, chosen, *given, margin_of, below, step))
            stop_ways = ["off", "auto", *shapes]
            steps = len(STOP_LAWS) * len(chosen) * (1 + size.stop_draws * len(stop_ways))
            step = begin("(g) stop strings", steps)
            add(
                await stop_strings_end_answers(
                    service, chosen, size.tokens, size.stop_draws, stop_ways, margin_of, below, step
                )
            )

        if far is not None:
            async with far() as client:
                await served(client)
        else:
            async with _serving(config, local) as service:
                await served(service)
    return sorted(found, key=lambda promise: promise.promise)


def _exactness(engine: VerifierEngine) -> str:
    """The announced exactness; for `margin`, with the products and row counts for which rows depend on others."""
    return f"margin, as rows depend on others ({'; '.join(engine.dependent)})" if engine.dependent else "bitwise"


def _own_engine(name: str, target: TargetConfig) -> VerifierEngine:
    """An engine beside the cluster: for few texts, in this process alone."""
    options = replace(verifier_options(name, target), max_sessions=4, memory_fraction=None, tensor_parallel=1)
    return VerifierEngine.load(target.checkpoint, options)


def facts(report: Mapping[str, Any]) -> list[str]:
    """Lines about what was checked, where and when."""
    return [*run_facts(report), f"Checked: {report['subject']}, by {machine_and_libraries(report)}"]


def certify(
    config: ConfigArgument = None,
    address: Annotated[str, typer.Option(help="A running cluster to check; needs --target.")] = "",
    target: Annotated[Path | None, typer.Option(help="The target it serves: a folder, or a name on a hub.")] = None,
    local: Local = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts: takes minutes, checks less.")] = False,
    json_file: JsonFile = None,
    key_file: KeyFile = None,
    ca: Authority = None,
    openai: Annotated[
        str, typer.Option(help="Check this server of OpenAI's HTTP API, such as http://127.0.0.1:8000/v1, instead.")
    ] = "",
    model: Annotated[str, typer.Option(help="With --openai: the model's name there. Default: the first.")] = "",
    reference: Annotated[
        Path | None, typer.Option(help="With --openai: the checkpoint that it serves: a folder, file or hub name.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"With --openai: the dtype that it is served in, which sets the tolerances (default {outward.DTYPE}).",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="With --openai: of log-probabilities and near ties, in place of the dtype's.", min=0.0),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help=f"With --openai: draws at temperature 1 (default {outward.FULL.samples}; quick "
            f"{outward.QUICK.samples}).",
            min=outward.LEAST_SAMPLES,
            max=outward.MOST_SAMPLES,
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            help=f"With --openai: requests at once (default {outward.AT_ONCE}).", min=1, max=256, show_default=False
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help=f"With --openai: seconds after which it ends (default {outward.LIMIT_S:g}).",
            min=1.0,
            show_default=False,
        ),
    ] = None,
    fields: Annotated[
        str, typer.Option(help='With --openai: JSON of fields of every request, such as {"top_k": -1}.')
    ] = "",
    markdown: MarkdownFile = None,
) -> None:
    """Check on held-out prompts that answers have the target's own tokens and law under every speculation; or, with
    --openai, that any server's answers have those of its model.

    Exit status 1 when a promise is broken or could not be checked. Everything started is stopped again.
    """
    if openai:
        inward: dict[str, object] = {
            "CONFIG": config,
            "--address": address or None,
            "--target": target,
            "--local": local or None,
        }
        for name, value in inward.items():
            if value is not None:
                raise BadRequest(name, "cannot be given with --openai, which checks another server")
        outward.certify_outward(
            outward.OutwardOptions(
                openai,
                model,
                outward.reference_folder(reference),
                str(reference),
                outward.DTYPE if dtype is None else dtype,
                tolerance,
                outward.sized(outward.QUICK if quick else outward.FULL, samples),
                outward.AT_ONCE if at_once is None else at_once,
                outward.LIMIT_S if time_limit is None else time_limit,
                outward.extra_fields(fields),
                given_key(key_file),
                outward.given_authority(ca),
            ),
            json_file,
            markdown,
        )
        return
    beside: dict[str, object] = {
        "--model": model or None,
        "--reference": reference,
        "--dtype": dtype,
        "--tolerance": tolerance,
        "--samples": samples,
        "--at-once": at_once,
        "--time-limit": time_limit,
        "--fields": fields or None,
    }
    for name, value in beside.items():
        if value is not None:
            raise BadRequest(name, "belongs to --openai")
    if bool(address) != (target is not None) or (address and (config or local)):
        raise BadRequest("address", "needs --target, and excludes a configuration and --local")
    if not address and (key_file or ca):
        raise BadRequest("--key-file" if key_file else "--ca", "belongs to --address")
    far = partial(AsyncClient, address, key=given_key(key_file), credentials=given_credentials(ca)) if address else None
    checked = given_config(config)
    if target is not None:
        name, served = next(iter(checked.targets.items()))
        served = served.model_copy(update={"checkpoint": resolved_path("--target", target, Path.cwd())})
        checked = checked.model_copy(update={"targets": {name: served}})
    checked = fetched(pinned(checked))
    subject = address or (str(config) if config else "the bundled demo")
    size = QUICK if quick else FULL
    threads, began = next(iter(checked.targets.values())).threads, time.monotonic()
    so_far: list[Promise] = []

    def keep(promise: Promise) -> None:
        """Write what is known: the whole takes an hour on a model of 135 million parameters, and may be ended."""
        so_far.append(promise)
        if json_file is not None:
            write_report(json_file, as_json(report(so_far, began, threads, subject, complete=False)))

    found = with_bars(lambda begin: asyncio.run(run_certify(checked, far, local, size, begin, keep)))
    written = report(found, began, threads, subject)
    present(written, facts(written), tables(written), json_file, markdown)
    if failed(written):
        raise typer.Exit(1)
