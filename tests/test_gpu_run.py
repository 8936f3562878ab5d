"""`make gpu`: if a step fails, hangs or dies, the others run and all results are written."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.device_engines import launch_one_at_a_time

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu():
    """`tests/gpu/run.py` as a module; its folder is no package."""
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


GOOD = """
import json, os
with open(os.environ["GPU_RESULT"], "w") as file:
    json.dump({"summary": "all is well", "speed": 7}, file)
"""


def test_other_steps_run_when_a_step_fails_hangs_or_dies(gpu, tmp_path, monkeypatch, capsys):
    scripts = {
        "fails": "raise SystemExit('no device')",
        "hangs": "import subprocess, sys, time\nprint('begun', flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\ntime.sleep(600)",
        "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "good": GOOD,
    }
    steps = []
    for name, source in scripts.items():
        (tmp_path / f"{name}.py").write_text(source)
        steps.append(gpu.GpuStep(name, 3.0 if name == "hangs" else 60.0, script=str(tmp_path / f"{name}.py")))
    monkeypatch.setattr(gpu, "STEPS", tuple(steps))
    out = tmp_path / "results"
    assert gpu.main(["--out", str(out), "--wheels", str(tmp_path / "none")]) == 1
    found = json.loads((out / "results.json").read_text())
    assert [(each["step"], each["outcome"]) for each in found["steps"]] == [
        ("fails", "failed"),
        ("hangs", "timed out"),
        ("dies", "failed"),
        ("good", "passed"),
    ]
    assert found["steps"][3]["result"] == {"summary": "all is well", "speed": 7}
    assert found["date"] and found["commit"] and found["python"]
    text = (out / "summary.txt").read_text()
    assert "all is well" in text and "no device" in text and "ended after 3 s" in text
    assert text in capsys.readouterr().out
    with tarfile.open(f"{out}.tar.gz") as archive:
        assert {"results/results.json", "results/logs/hangs.txt"} <= set(archive.getnames())


def test_no_step_begins_after_the_time_for_all_steps(gpu, tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.setattr(gpu, "STEPS", (gpu.GpuStep("good", 60.0, script=str(tmp_path / "good.py")),))
    monkeypatch.setattr(gpu, "BUDGET_S", 0.0)
    assert gpu.main(["--out", str(tmp_path / "results"), "--wheels", str(tmp_path / "none")]) == 1
    assert "not started" in (tmp_path / "results" / "logs" / "good.txt").read_text()


def test_steps_run_where_pip_fails_and_git_is_missing(gpu, tmp_path, monkeypatch):
    """pip refuses the wheel, which is no archive; PATH has no programs."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "no_such_package-1.0-py3-none-any.whl").write_text("no archive")
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.setattr(gpu, "STEPS", (gpu.GpuStep("good", 60.0, script=str(tmp_path / "good.py")),))
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "results"
    assert gpu.main(["--out", str(out), "--wheels", str(tmp_path / "wheels")]) == 0
    found = json.loads((out / "results.json").read_text())
    assert found["commit"] == "unknown" and "pip failed" in found["installed"]
    assert found["steps"][0]["result"]["speed"] == 7


@pytest.mark.parametrize("name", ["result.json", "report.xml"])
def test_a_truncated_file_of_a_killed_step_does_not_end_the_run(gpu, tmp_path, name):
    (tmp_path / "result.json").write_text('{"speed": 7}')
    (tmp_path / "report.xml").write_text("<testsuites><testcase name='one'/></testsuites>")
    (tmp_path / name).write_text('{"spe' if name == "result.json" else "<testsui")
    found = gpu.left_by_step(tmp_path / "result.json", tmp_path / "report.xml")
    assert found["unreadable"].startswith(name)
    assert found.get("speed") == (None if name == "result.json" else 7)
    assert found.get("tests") == (None if name == "report.xml" else 1)


def test_failed_tests_are_named(gpu, tmp_path):
    (tmp_path / "test_two.py").write_text("def test_right(): pass\ndef test_wrong(): assert 0\n")
    step = gpu.GpuStep("tests", 60.0, tests=(str(tmp_path / "test_two.py"),))
    done = gpu.run(step, False, 60.0, dict(os.environ), tmp_path / "log.txt")
    assert done.outcome == "failed"
    assert done.result == {"tests": 2, "failed": ["test_wrong"], "skipped": []}


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is an accelerator")
def test_without_an_accelerator_a_step_fails_without_a_result(gpu, tmp_path):
    step = next(step for step in gpu.STEPS if step.name == "ceilings")
    done = gpu.run(step, False, 60.0, gpu.environment(False, tmp_path), tmp_path / "log.txt")
    assert (done.outcome, done.result) == ("failed", {})
    assert "no accelerator" in (tmp_path / "log.txt").read_text()


def test_a_dry_run_certifies_each_kind_and_a_gpu_the_demos(gpu):
    def certified(dry):
        return [step.arguments[0] for step in gpu.steps_of(dry) if step.script == "certify_quick.py"]

    assert certified(dry=True) == ["llama", "neox", "mamba", "mamba2", "hybrid"]
    assert certified(dry=False) == ["llama", "mamba2"]


def test_a_run_without_steps_is_refused(gpu, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path / "results"), "--only", "certify-hybrid"])
    assert "certify-hybrid" in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_interpreted_launches_of_two_threads_run_one_after_another(monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton is not installed")
    running, most = [], []

    def launch(self, number):
        running.append(number)
        time.sleep(0.02)
        most.append(len(running))
        running.remove(number)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    launch_one_at_a_time(monkeypatch)
    kernel = object.__new__(interpreter.GridExecutor)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(kernel, range(8)))
    assert most == [1] * 8


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif("DENDRO_GPU_DRY" not in os.environ, reason="takes half an hour; set DENDRO_GPU_DRY=1 to run it")
def test_the_dry_run_passes_every_step(gpu, tmp_path):
    ran = subprocess.run(
        [sys.executable, ROOT / "tests" / "gpu" / "run.py", "--dry", "--out", tmp_path / "dry"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    steps = json.loads((tmp_path / "dry" / "results.json").read_text())["steps"]
    assert len(steps) == len(gpu.STEPS) and all(each["outcome"] == "passed" and each["result"] for each in steps)
