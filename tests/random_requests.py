"""Random requests, each with and without speculation, beside others, resumed, and repeated after they were written.

python -m tests.random_requests                       20,000 requests to two small models in this process
python -m tests.random_requests --config FILE         to the first target of a configuration, loaded in this process
python -m tests.random_requests --address HOST:PORT   to a running cluster
python -m tests.random_requests --first 7 --cases 1   case 7 again: a difference is printed with its case's number

A case compares what a client sees: tokens, text, ending, log-probabilities, echoed prompt and seed, or the error where
a request is refused. The exit code is 1 where any two differ.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random

import grpc.aio
import numpy as np
from dendro.answer import build_request, complete_from
from dendro.client import CHANNEL_OPTIONS
from dendro.errors import DendroError
from dendro.options import Options
from dendro.speculation import Mode, Speculation
from dendro.text import Finish
from dendro.v1 import generation_pb2 as pb
from dendro.v1.generation_pb2_grpc import GenerationServiceStub

from cluster.certify.parameters import random_options
from cluster.certify.stop_strings import drawn_stops
from cluster.config import Config
from cluster.policies import POLICIES
from cluster.router.ingress import FINISH_REASONS
from cluster.running import local_ingress
from tests.support import tiny_models

VOCABULARY = 256
"""Ids of parameters and prompts are below it: one for each byte, and none ends a text."""
SHAPES = ("(1,1,1)", "(2,2,1)", "nodes(2,1,1)", "beam(3,2)", "dynamic(3,3,8)", "until(0.5,6)", "until(auto,2,3,5)")
WAYS = (
    *(Speculation(policy=policy) for policy in POLICIES),
    *(Speculation.parse(shape) for shape in (*SHAPES, "proposed(7)")),
    Speculation(max_nodes=3),
    Speculation(Mode.FIXED, "(2,1)", deadline_ms=1),  # often late
)
OTHER = tuple(Speculation.parse(shape) for shape in ("other:(2,1)", "other:dynamic(2,3,5)"))
"""Shapes of the second drafter of `settings`."""
OFF = Speculation(Mode.OFF)
AT_ONCE = 8
SESSIONS = 0.3
"""Share of the cases whose request keeps a session."""
UNCOMPARED = ("session", "started")
"""Fields of `Seen` that differ between two calls."""
SHOWN = 200
"""Characters of a value that are printed."""
ENDINGS = {reason: finish for finish, reason in FINISH_REASONS.items()}

Call = Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]]
"""Streams the answer to a request. Raises a DendroError, or grpc's error with its text."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client sees of one answer."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[bytes, ...]
    prompt: tuple[tuple[int, ...], str, tuple[bytes, ...]]  # echoed: ids, text, log-probabilities
    finish: Finish
    stop: str
    seed: int
    session: str
    started: pb.GenerateStarted

    def after(self, count: int) -> Seen:
        """What a stream shows that resumes after so many tokens; its text is compared apart."""
        echoed = self.prompt if not count else ((), "", ())
        return replace(self, ids=self.ids[count:], logprobs=self.logprobs[count:], prompt=echoed, text="")


Outcome = tuple[Seen, ...] | str
"""The answers, or why the request was refused."""


async def seen(call: Call, request: pb.GenerateRequest) -> Outcome:
    """Send a request, and collect its answers."""
    parts: dict[int, list[pb.GenerateResponse]] = {}
    try:
        async for response in call(request):
            parts.setdefault(response.sample, []).append(response)
    except DendroError as error:
        return str(error)
    except grpc.aio.AioRpcError as error:
        return error.details() or str(error.code())
    return tuple(_seen_of(parts[sample]) for sample in sorted(parts))


def _seen_of(responses: Sequence[pb.GenerateResponse]) -> Seen:
    chunks = [each.chunk for each in responses if each.HasField("chunk")]
    prompts = [each.prompt for each in responses if each.HasField("prompt")]
    started, complete = responses[0].started, responses[-1].complete
    assert responses[0].HasField("started") and responses[-1].HasField("complete"), "a stream lacks its ends"
    wrong = complete_from(complete).speculation.contradictions
    assert not wrong, f"an answer's statistics contradict each other: {wrong}"
    return Seen(
        ids=tuple(token for each in chunks for token in each.token_ids),
        text="".join(each.text for each in chunks),
        logprobs=tuple(found.SerializeToString(deterministic=True) for each in chunks for found in each.logprobs),
        prompt=(
            tuple(token for each in prompts for token in each.token_ids),
            "".join(each.text for each in prompts),
            tuple(found.SerializeToString(deterministic=True) for each in prompts for found in each.logprobs),
        ),
        finish=ENDINGS[complete.finish_reason],
        stop=complete.stop_string,
        seed=started.seed,
        session=complete.session,
        started=started,
    )


def random_request(number: int) -> tuple[list[int] | str, Options]:
    """A prompt, and random parameters of every kind; stop strings and predictions are taken from an answer later."""
    rng = np.random.default_rng(number)
    tokens = int(rng.integers(8, 25))
    structured = importlib.util.find_spec("llguidance") is not None
    options = random_options(rng, tokens, VOCABULARY, structured)
    options |= {"max_new_tokens": tokens, "ignore_end": bool(rng.random() < 0.5), "seed": int(rng.integers(1 << 62))}
    options["show_special_tokens"] = bool(rng.random() < 0.3)
    if rng.random() < 0.2:
        options["n"] = int(rng.integers(2, 4))
    ids: list[int] = rng.integers(0, VOCABULARY, int(rng.integers(2, 61))).tolist()
    if rng.random() < 0.2:
        options["literal_prompt"] = bool(rng.random() < 0.5)
        return "".join(chr(token) for token in ids), options
    return ids, options


def edited(text: str, random: Random) -> str:
    """A prediction of an answer: its text, a part of which is left out, doubled or replaced."""
    start, stop = sorted(random.randint(0, len(text)) for _ in range(2))
    return text[:start] + random.choice(("", 2 * text[start:stop], "something else")) + text[stop:] or text


def resumed(request: pb.GenerateRequest, answer: Seen, count: int) -> pb.GenerateRequest:
    """The request of a client whose stream broke after so many tokens of the answer."""
    again, started = pb.GenerateRequest(), answer.started
    again.CopyFrom(request)
    again.resume.token_ids.extend(answer.ids[:count])
    again.resume.seed, again.resume.target = started.seed, started.target
    again.resume.prompt_tokens, again.resume.prompt_digest = started.prompt_tokens, started.prompt_digest
    return again


def difference(one: Outcome, other: Outcome) -> str | None:
    """The first difference between what two calls show, shortened; None where there is none."""
    if isinstance(one, str) or isinstance(other, str) or len(one) != len(other):
        ours, its = (each if isinstance(each, str) else f"{len(each)} answers" for each in (one, other))
        return None if ours == its else f"{ours[:SHOWN]} is not {its[:SHOWN]}"
    for sample, (ours, its) in enumerate(zip(one, other, strict=True)):
        for field in fields(Seen):
            left, right = getattr(ours, field.name), getattr(its, field.name)
            if field.name not in UNCOMPARED and left != right:
                return f"{field.name} of answer {sample}: {str(left)[:SHOWN]} is not {str(right)[:SHOWN]}"
    return None


class Cases:
    """Compares random cases, and counts what they used."""

    def __init__(self, call: Call, ways: Sequence[Speculation]) -> None:
        self.requests = 0
        self.used: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()  # of requests without speculation, by their reason
        self.differences: list[str] = []
        self._call = call
        self._ways = ways

    async def run(self, number: int) -> None:
        """Compare one case; its parameters are a function of its number."""
        random, (prompt, options) = Random(number), random_request(number)
        way = self._ways[number % len(self._ways)]
        session = random.random() < SESSIONS and "n" not in options
        plain = await self._ask(prompt, options, OFF)
        if random.random() < 0.4 and not isinstance(plain, str) and (text := plain[0].text):
            options |= {"stop": drawn_stops(text, random), "include_stop": random.random() < 0.5}
            plain = await self._ask(prompt, options, OFF)
        if random.random() < 0.3 and not isinstance(plain, str) and plain[0].text:
            options["prediction"] = edited(plain[0].text, random)
        if random.random() < 0.2:
            options["trees"] = True
        self.used.update(name for name, value in options.items() if value is not None)
        self.ends.update(["refused"] if isinstance(plain, str) else [each.finish for each in plain])
        self._same(number, "speculation", await self._ask(prompt, options, way), plain)
        if isinstance(plain, str):
            self.refusals[plain] += 1
            return
        if len(plain) == 1:
            place = random.randint(0, len(plain[0].ids))
            request = build_request(prompt, speculation=way, **options)
            await self._resume(number, "resume", request, plain[0], place)
        if session:
            await self._turns(number, prompt, options, way, plain, random)

    async def _turns(
        self,
        number: int,
        prompt: list[int] | str,
        options: Options,
        way: Speculation,
        plain: tuple[Seen, ...],
        random: Random,
    ) -> None:
        """Two turns of two sessions, one of them with speculation, and the turns again after they were written."""
        later = random_request(number + 1_000_000)
        following = later[1] | {"seed": options["seed"]}
        for name in ("n", "echo"):
            following.pop(name, None)
        turns: list[Outcome] = []
        for each in (OFF, way):
            first = build_request(prompt, speculation=each, keep_session=True, request_id=f"a{number}", **options)
            begun = await self._send(first)
            self._same(number, "first turn", begun, plain)
            if isinstance(begun, str) or not begun[0].session:
                return
            first.session = begun[0].session
            second = build_request(
                later[0], speculation=each, session=begun[0].session, request_id=f"b{number}", **following
            )
            turns.append(await self._send(second))
            self._same(number, "second turn", turns[-1], turns[0])
            if isinstance(turns[-1], str):
                return
            for request, answer in ((first, begun[0]), (second, turns[-1][0])):
                self._same(number, "repeated turn", await self._send(request), (answer,))
                await self._resume(number, "resumed turn", request, answer, random.randint(0, len(answer.ids)))
            third = build_request([1, 2], session=begun[0].session, max_new_tokens=1, speculation=OFF)
            after = await self._send(third)
            length = turns[-1][0].started.prompt_tokens + len(turns[-1][0].ids) + 2
            found = after if isinstance(after, str) else after[0].started.prompt_tokens
            if found != length:
                self.differences.append(f"case {number}: {found} tokens before a third turn, not {length}")

    async def _resume(self, number: int, kind: str, request: pb.GenerateRequest, answer: Seen, place: int) -> None:
        """Compare the rest of an answer after so many of its tokens."""
        rest = await self._send(resumed(request, answer, place))
        if isinstance(rest, str):
            self._same(number, kind, rest, (answer.after(place),))
            return
        self._same(number, kind, (replace(rest[0], text=""),), (answer.after(place),))
        if not answer.text.endswith(rest[0].text):
            self.differences.append(f"case {number}, {kind} at {place}: {rest[0].text!r} does not end {answer.text!r}")

    async def _ask(self, prompt: list[int] | str, options: Options, way: Speculation) -> Outcome:
        return await self._send(build_request(prompt, speculation=way, **options))

    async def _send(self, request: pb.GenerateRequest) -> Outcome:
        self.requests += 1
        return await seen(self._call, request)

    def _same(self, number: int, kind: str, one: Outcome, other: Outcome) -> None:
        self.kinds[kind] += 1
        if (found := difference(one, other)) is not None:
            self.differences.append(f"case {number}, {kind}: {found}")


def settings(folder: Path) -> Config:
    """A target that one of its two drafters guesses right, as it is the same model; the other has other weights."""
    for name, seed in (("target", 0), ("other", 1)):
        (folder / name).mkdir()
        tiny_models.make_checkpoint(folder / name, seed=seed)
    model = {"dtype": "float32", "threads": 1, "max_sessions": 16, "resources": {"cpu": 0.1}}
    return Config.of(
        {
            "targets": {"target": model | {"checkpoint": "target", "max_length": 256}},
            "drafters": {"same": model | {"checkpoint": "target"}, "other": model | {"checkpoint": "other"}},
            "router": {"resources": {"cpu": 0.1}},
            "speculation": {"arms": ["off", "(1,1,1)", "(2,2,1)", "dynamic(3,3,8)", "proposed(7)"]},
            "grpc": {"port": 0},
        },
        folder,
    )


def remote(channel: grpc.aio.Channel) -> Call:
    """Calls of a router over gRPC."""
    stub = GenerationServiceStub(channel)
    return lambda request: aiter(stub.Generate(request))


@asynccontextmanager
async def _served(given: argparse.Namespace) -> AsyncIterator[tuple[Call, Sequence[Speculation]]]:
    async with AsyncExitStack() as stack:
        if given.address:
            channel = grpc.aio.insecure_channel(given.address, CHANNEL_OPTIONS)
            yield remote(await stack.enter_async_context(channel)), WAYS
        elif given.config:
            yield (await stack.enter_async_context(local_ingress(Config.load(given.config)))).generate, WAYS
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            yield (await stack.enter_async_context(local_ingress(settings(folder)))).generate, (*WAYS, *OTHER)


async def _main(given: argparse.Namespace) -> int:
    began, slots = time.monotonic(), asyncio.Semaphore(given.at_once)
    async with _served(given) as (call, ways):
        cases = Cases(call, ways)

        async def one(number: int) -> None:
            async with slots:
                if given.cases or cases.requests < given.requests:
                    await cases.run(number)
                    if number % 200 == 0:
                        left = f"{cases.requests} requests, {len(cases.differences)} differences"
                        print(f"case {number}: {left}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

        # A case sends three requests or more.
        count = given.cases or -(-given.requests // 3)
        await asyncio.gather(*(one(number) for number in range(given.first, given.first + count)))
    for difference in cases.differences:
        print(difference)
    for title, counted in (
        ("compared", cases.kinds),
        ("ended", cases.ends),
        ("refused", cases.refusals),
        ("parameters", cases.used),
    ):
        print(f"{title}: {', '.join(f'{name} {count}' for name, count in counted.most_common())}")
    print(f"{cases.requests} requests, {len(cases.differences)} differences, {time.monotonic() - began:.0f} s")
    return 1 if cases.differences else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="send so many, and finish the cases begun")
    parser.add_argument("--cases", type=int, default=0, help="run so many cases instead")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases that run beside each other")
    parser.add_argument("--config", help="a configuration, whose first target is asked")
    parser.add_argument("--address", help="a running cluster's address")
    sys.exit(asyncio.run(_main(parser.parse_args())))
