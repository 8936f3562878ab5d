"""The checks of a server of OpenAI's HTTP API, one after the other, and their report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import typer
from dendro.errors import BadRequest, DendroError
from tree_layers.checkpoint import read_facts
from tree_layers.errors import CheckpointError

from cluster.certify.checks import MARGINS
from cluster.certify.outward.answer_checks import seeds_are_honoured, stop_strings_cut, usage_counts
from cluster.certify.outward.law_check import LawCheck, places_of, whole_prompts
from cluster.certify.outward.reference import Reference
from cluster.certify.outward.served import Door, NotOffered, OpenAIServer, ServedPrompt, find_offer, server_at
from cluster.certify.outward.structure_checks import json_answers, tool_calls
from cluster.certify.outward.token_checks import greedy_answers, log_probabilities
from cluster.certify.promises import Promise, failed, machine_and_libraries, report, run_facts, tables
from cluster.config import TargetConfig
from cluster.demo.prompts import load_passages
from cluster.distinct_keys import RepeatedKey, distinct
from cluster.hub import fetched_model
from cluster.json_lines import json_lines
from cluster.measure.measurement import Begin
from cluster.measure.options import present, with_bars
from cluster.model_paths import resolved_path
from cluster.prompt_files import QUESTIONS
from drafter_service.options import DTYPES

PASSAGES, PROMPT_TOKENS = 40, 96
LOGPROB_TOLERANCES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}
"""Largest difference of a log-probability from the reference's in float32, by the served dtype."""
LAW_TOLERANCES = {"float32": 0.002, "float16": 0.01, "bfloat16": 0.06}
"""Largest difference of the law of draws, where the server does not give log-probabilities with them."""


@dataclass(frozen=True, slots=True)
class OutwardSize:
    """Numbers of prompts, tokens and requests."""

    greedy_prompts: int
    greedy_tokens: int
    places: int  # places of each of the two kinds
    samples: int  # draws at temperature 1, of all places together
    seed_prompts: int
    logprob_tokens: int
    stop_prompts: int
    stop_draws: int
    times: int  # requests of each form of structures and calls


FULL = OutwardSize(24, 64, 4, 16_000, 4, 16, 4, 4, 6)
QUICK = OutwardSize(6, 32, 2, 1_600, 2, 8, 2, 2, 2)
SEED_TOKENS = 12
FURTHER = 16
"""Draws at temperature 1 for each draw of another law, of which there are up to three at each of two places."""
LEAST_SAMPLES, MOST_SAMPLES = 100, 1_000_000
DTYPE, AT_ONCE, LIMIT_S = "bfloat16", 8, 3600.0
"""Defaults of options."""


@dataclass(frozen=True, slots=True)
class OutwardOptions:
    """What is checked, and how."""

    url: str
    model: str
    checkpoint: Path  # a folder
    reference: str  # the checkpoint's name
    dtype: str  # the server's dtype
    tolerance: float | None  # largest difference of log-probabilities; None: by the dtype
    size: OutwardSize
    at_once: int
    limit_s: float
    extra: Mapping[str, Any]  # fields of every request
    key: str = ""
    authority: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadRequest("--dtype", f"must be one of {', '.join(sorted(DTYPES))}, got {self.dtype!r}")


def extra_fields(text: str) -> Mapping[str, Any]:
    """The fields of every request. Raises BadRequest.

    >>> extra_fields('{"top_k": -1}')
    {'top_k': -1}
    """
    try:
        found = json.loads(text or "{}", object_pairs_hook=distinct)
    except RepeatedKey as error:
        raise BadRequest("--fields", str(error)) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadRequest("--fields", f'{text!r} is no JSON object such as {{"top_k": -1}}')
    return found


def sized(size: OutwardSize, samples: int | None) -> OutwardSize:
    """The size with `samples` draws; unchanged for None."""
    return size if samples is None else dataclasses.replace(size, samples=samples)


def reference_folder(reference: Path | None) -> Path:
    """The folder of a checkpoint, a GGUF file or a name on a hub. Raises BadRequest."""
    if reference is None:
        raise BadRequest("--reference", "is needed: the checkpoint that the server serves")
    try:
        checkpoint = resolved_path("--reference", reference, Path.cwd())
        found = fetched_model("reference", TargetConfig(checkpoint=checkpoint)).checkpoint
        read_facts(found)
    except BadRequest as error:
        raise BadRequest("--reference", error.reason) from error
    except CheckpointError as error:
        raise BadRequest("--reference", str(error)) from error
    return found


def given_authority(file: Path | None) -> ssl.SSLContext | None:
    """The authority of a server's certificate; None for this machine's."""
    if file is None or str(file) == "system":
        return None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError:  # includes SSLError, which a file without a certificate raises
        raise BadRequest("--ca", f"{file} cannot be read") from None


def certify_outward(options: OutwardOptions, json_file: Path | None, markdown_file: Path | None) -> None:
    """Check a server, and show and write the report. Raises Exit, of status 1, where a promise is broken or could not
    be checked."""
    found = with_bars(lambda begin: asyncio.run(run_outward(options, begin)))
    present(found, facts(found), tables(found), json_file, markdown_file)
    if failed(found):
        raise typer.Exit(1)


async def run_outward(options: OutwardOptions, begin: Begin) -> dict[str, Any]:
    """Check everything; returns the report. A check that does not end in time is reported as not checked, as are those
    after it."""
    started = time.monotonic()
    reference = await asyncio.to_thread(Reference, options.checkpoint, DTYPES[options.dtype])
    passages = [
        reference.tokenizer.encode(each.text, begins=True)[:PROMPT_TOKENS] for each in load_passages()[:PASSAGES]
    ]
    questions = [entry["prompt"] for _, entry in json_lines("--reference", QUESTIONS, "questions")]
    messages = [made for each in questions if (made := reference.prompt_of_message(each)) is not None]
    texts = [made for each in passages if (made := reference.prompt_of_ids(each)) is not None]
    own = [made for each in questions if (made := reference.prompt_of_text(each)) is not None]
    texts = [prompt for pair in zip_longest(texts, own) for prompt in pair if prompt is not None]
    if not texts:
        raise BadRequest("--reference", f"{options.reference}: its tokenizer does not give texts back as they were")
    deadline = asyncio.get_running_loop().time() + options.limit_s
    opened = server_at(options.url, options.model, options.key, options.authority, options.at_once, options.extra)
    async with opened as server:
        await find_offer(server, texts[0], messages[0] if messages else None)
        prompts = messages if server.offer.door is Door.CHAT else texts
        found = await _checked(options, server, reference, prompts, passages, begin, deadline)
    subject = f"{server.model} at {server.url}"
    body = report(found, started, torch.get_num_threads(), subject)
    settings = {
        "model": server.model,
        "reference": options.reference,
        "dtype": options.dtype,
        "fields": dict(options.extra),
        "requests": server.requests,
        "door": server.offer.door,
        "samples_a_request": server.offer.samples,
        "not_offered": server.offer.refusals,
    }
    return {**body, "settings": {**body["settings"], **settings}}


async def _checked(
    options: OutwardOptions,
    server: OpenAIServer,
    reference: Reference,
    prompts: Sequence[ServedPrompt],
    passages: Sequence[Sequence[int]],
    begin: Begin,
    deadline: float,
) -> list[Promise]:
    size, dtype, loop = options.size, options.dtype, asyncio.get_running_loop()
    near = MARGINS[dtype] if options.tolerance is None else options.tolerance
    apart = LOGPROB_TOLERANCES[dtype] if options.tolerance is None else options.tolerance
    if server.offer.door is Door.CHAT:
        places = await asyncio.to_thread(whole_prompts, reference, prompts, size.places)
    else:
        places = await asyncio.to_thread(places_of, reference, passages, size.places)
    chosen = [place.prompt for place in places] or list(prompts)
    law = LawCheck(server, reference, places, LAW_TOLERANCES[dtype], lambda: loop.time() < deadline, begin)
    draws = -(-size.samples // max(len(places), 1))
    drawn = partial(law.run, draws, max(size.samples // FURTHER, LEAST_SAMPLES))  # keeps to the limit itself
    # The draws come last: they take most of the time.
    checks: dict[str, Callable[[], Awaitable[Promise]]] = {
        "(a) greedy answers": partial(
            greedy_answers, server, reference, prompts[: size.greedy_prompts], size.greedy_tokens, near, begin
        ),
        "(c) seeds": partial(seeds_are_honoured, server, chosen[: size.seed_prompts], SEED_TOKENS, begin),
        "(d) log-probabilities": partial(
            log_probabilities, server, reference, chosen, size.logprob_tokens, apart, begin
        ),
        "(e) answers in JSON": partial(json_answers, server, size.times, begin),
        "(f) calls of tools": partial(tool_calls, server, size.times, begin),
        "(g) stop strings": partial(
            stop_strings_cut, server, prompts[: size.stop_prompts], size.greedy_tokens, size.stop_draws, begin
        ),
        "(b) draws": drawn,
    }
    found: list[Promise] = []
    for name, check in checks.items():
        try:
            async with asyncio.timeout_at(None if check is drawn else deadline):
                found.append(await check())
        except TimeoutError:
            words = f"the limit of {options.limit_s:g} s was reached: raise --time-limit, or ask for less"
            found.append(Promise(name, why=f"{words} (--quick, --samples)"))
        except NotOffered as error:
            found.append(Promise(name, why=f"the server refused a request that it took before: {error}"))
        except BadRequest:
            raise
        except DendroError as error:
            found.append(Promise(name, why=str(error)))
    found.append(usage_counts(server))
    return sorted(found, key=lambda promise: promise.promise)


def facts(report: Mapping[str, Any]) -> list[str]:
    """Lines about what was checked, where and when."""
    settings = report["settings"]
    fields = f"; fields of every request {json.dumps(settings['fields'])}" if settings["fields"] else ""
    lines = [
        *run_facts(report),
        f"Server: {report['subject']}; {settings['requests']:,} requests, {settings['door']}, "
        f"{settings['samples_a_request']} answers each at most{fields}",
        f"Reference: {settings['reference']} in float32 and {settings['dtype']}, by {machine_and_libraries(report)}",
    ]
    return lines + [f"Not offered: {what}: {reason}" for what, reason in settings["not_offered"].items()]
