"""`make gpu`: all checks that need an accelerator, in one command of less than ten minutes.

Each step is a process with its own time limit and log. If one fails, the others still run. A folder of results is
written: `results.json`, `summary.txt`, `logs/STEP.txt`, and beside it an archive of the folder. The exit status is 1 if
a step failed. This file imports Python's standard library alone. The steps need torch, triton, transformers, scipy and
pytest, which the machine must have. Other packages that it lacks, or has in an older version, are installed without a
network from a folder of wheels into a temporary folder.

With `--dry` the steps run on the CPU, the kernels in Triton's interpreter, with tiny sizes. The steps `certify-KIND`
then serve a tiny pair of each kind with the forms of a GPU: `DeviceRunner` and the levels of drafters, steps as if
recorded. A target with Mamba-1 mixers has no `DeviceRunner`. The steps `large` and `pair` serve targets in a CPU's own
forms, which have other kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUDGET_S = 570.0
"""The limit of all steps together."""
DRY_BUDGET_S = 3600.0
DRY_LIMIT_S = 900.0
TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A script of this folder, or tests for pytest."""

    name: str
    limit_s: float
    script: str = ""
    arguments: tuple[str, ...] = ()  # of the script
    tests: tuple[str, ...] = ()
    alone: bool = False  # it measures time: no other step runs beside it
    dry: tuple[str, ...] = ()  # more arguments for pytest in a dry run
    dry_only: bool = False  # there is no such step on an accelerator

    def command(self, dry: bool, report: Path) -> list[str]:
        if self.script:
            return [sys.executable, str(HERE / self.script), *self.arguments, *(["--dry"] if dry else [])]
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib"]
        pytest += ["-o", "filterwarnings="]  # the machine's packages are not the pinned ones, and warn of other things
        return [
            sys.executable,
            *pytest,
            f"--junitxml={report}",
            "--durations=5",
            *self.tests,
            *(self.dry if dry else ()),
        ]


KERNEL_TESTS = (
    "tests/kernels/test_accelerated.py",
    "tests/kernels/test_norm.py",
    "tests/kernels/test_tensor_cores.py",
    "tests/verifier_service/test_device_norms.py",
    "tests/verifier_service/test_device_pages.py",
)
STATE_TESTS = (
    "tests/kernels/test_state_kernels.py",
    "tests/verifier_service/test_states_on_device.py",
    "tests/verifier_service/test_device_states.py",
)
DRAFTER_TESTS = (
    "tests/kernels/test_drafter_kernels.py",
    "tests/drafter_service/test_device_levels.py",
    "tests/drafter_service/test_device_trees.py",
)
STEPS = (
    GpuStep("versions", 60, script="versions.py"),
    GpuStep(
        "kernels",
        180,
        tests=KERNEL_TESTS,
        dry=("-k", "noise or walks or accepted or group_is_normed or other_types or items_hold or recorded_step"),
    ),
    GpuStep("device", 180, tests=("tests/verifier_service/test_device.py",), dry=("-k", "recorded or host_arrays")),
    GpuStep("states", 180, tests=STATE_TESTS, dry=("-k", "listed or waits or writes")),
    GpuStep("drafters", 120, tests=DRAFTER_TESTS, dry=("-k", "ranked or one_group or processor")),
    GpuStep("rows", 150, script="rows.py"),
    GpuStep("capture", 90, script="capture.py"),
    GpuStep("certify-llama", 240, script="certify_quick.py", arguments=("llama",)),
    GpuStep("certify-neox", 240, script="certify_quick.py", arguments=("neox",), dry_only=True),
    GpuStep("certify-mamba", 240, script="certify_quick.py", arguments=("mamba",), dry_only=True),
    GpuStep("certify-mamba2", 240, script="certify_quick.py", arguments=("mamba2",)),
    GpuStep("certify-hybrid", 240, script="certify_quick.py", arguments=("hybrid",), dry_only=True),
    GpuStep("large", 300, script="large.py", alone=True),
    GpuStep("levels", 200, script="levels.py", alone=True),
    GpuStep("scan", 60, script="scan.py", alone=True),
    GpuStep("ceilings", 60, script="ceilings.py", alone=True),
    GpuStep("profile", 120, script="profile_steps.py", alone=True),
    GpuStep("pair", 240, script="pair.py", alone=True),
)


def steps_of(dry: bool) -> list[GpuStep]:
    """The steps of a run."""
    return [step for step in STEPS if dry or not step.dry_only]


@dataclass(slots=True)
class Done:
    """A step that ended."""

    step: str
    outcome: str  # passed, failed, timed out
    seconds: float
    status: int
    result: dict[str, Any] = field(default_factory=dict)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text)[:4])


def lacking(wheel: Path) -> bool:
    """Whether the machine lacks this wheel's package or has an older one."""
    name, offered = wheel.name.split("-")[:2]
    try:
        return numbers(version(name)) < numbers(offered)
    except PackageNotFoundError:
        return True


def install(wheels: Path, site: Path) -> str:
    """Install what the machine lacks from a folder of wheels; returns their names, or pip's error."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if lacking(wheel)]
    if not missing:
        return "nothing"
    pip = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
    ran = subprocess.run([sys.executable, *pip, *map(str, missing)], capture_output=True, text=True)
    if ran.returncode:
        return f"nothing, as pip failed: {ran.stderr.strip()}"
    return ", ".join(wheel.name for wheel in missing)


def environment(dry: bool, site: Path) -> dict[str, str]:
    paths = [site, ROOT, ROOT / "protos", ROOT / "kernels"]
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",
        "MKL_CBWR": "AUTO,STRICT",
    }
    if dry:
        given |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | given


def run(step: GpuStep, dry: bool, left_s: float, env: dict[str, str], log: Path) -> Done:
    """Run a step in its own process group; kill the group at its time limit."""
    limit = min(DRY_LIMIT_S if dry else step.limit_s, left_s)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        found, report = Path(folder) / "result.json", Path(folder) / "report.xml"
        if limit <= 0:
            out.write("not started: no time is left\n")
            return Done(step.name, "timed out", 0.0, 124)
        process = subprocess.Popen(
            step.command(dry, report),
            cwd=ROOT,
            env=env | {"GPU_RESULT": str(found)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = 124
            out.write(f"\nended after {limit:.0f} s, its limit\n")
        result = left_by_step(found, report)
    outcome = {0: "passed", 124: "timed out"}.get(status, "failed")
    return Done(step.name, outcome, round(time.monotonic() - began, 1), status, result)


def left_by_step(found: Path, report: Path) -> dict[str, Any]:
    """The result that a step wrote. A killed step may leave a truncated file, which is reported as `unreadable`."""
    result: dict[str, Any] = {}
    for file, read in ((found, lambda file: json.loads(file.read_text())), (report, counts)):
        try:
            result |= read(file) if file.is_file() else {}
        except (ValueError, ElementTree.ParseError) as error:
            result["unreadable"] = f"{file.name}: {error}"
    return result


def counts(report: Path) -> dict[str, Any]:
    """The number of tests in a pytest report, and the names of those that failed or were skipped."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    named = {
        kind: [case.get("name") for case in cases if any(case.find(tag) is not None for tag in tags)]
        for kind, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",)))
    }
    return {"tests": len(cases), **named}


def groups(steps: Sequence[GpuStep], dry: bool) -> list[list[GpuStep]]:
    """Steps that run beside each other: all that measure no time. In a dry run none does, as two cores are enough for
    one."""
    together = [] if dry else [step for step in steps if not step.alone]
    return [*([together] if together else []), *([step] for step in steps if step not in together)]


def commit() -> str:
    try:
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:  # the machine may have no git
        head = ""
    return head or "unknown"


def summary(found: Sequence[Done], facts: dict[str, Any], logs: Path) -> str:
    lines = [f"{key}: {value}" for key, value in facts.items()]
    lines += ["", f"{'step':<14} {'outcome':<10} {'seconds':>8}  result"]
    for each in found:
        lines.append(
            f"{each.step:<14} {each.outcome:<10} {each.seconds:>8.1f}  {each.result.get('summary', '') or short(each)}"
        )
    for each in found:
        if each.outcome != "passed":
            tail = (logs / f"{each.step}.txt").read_text(errors="replace").splitlines()[-TAIL_LINES:]
            lines += ["", f"--- {each.step}: {each.outcome}, the end of its log", *tail]
    return "\n".join(lines) + "\n"


def short(done: Done) -> str:
    if "tests" not in done.result:
        return f"exit status {done.status}"
    failed, skipped = len(done.result["failed"]), len(done.result["skipped"])
    return f"{done.result['tests']} tests, {failed} failed, {skipped} skipped"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, in Triton's interpreter, with tiny sizes")
    parser.add_argument("--out", type=Path, required=True, help="the folder for results; it must not exist")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", help="a folder of wheels; it may be missing")
    parser.add_argument("--only", action="append", choices=[step.name for step in STEPS], help="may be repeated")
    parser.add_argument("--model", action="append", default=[], help="of the step `large`, this one; may be repeated")
    given = parser.parse_args(arguments)
    models = tuple(f"--only={model}" for model in given.model)
    steps = [replace(step, arguments=models) if step.name == "large" else step for step in steps_of(given.dry)]
    steps = [step for step in steps if not given.only or step.name in given.only]
    if not steps:
        parser.error(f"{', '.join(given.only)}: only a dry run has such a step")
    logs = given.out / "logs"
    logs.mkdir(parents=True)
    began = time.monotonic()
    found: list[Done] = []
    with tempfile.TemporaryDirectory() as site:
        installed = install(given.wheels, Path(site))
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "dry": given.dry,
            "python": sys.version.split()[0],
            "installed": installed,
        }
        env = environment(given.dry, Path(site))
        for beside in groups(steps, given.dry):
            print(f"{', '.join(step.name for step in beside)} ...", flush=True)
            left_s = (DRY_BUDGET_S if given.dry else BUDGET_S) - (time.monotonic() - began)
            with ThreadPoolExecutor(len(beside)) as threads:
                begun = [
                    threads.submit(run, step, given.dry, left_s, env, logs / f"{step.name}.txt") for step in beside
                ]
                for done in as_completed(begun):
                    found.append(done.result())
                    facts |= found[-1].result if found[-1].step == "versions" else {}
                    found.sort(key=lambda each: [step.name for step in STEPS].index(each.step))
                    text = summary(found, facts, logs)  # written after each step: this run may be killed
                    (given.out / "summary.txt").write_text(text)
                    (given.out / "results.json").write_text(
                        json.dumps(facts | {"steps": [asdict(each) for each in found]}, indent=1)
                    )
    shutil.make_archive(str(given.out), "gztar", given.out.parent, given.out.name)
    print(text)
    return int(any(each.outcome != "passed" for each in found))


if __name__ == "__main__":
    sys.exit(main())
