"""Compiling structures: tenants take turns, a full queue refuses, and a process ends whatever compiles."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time

import pytest
from dendro.compiling import CompileQueue
from dendro.errors import Overloaded
from dendro.guidance import LIMITS, TokenTexts
from dendro.structure import Structure
from dendro.structure_canary import Canary, CanaryRefused


def test_a_tenant_has_one_thread_at_a_time_and_tenants_take_turns():
    queue, done, gates = CompileQueue(threads=2), [], {name: threading.Event() for name in "abcd"}

    def work(name: str, gate: str = ""):
        def run(canary: object) -> str:
            if gate:
                assert gates[gate].wait(60)
            done.append(name)
            return name

        return run

    first = queue.submit("one", work("one's first", "a"))
    rest = [queue.submit("one", work(f"one's {place}")) for place in ("second", "third")]
    assert queue.submit("two", work("two's")).result(60) == "two's"  # though one tenant hangs
    assert done == ["two's"] and not any(each.done() for each in (first, *rest))
    gates["a"].set()
    assert [each.result(60) for each in (first, *rest)] == ["one's first", "one's second", "one's third"]


def test_two_tenants_that_find_one_idle_thread_do_not_wait_for_each_other():
    queue, gate = CompileQueue(threads=2), threading.Event()
    queue.submit("earlier", lambda canary: None).result(60)
    while not queue._idle:
        time.sleep(0.001)
    with queue._changed:  # both are submitted before the idle thread wakes
        hangs = queue.submit("one", lambda canary: gate.wait(60))
        other = queue.submit("two", lambda canary: 2)
    try:
        assert other.result(20) == 2 and not hangs.done()
    finally:
        gate.set()


def test_a_canary_answers_a_process_with_more_than_1024_open_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2048 if limits[1] == resource.RLIM_INFINITY else min(2048, limits[1])
    canary, tokens = Canary(), TokenTexts([b"a", b"b", b""], [2])
    with contextlib.ExitStack() as held:
        held.callback(canary.stop)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, limits[0]), limits[1]))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert "start: /a/" in canary.compiled("ab", tokens, Structure.regex("a"), LIMITS, cpu_s=60.0)
        with pytest.raises(CanaryRefused, match="does not compile"):
            canary.compiled("ab", tokens, Structure.regex("("), LIMITS, cpu_s=60.0)


@pytest.mark.parametrize(
    "schema, reason",
    [
        ('{"type": null, "exclusiveMinimum": 0}', "/type: type must be a string or array of strings"),
        ('{"$ref": "", "nullable": {}, "additionalItems": "^a$"}', "does not compile"),
    ],
)
def test_a_schema_with_odd_values_is_refused_with_the_reason_and_the_canary_goes_on(schema, reason):
    canary, tokens = Canary(), TokenTexts([b"a", b"b", b""], [2])
    try:
        with pytest.raises(CanaryRefused, match=reason):
            canary.compiled("ab", tokens, Structure.json_schema(schema), LIMITS, cpu_s=60.0)
        process = canary._process
        assert "start: /a/" in canary.compiled("ab", tokens, Structure.regex("a"), LIMITS, cpu_s=60.0)
        assert canary._process is process
    finally:
        canary.stop()


def test_an_error_of_ours_is_a_reason_too_and_does_not_end_the_canary():
    program = """
from dataclasses import asdict
from dendro import structure_canary
from dendro.guidance import LIMITS

def broken(form, texts):
    raise KeyError("quoted")

structure_canary.lark_of = broken
print(structure_canary._compiled(None, {"limits": asdict(LIMITS), "cpu_s": 60.0, "form": "regex", "texts": ["a"]}))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.stdout == "{'fault': 'does not compile: KeyError'}\n", found.stderr


def test_what_fails_or_is_cancelled_leaves_its_thread_to_the_next():
    queue, gate = CompileQueue(threads=1), threading.Event()

    def panic(canary: object) -> None:
        gate.wait(60)
        raise BaseException("a panic of a native library")

    failed = queue.submit("one", panic)
    cancelled = queue.submit("one", lambda canary: None)
    assert cancelled.cancel()
    gate.set()
    with pytest.raises(BaseException, match="a panic"):
        failed.result(60)
    assert queue.submit("one", lambda canary: 5).result(60) == 5


def test_a_full_queue_is_overloaded_for_its_tenant_and_then_for_all():
    queue, gate = CompileQueue(threads=1, waiting=3, of_tenant=2), threading.Event()
    begun = threading.Event()
    queue.submit("one", lambda canary: begun.set() or gate.wait(60))
    assert begun.wait(60)
    waiting = [queue.submit("one", lambda canary: 1) for _ in range(2)]
    with pytest.raises(Overloaded, match="structures: 2 wait"):
        queue.submit("one", lambda canary: 1)
    waiting.append(queue.submit("two", lambda canary: 1))
    with pytest.raises(Overloaded, match="structures: 3 wait"):
        queue.submit("three", lambda canary: 1)
    gate.set()
    assert [each.result(60) for each in waiting] == [1, 1, 1]


HANGING = """
import threading
from dendro.compiling import QUEUE
begun = threading.Event()
QUEUE.submit("one", lambda canary: begun.set() or threading.Event().wait())
assert begun.wait(60)
"""


def test_a_process_ends_though_a_compilation_hangs():
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=90)


DEEP = """
import asyncio
from dendro.compiling import QUEUE
from dendro.daemon_threads import DaemonThreads, in_thread
from dendro.guidance import LIMITS, TokenTexts, begin

tokens = TokenTexts([*(bytes([token]) for token in range(256)), b""], [256]).tokenizer()
nested = 'start: T0\\n' + ''.join(f'T{at}: "a" T{at + 1}? "b"\\n' for at in range(1000)) + 'T1000: "c"'

def work(*_):
    begin(tokens, nested, LIMITS)

QUEUE.submit("one", work).result()
DaemonThreads("masks", 1).submit(work).result()
asyncio.run(in_thread("opening", work))
"""


def test_threads_that_compile_have_the_stack_of_the_canary_where_the_system_gives_less():
    """A grammar for which 2 MiB, the threads' stack where `ulimit -s` is 2048 or unlimited, do not suffice."""
    command = ["sh", "-c", 'ulimit -s 2048 && exec "$@"', "sh", sys.executable, "-c", DEEP]
    subprocess.run(command, check=True, timeout=90)
