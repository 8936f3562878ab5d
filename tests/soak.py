"""Random requests of several clients to a cluster of SmolLM2 and a drafter on this machine, for an hour, with faults.

python -m tests.soak                           an hour
python -m tests.soak --minutes 15 --first 0    shorter; --first is the number of the first case
python -m tests.soak --markdown docs/soak.md   also writes the page of the last run

Each case of `tests/random_requests.py` is asked with and without speculation, resumed and repeated. Meanwhile replicas
of drafter and verifier are killed in turn, and the drafter is stopped for a while. Memory and file descriptors of each
kind of process are watched. The exit code is 1 where any two answers differ, or where memory or descriptors of a kind
grow: their medians in the last fifth of the time may exceed those in the second by GROWTH.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import grpc.aio
import psutil
from dendro.client import CHANNEL_OPTIONS

from cluster.engines import usable_cores
from cluster.measure.machine import commit_of, processor_name
from cluster.running import descendants, running_cluster
from tests.random_requests import WAYS, Cases, remote
from tests.support.smollm2 import REAL_DRAFTER, pair

SAMPLE_S = 15.0
GROWTH = 1.25
SLACK = {"MB": 64.0, "descriptors": 24.0}
"""Growth by less than this is none."""
FAULTS = ("kill drafter", "stop drafter", "kill verifier")
STOPPED_S = 3.0


def kind_of(process: psutil.Process) -> str:
    """Its part in the cluster; empty for Ray's own processes."""
    line = " ".join(process.cmdline()).lower()
    if "redis-server" in line:
        return "redis"
    if "servereplica" not in line:
        return ""
    return next((kind for kind in ("verifier", "drafter", "router") if kind in line), "")


def by_kind() -> dict[str, list[psutil.Process]]:
    """This process, which has the clients, and the cluster's."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    found["clients"].append(psutil.Process())
    for process in descendants():
        try:
            if kind := kind_of(process):
                found[kind].append(process)
        except psutil.Error:  # it has ended
            continue
    return found


class ResourceWatch:
    """Memory and descriptors of the largest process of each kind, over time."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._began = time.monotonic()

    def sample(self) -> None:
        at = time.monotonic() - self._began
        for kind, processes in by_kind().items():
            facts = []
            for process in processes:
                try:
                    facts.append((process.memory_info().rss / 1e6, float(process.num_fds())))
                except psutil.Error:
                    continue
            for unit, values in zip(SLACK, zip(*facts, strict=True), strict=False):
                self.samples[kind, unit].append((at, max(values)))

    def rows(self, seconds: float) -> list[tuple[str, str, float, float, float]]:
        """Kind, unit, the medians of the second and of the last fifth, and the most."""
        rows = []
        for (kind, unit), samples in sorted(self.samples.items()):
            early = [value for at, value in samples if seconds / 5 <= at < seconds * 2 / 5]
            late = [value for at, value in samples if at >= seconds * 4 / 5]
            if early and late:
                most = max(value for _, value in samples)
                rows.append((kind, unit, statistics.median(early), statistics.median(late), most))
        return rows


async def cause_faults(every_s: float, caused: list[str]) -> None:
    for number in count():
        await asyncio.sleep(every_s)
        fault = FAULTS[number % len(FAULTS)]
        word, kind = fault.split()
        processes = by_kind().get(kind)
        if not processes:
            continue
        pid = processes[0].pid
        caused.append(fault)
        if word == "kill":
            os.kill(pid, signal.SIGKILL)
            continue
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)


async def soak(minutes: float, first: int, clients: int, every_s: float) -> tuple[list[str], bool]:
    """Run the requests. Returns the lines of the report, and whether all answers agreed and nothing grew."""
    seconds, caused = minutes * 60, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        config = pair(Path(folder), verifiers=2, grpc={"port": 0})  # a text whose verifier is killed needs another
        async with running_cluster(config) as address, grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
            cases, numbers, began = Cases(remote(channel), WAYS), count(first), time.monotonic()

            async def client() -> None:
                while time.monotonic() - began < seconds:
                    await cases.run(next(numbers))

            faults = asyncio.create_task(cause_faults(every_s, caused))
            work = [asyncio.create_task(client()) for _ in range(clients)]
            watch = ResourceWatch()
            while not all(task.done() for task in work):
                await asyncio.wait(work, timeout=SAMPLE_S)
                watch.sample()
                state = f"{cases.requests} requests, {len(cases.differences)} differences, {len(caused)} faults"
                print(f"{time.monotonic() - began:.0f} s: {state}", file=sys.stderr, flush=True)
            faults.cancel()
            await asyncio.gather(*work)
    lines = [*cases.differences]
    for title, counted in (("compared", cases.kinds), ("ended", cases.ends), ("refused", cases.refusals)):
        lines.append(f"{title}: {', '.join(f'{name} {times}' for name, times in counted.most_common()) or 'none'}")
    lines.append(f"faults: {', '.join(f'{fault} {caused.count(fault)}' for fault in FAULTS)}")
    grown = []
    for kind, unit, early, late, most in watch.rows(seconds):
        lines.append(f"{kind}, {unit}: {early:.0f} in the second fifth, {late:.0f} in the last, at most {most:.0f}")
        if late > max(early * GROWTH, early + SLACK[unit]):
            grown.append(f"{kind}, {unit}")
    lines.append(f"grown: {', '.join(grown) or 'none'}")
    lines.append(f"{cases.requests} requests, {len(cases.differences)} differences, {time.monotonic() - began:.0f} s")
    return lines, not cases.differences and not grown


def heading(given: argparse.Namespace) -> str:
    drafter = REAL_DRAFTER.name if REAL_DRAFTER.is_dir() else "one of random weights"
    return (
        f"python -m tests.soak --minutes {given.minutes:g} --clients {given.clients} --every {given.every:g}; "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit_of(Path(__file__).parent)}; "
        f"{processor_name()}, {usable_cores()} cores; SmolLM2-135M-Instruct, drafter: {drafter}"
    )


PAGE = """# An hour of random requests, with faults

Four clients send random requests to a cluster of SmolLM2-135M-Instruct and its drafter on one machine: sampling
parameters, structures, stop strings, sessions and log-probabilities in any combination. Each request is asked with and
without speculation, resumed and repeated, and all that a client sees of the answers is compared. Meanwhile replicas of
drafter and verifier are killed in turn, and the drafter is stopped for three seconds. `tests/soak.py` of a checkout
does it; it fails where two answers differ, or where the memory or the file descriptors of a kind of process grow. Its
last run:

```text
{}
```

`refused` counts requests without speculation that were refused, by the reason.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--every", type=float, default=90.0, help="seconds between two faults")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page of this run")
    given = parser.parse_args()
    print(title := heading(given), flush=True)
    report, succeeded = asyncio.run(soak(given.minutes, given.first, given.clients, given.every))
    print("\n".join(report))
    if given.markdown is not None:
        wrapped = [line for each in (title, *report) for line in textwrap.wrap(each, 116, subsequent_indent="    ")]
        given.markdown.write_text(PAGE.format("\n".join(wrapped)))
    sys.exit(0 if succeeded else 1)
