"""The machine and the command of a measurement."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cluster.engines import usable_cores

LIBRARIES = ("torch", "transformers", "ray", "grpcio", "redis", "numpy")
NUMERICS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that change the speed or the bits of linear algebra."""


def processor_name() -> str:
    """The processor's model name; its architecture if the system does not report one."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine(threads: int) -> dict[str, object]:
    """The `machine` object of a report; `threads` are those of each engine."""
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {name: each.version for name in LIBRARIES for each in islice(distributions(name=name), 1)},
        "environment": {name: os.environ[name] for name in NUMERICS if name in os.environ},
    }


def report_head(bench: str, started: float, local: bool, seed: int, threads: int) -> dict[str, Any]:
    """What all reports begin with: the bench, the machine and the run. started: a time of the monotonic clock"""
    run = {
        "command": shlex.join(["dendro", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit_of(Path(__file__).parent),
        "local": local,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    return {"bench": bench, "machine": describe_machine(threads), "settings": run}


def commit_of(folder: Path) -> str:
    """The commit of `folder`'s checkout, with a plus if tracked files differ; `unknown` without a checkout or git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") if commit else "unknown"
    except FileNotFoundError:
        return "unknown"
