"""What hostile and large requests cost a router: the longest gap of its loop, and the memory that it takes.

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.request_bars

Prints a Markdown table, each figure with its bar beside it. One process serves as the router and is measured; its
client and its verifier, a toy, are processes of their own. Each input gets three routers, and the least of their
figures counts: other work on the machine only adds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from dendro.answer import build_request
from dendro.calls import OpenCall, Opened, VerifyCall
from dendro.client import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from dendro.logprobs import EchoedLogprobs, TokenLogprobs
from dendro.options import MAX_ECHOED
from dendro.servicer import VERIFIER_REPLICA, serve_engine
from dendro.text import Verdict

from cluster.api.grpc import serve_router
from cluster.peers.pools import Peers
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.sessions import MemorySessions
from tests.support.fakes import END, VOCABULARY, FakeVerifier, RemotePool
from tests.support.toy_cluster import ToyTokenizer, toy_config

THIS = (sys.executable, "-m", "tests.request_bars")
"""The command of this file."""
GAP_MS = 50.0
"""The bar of the longest gap."""
FIXED_MIB = 8.0
MESSAGES = 3
"""The bar of the memory: so many times the bytes of all messages, and FIXED_MIB."""
RUNS = 3
LONGEST = 1 << 18
"""Tokens of the longest text of the toy target."""
FULL = MAX_MESSAGE_BYTES - 1024
"""Bytes of a message of the maximum size, less what the fields around its filling take."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Input:
    """The messages that are sent at once."""

    message: bytes
    messages: int = 1


def many_bad_words() -> Input:
    """16 answers, and 8 MB of empty bad words."""
    return Input(_sixteen() + _field(5, b"\x82\x01\x00" * (FULL // 3)))


def many_stop_strings() -> Input:
    """16 answers, and 8 MB of empty stop strings."""
    return Input(_sixteen() + b"\xf2\x01\x00" * (FULL // 3))


def many_ids() -> Input:
    """16 answers to 8 MB of token ids."""
    return Input(_sixteen() + _field(4, _field(1, b"\x07" * FULL)))


def long_text() -> Input:
    """16 answers to 8 MB of text."""
    return Input(_sixteen() + _field(3, b"a" * FULL))


def valid_lists() -> Input:
    """16 answers, and 73 kB of valid lists."""
    lists: Any = {
        "banned_ids": [token % 50 for token in range(4096)],
        "bad_words": [[(at + word) % 50 for at in range(64)] for word in range(1024)],
        "stop_ids": [token % 50 for token in range(1024)],
        "logit_bias": {token: 1.0 for token in range(100)},
    }
    return Input(build_request([1, 2, 3], n=16, temperature=0.8, max_new_tokens=4, **lists).SerializeToString())


def long_stop_strings() -> Input:
    """16 answers with 16 stop strings of the maximum length."""
    stop = [chr(97 + at) + "yz" * 511 + "!" for at in range(16)]
    return Input(build_request([1, 2, 3], n=16, max_new_tokens=4, stop=stop).SerializeToString())


def one_unknown_field() -> Input:
    """8 requests for 16 answers, each with an unknown field of 8 MB."""
    return Input(_sixteen() + _field(1001, b"x" * FULL), 8)


def nested_unknown_field() -> Input:
    """8 requests for 16 answers, each with an unknown field of 8 MB within `sampling`."""
    return Input(_sixteen() + _field(5, _field(1001, b"x" * FULL)), 8)


def many_unknown_fields() -> Input:
    """8 requests for 16 answers, each with 8 MB of unknown fields of 3 bytes."""
    return Input(_sixteen() + b"\xc8\x3e\x07" * (FULL // 3), 8)


def short_echo() -> Input:
    """The echo of 8,192 tokens with log-probabilities."""
    return _echo(8192, 0)


def likeliest_echo() -> Input:
    """The echo of 6,241 tokens with log-probabilities of 20 likeliest tokens."""
    return _echo(MAX_ECHOED // 21, 20)


def long_echo() -> Input:
    """The echo of 131,072 tokens with log-probabilities."""
    return _echo(MAX_ECHOED, 0)


INPUTS: dict[str, Callable[[], Input]] = {
    each.__name__: each
    for each in (
        many_bad_words,
        many_stop_strings,
        many_ids,
        long_text,
        valid_lists,
        long_stop_strings,
        one_unknown_field,
        nested_unknown_field,
        many_unknown_fields,
        short_echo,
        likeliest_echo,
        long_echo,
    )
}


def _sixteen() -> bytes:
    return build_request([1, 2, 3], n=16, max_new_tokens=4).SerializeToString()


def _echo(tokens: int, top: int) -> Input:
    ids = [at % 90 for at in range(tokens)]
    return Input(build_request(ids, max_new_tokens=4, echo=True, logprobs=top).SerializeToString())


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


# The processes


class EchoingVerifier(FakeVerifier):
    """The toy verifier, with log-probabilities."""

    async def open(self, call: OpenCall) -> Opened:
        opened = await super().open(call)
        first, top = call.parameters.echo_from, call.parameters.logprobs or 0
        if first is None:
            return opened
        logprobs = EchoedLogprobs.of((_logprobs(top),) * (call.update.base - first))
        return replace(opened, logprobs=logprobs)

    async def verify(self, call: VerifyCall) -> Verdict:
        verdict, held = await super().verify(call), self.held[call.update.opening]
        if (top := held.parameters.logprobs) is None:
            return verdict
        return replace(verdict, logprobs=(_logprobs(top),) * len(verdict.tokens))


def _logprobs(top: int) -> TokenLogprobs:
    return TokenLogprobs(-1.5, tuple((token, -1.5 - token) for token in range(top)))


async def verify() -> None:
    """A verifier's process: prints its address."""
    replica = await serve_engine(VERIFIER_REPLICA, EchoingVerifier())
    print(replica.address, flush=True)
    await asyncio.Event().wait()


async def send(address: str, message: bytes, messages: int) -> None:
    """A client's process: sends a message so many times at once, and prints how its calls ended."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = channel

        async def ask() -> str:
            call = stub.unary_stream("/dendro.v1.GenerationService/Generate")(message)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "answered"

        ended = await asyncio.gather(*(ask() for _ in range(messages)))
    print(*sorted(set(ended)), sep="; ", flush=True)


class LoopGaps:
    """The longest time that the loop did not come back to a task that always wants to run."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, loop.time() - began_s - 0.001)


def memory_mib(name: str) -> float:
    """A figure of this process, in kB in /proc: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def forget_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


@asynccontextmanager
async def child(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*THIS, *words, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def first_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def measure(messages: int, large: str, small: str) -> dict[str, Any]:
    """A router's process: serves the message in the file `large` so many times, after the one in `small`."""
    async with child("verify") as verifier:
        pool = RemotePool("verifier", [await first_line(verifier)])
        config = toy_config(drafters={})
        served = Served("toy", ToyTokenizer(), VOCABULARY, LONGEST, frozenset({END}), "float32")
        server = await serve_router(
            Ingress(config, Peers(config, {"toy": pool}, {}), MemorySessions(), {"toy": served})
        )
        async with child("send", server.address, small, "1") as client:
            assert await first_line(client) == "answered"
        async with child("send", server.address, large, str(messages)) as client:
            forget_peak()
            before_mib, gaps = memory_mib("VmRSS"), LoopGaps()
            watching = asyncio.create_task(gaps.watch())
            outcome = await first_line(client)
            watching.cancel()
        peak_mib = memory_mib("VmHWM") - before_mib
        await server.stop()
    return {"gap_ms": 1e3 * gaps.longest_s, "peak_mib": peak_mib, "outcome": outcome}


def measured(name: str) -> dict[str, Any]:
    """What an input costs a new router."""
    given = INPUTS[name]()
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large"), Path(folder, "small")
        large.write_bytes(given.message)
        small.write_bytes(build_request([1, 2], max_new_tokens=4, echo=True, logprobs=0).SerializeToString())
        words = [*THIS, "measure", str(given.messages), str(large), str(small)]
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures | {"bar_mib": MESSAGES * len(given.message) * given.messages / MIB + FIXED_MIB}


def main(names: list[str]) -> None:
    """Print the table, of all inputs or of these."""
    print(f"| input | longest gap, ms (bar {GAP_MS:g}) | memory, MiB | bar | outcome |\n|---|---|---|---|---|")
    for name in names or INPUTS:
        runs = [measured(name) for _ in range(RUNS)]
        gap_ms, peak_mib = (min(run[figure] for run in runs) for figure in ("gap_ms", "peak_mib"))
        about = (INPUTS[name].__doc__ or "").rstrip(".")
        print(
            f"| {about} | {gap_ms:.0f} | {peak_mib:.1f} | {runs[0]['bar_mib']:.1f} | {runs[0]['outcome']} |", flush=True
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["verify"]:
            asyncio.run(verify())
        case ["send", address, path, messages]:
            asyncio.run(send(address, Path(path).read_bytes(), int(messages)))
        case ["measure", messages, large, small]:
            print(json.dumps(asyncio.run(measure(int(messages), large, small))))
        case names:
            main(names)
