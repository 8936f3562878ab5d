"""A contender in a process of its own: it reads calls and writes replies, each a line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from dendro.errors import EngineFailed, one_line

from cluster.measure.measurement import TimedAnswer

Call = dict[str, Any]
Reply = dict[str, Any]
_FAILURE = re.compile(r"\b(error|failed|failure|illegal|unsupported)\b", re.IGNORECASE)
_KEPT_LOG = 1 << 16
LONGEST_LINE = 1 << 24
"""Bytes of a reply."""


def serve_calls(load: Callable[[], tuple[Reply, Callable[[Call], Reply]]]) -> None:
    """Answer the calls on standard input until its end. The first line written is what `load` returns beside the
    function that answers them, or its error; an exception becomes the reply `{"error": ...}`."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be read as a reply
    try:
        ready, answer = load()
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


class ContenderProcess:
    """A module of ours that calls `serve_calls`. Use as an asynchronous context, which starts it and waits until it has
    loaded; raises EngineFailed, in a sentence, if that fails.

    `name` begins the errors that concern no row. `environment` is the process's whole environment. `keep_log`: its
    standard error is kept for errors instead of shown.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        keep_log: bool = False,
    ) -> None:
        self.facts: Reply = {}  # facts that the process wrote when it had loaded
        self._name = name
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = dict(environment)
        self._log = tempfile.TemporaryFile("w+", errors="replace") if keep_log else None  # noqa: SIM115  # see _stop

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=self._log, env=self._environment, limit=LONGEST_LINE
        )
        try:
            self.facts = await self._reply(self._name)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def answer(self, row: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> TimedAnswer:
        """Time an answer in the other process. Raises EngineFailed as `call`."""
        fields = {"prompt": list(prompt), "temperature": temperature, "seed": seed, "tokens": tokens}
        return TimedAnswer.of(await self.call(row, **fields))

    async def call(self, row: str, **fields: object) -> Reply:
        """The reply to a call for a row. Raises EngineFailed with the other process's error, or with how it ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"row": row, **fields}).encode() + b"\n")
        with suppress(ConnectionError):  # the process has ended: its reply says how
            await self._process.stdin.drain()
        return await self._reply(row)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def _stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        if not self.ended:
            self._process.terminate()
        await self._process.wait()
        if self._log is not None:
            self._log.close()

    async def _reply(self, who: str) -> Reply:
        assert self._process.stdout
        line = await self._process.stdout.readline()
        if not line:
            status = await self._process.wait()
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise EngineFailed(self._with_log(f"{self._name}: its process {how}"))
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(self._with_log(f"{who}: {reply['error']}"))
        return reply

    def _with_log(self, text: str) -> str:
        if self._log is None or self._log.closed:
            return text
        self._log.seek(0)
        found = failure_in(self._log.read(_KEPT_LOG))
        return f"{text} (its log: {found})" if found else text
