"""A process that compiles structures first: one that never ends, takes all memory or crashes llguidance ends this
process, not the one that serves.

`python -m dendro.structure_canary` reads a JSON object a line: the tokens of a vocabulary, or a grammar, which it
answers in a line. Imports little, as it is started again after each grammar that kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dendro.guidance import StructureLimits, TokenTexts, fault_of_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WALL_S = 30.0
"""A grammar that has not used up its CPU seconds after this time is given up: the machine is busy."""
STACK_BYTES = 4 << 20
"""Of the compiling thread. The threads that compile the same grammar later have 8 MiB."""


class CanaryDied(Exception):
    """The process ended while it compiled. The message says why."""


class CanaryBusy(Exception):
    """The process did not get its CPU time."""


class Canary:
    """The process, as its user sees it: started when it is needed. Not thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[str] = set()  # names of the vocabularies that the process has

    def fault(self, name: str, tokens: TokenTexts, lark: str, limits: StructureLimits, cpu_s: float) -> str:
        """Why a grammar cannot be enforced; empty where it can. name: of the vocabulary. Raises CanaryDied for one that
        takes more CPU time or memory than the limits allow, and CanaryBusy."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        try:
            if name not in self._known:
                given = [each.decode("latin-1") for each in tokens.tokens]
                self._send({"name": name, "tokens": given, "special": tokens.special_token_ids})
                self._known.add(name)
            self._send({"name": name, "lark": lark, "limits": asdict(limits), "cpu_s": cpu_s})
            return str(json.loads(self._line())["fault"])
        except (OSError, ValueError):
            code = self.stop()
        except CanaryBusy:
            self.stop()
            raise
        if code == -signal.SIGPROF:
            raise CanaryDied(f"was not compiled within {cpu_s:g} s of CPU time; simplify it")
        raise CanaryDied(f"takes more than {limits.compile_mb} MiB to compile, or crashes the compiler; simplify it")

    def _start(self) -> None:
        folder = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dendro.structure_canary"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _line(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        waiting = select.poll()  # `select` takes no descriptor above 1023, which a router with many clients has
        waiting.register(self._process.stdout, select.POLLIN)
        if not waiting.poll(1000 * WALL_S):
            raise CanaryBusy
        return self._process.stdout.readline()

    def kill(self) -> None:
        """Kill the process, from any thread: `fault` then raises CanaryDied."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self) -> int:
        """Kill the process, and return how it ended; it is started again when it is needed."""
        process, self._process, self._known = self._process, None, set()
        if process is None:
            return 0
        if process.stdout is not None and process.poll() is None:
            try:
                code = process.wait(0.2)  # it may be dying of its limit
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        else:
            code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # of what it did not read
                    pipe.close()
        return code


def _bound_memory(more_bytes: int) -> None:
    """Allow this process so much address space beside what it has; where the system does not tell that, any."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _checked(tokenizer: LLTokenizer, message: dict[str, Any]) -> str:
    """Compile within the limits: the process dies where they do not suffice."""
    limits, found = StructureLimits(**message["limits"]), list[str]()
    _bound_memory(limits.compile_mb << 20)
    thread = threading.Thread(target=lambda: found.append(fault_of_grammar(tokenizer, message["lark"], limits)))
    signal.setitimer(signal.ITIMER_PROF, message["cpu_s"])
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return found[0]


def main() -> None:
    """Answer until the input ends: its writer is gone."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    tokenizers: dict[str, LLTokenizer] = {}
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "tokens" in message:
            given = [each.encode("latin-1") for each in message["tokens"]]
            tokenizers[message["name"]] = TokenTexts(given, message["special"]).tokenizer()
        else:
            answer = {"fault": _checked(tokenizers[message["name"]], message)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
