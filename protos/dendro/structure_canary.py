"""The canary, a process that compiles structures first. A structure that never ends, takes all memory or crashes
llguidance ends this process, not the one that serves.

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

from dendro.failures import described
from dendro.guidance import StructureLimits, TokenTexts, fault_of_grammar, shortened
from dendro.lark_forms import lark_of
from dendro.schema_faults import located

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from dendro.structure import Structure

WALL_S = 30.0
"""Seconds after which a grammar is given up though it has not used up its CPU seconds: the machine is busy."""
HELD_SHARE = 0.2
"""Share of the CPU seconds in which llguidance must make a grammar's parser. The serving process makes that parser,
too, and llguidance then holds its interpreter lock."""
STACK_BYTES = 4 << 20
"""Stack of the compiling thread. The threads that compile the same grammar later have twice that, by
`start_thread`."""


class CanaryDied(Exception):
    """Raised if the process ended while it compiled. The message says why."""


class CanaryRefused(Exception):
    """Raised if the structure cannot be enforced. The message says why."""


class CanaryBusy(Exception):
    """Raised if the process did not get its CPU time."""


class Canary:
    """The process, as its user sees it: started when it is needed. Not thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[str] = set()  # names of the vocabularies that the process has

    def compiled(
        self, name: str, tokens: TokenTexts, structure: Structure, limits: StructureLimits, cpu_s: float
    ) -> str:
        """The grammar of a structure, which compiles within the limits. name: of the vocabulary. Raises CanaryRefused,
        CanaryDied for one that takes more CPU time or memory, and CanaryBusy."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        try:
            if name not in self._known:
                given = [each.decode("latin-1") for each in tokens.tokens]
                self._send({"name": name, "tokens": given, "special": tokens.special_token_ids})
                self._known.add(name)
            asked = {"name": name, "form": structure.form, "texts": structure.texts, "limits": asdict(limits)}
            self._send(asked | {"cpu_s": cpu_s})
            answer = json.loads(self._line())
        except (OSError, ValueError):
            code = self.stop()
        except CanaryBusy:
            self.stop()
            raise
        else:
            if answer["fault"]:
                raise CanaryRefused(answer["fault"])
            return str(answer["lark"])
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
        """Kill the process, from any thread: `compiled` then raises CanaryDied."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self) -> int:
        """Kill the process, and return how it ended; it is started again when it is needed."""
        process, self._process, self._known = self._process, None, set()
        if process is None:
            return 0
        if process.stdout is not None and process.poll() is None:
            try:
                code = process.wait(0.2)  # the process may be dying of its limit
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        else:
            code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # raised for input that the process did not read
                    pipe.close()
        return code


def _bound_memory(more_bytes: int) -> None:
    """Limit this process to `more_bytes` of address space beyond what it has now; no limit on systems that do not
    report address space."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _compiled(tokenizer: LLTokenizer, message: dict[str, Any]) -> dict[str, str]:
    """Compile within the limits: the process dies where they do not suffice."""
    limits, found = StructureLimits(**message["limits"]), list[dict[str, str]]()
    _bound_memory(limits.compile_mb << 20)
    held_s = HELD_SHARE * message["cpu_s"]

    def work() -> None:
        form, texts = message["form"], message["texts"]
        try:
            lark = lark_of(form, texts)
        except ValueError as error:
            found.append({"fault": str(error)})
            return
        fault = fault_of_grammar(tokenizer, lark, limits, held_s)
        found.append({"fault": shortened(located(" ".join(fault.split()), form, texts[0])), "lark": lark})

    def work_or_fault() -> None:
        try:
            work()
        except MemoryError:  # the process ends: it has used up its limit
            raise
        except Exception as error:  # a fault of ours or the library's: the process goes on for other structures
            found.append({"fault": f"does not compile: {described(error)}"})

    thread = threading.Thread(target=work_or_fault)
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
            sys.stdout.write(json.dumps(_compiled(tokenizers[message["name"]], message)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
