"""A contender in a process of its own: it reads calls and writes replies, each a line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from dendro.errors import EngineFailed, one_line

from cluster.measure.measurement import TimedAnswer

Call = dict[str, Any]
Reply = dict[str, Any]
_FAILURE = re.compile(r"\b(error|failed|failure|illegal|unsupported)\b", re.IGNORECASE)
_KEPT_LOG = 1 << 16
LONGEST_LINE = 1 << 24
"""Bytes of a reply."""


def serve_calls(load: Callable[..., tuple[Reply, Callable[[Call], Reply]]]) -> None:
    """Answer the calls on standard input until its end. The first line written is what `load` of this process's
    arguments returns beside the function that answers them, or its error; an exception becomes the reply
    `{"error": ...}`."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be read as a reply
    try:
        ready, answer = load(*json.loads(sys.argv[1]))
    except Exception as error:  # raised by the other process
        print(json.dumps({"error": _text_of(error)}), file=lines)
        return
    print(json.dumps(ready), file=lines)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": _text_of(error)}
        print(json.dumps(reply), file=lines)


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"


def failure_in(log: str) -> str:
    """The first line of a library's log that reports a failure; empty if there is none."""
    return next((one_line(line.strip(), 300) for line in log.splitlines() if _FAILURE.search(line)), "")


@dataclass(slots=True)
class ContenderProcess:
    """A running process that answers calls."""

    name: str
    process: Process
    log: IO[str] | None
    facts: Reply = field(default_factory=dict)  # facts that the process wrote when it had loaded

    async def answer(self, row: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> TimedAnswer:
        """Time an answer in the other process. Raises EngineFailed like `call`."""
        fields = {"prompt": list(prompt), "temperature": temperature, "seed": seed, "tokens": tokens}
        found = await self.call(row, **fields)
        return TimedAnswer(**found | {"tokens": tuple(found["tokens"])})

    async def call(self, row: str, **fields: object) -> Reply:
        """The reply to a call for a row. Raises EngineFailed with the other process's error, or with how it ended."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"row": row, **fields}).encode() + b"\n")
        with suppress(ConnectionError):  # the process has ended: its reply says how
            await self.process.stdin.drain()
        return await self.reply(row)

    async def reply(self, who: str | None = None) -> Reply:
        """The next line that the process writes. Raises EngineFailed. who: name that begins the error's message; None:
        the process's own"""
        assert self.process.stdout
        line = await self.process.stdout.readline()
        if not line:
            status = await self.process.wait()
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise EngineFailed(self._with_log(f"{self.name}: its process {how}"))
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(self._with_log(f"{who or self.name}: {reply['error']}"))
        return reply

    def _with_log(self, text: str) -> str:
        if self.log is None:
            return text
        self.log.seek(0)
        found = failure_in(self.log.read(_KEPT_LOG))
        return f"{text} (its log: {found})" if found else text


@asynccontextmanager
async def contender_process(
    name: str, module: str, arguments: Sequence[object], environment: Mapping[str, str], keep_log: bool = False
) -> AsyncIterator[ContenderProcess]:
    """Start a module of ours that calls `serve_calls`, wait until it has loaded, and end it with the context. Raises
    EngineFailed, in a sentence, if it cannot be loaded.

    name: begins errors that concern no row   arguments: those of the module's `load`, sent as JSON
    environment: the whole environment of the process
    keep_log: its standard error is kept for errors instead of shown
    """
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        log = file if keep_log else None
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=log, env=environment, limit=LONGEST_LINE
        )
        try:
            contender = ContenderProcess(name, process, log)
            contender.facts = await contender.reply()
            yield contender
        finally:
            assert process.stdin
            process.stdin.close()
            if process.returncode is None:
                process.terminate()
            await process.wait()
