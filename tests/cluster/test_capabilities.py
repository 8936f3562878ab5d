"""Row independence and a small certify with the instructions of other processors, selected by environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import capabilities

VALUES = [
    *(("ATEN_CPU_CAPABILITY", value) for value in ("default", "avx2", "avx512")),
    *(("ONEDNN_MAX_CPU_ISA", value) for value in capabilities.ISA_NAMES),
    *(("MKL_CBWR", value) for value in ("COMPATIBLE", "AVX2", "AVX2,STRICT", "AVX512", "AVX512,STRICT")),
    *(("MKL_CBWR", value) for value in ("AUTO", "AUTO,STRICT")),
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "value"), VALUES, ids=["=".join(each) for each in VALUES])
def test_rows_are_independent_and_certify_passes_under(name, value, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", capabilities.__name__, name, value, str(tmp_path)],
        env=os.environ | {name: value, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        cwd=Path(capabilities.__file__).parents[2],
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    if done.returncode == capabilities.NOT_RUN:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.startswith("RUN: ")


@pytest.mark.parametrize(
    ("name", "value", "report", "follows"),
    [
        ("ATEN_CPU_CAPABILITY", "avx2", "AVX2", True),
        ("ATEN_CPU_CAPABILITY", "avx512", "AVX2", False),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "Intel AVX2", False),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "Intel AVX2", True),
        ("MKL_CBWR", "AVX512,STRICT", "AUTO,STRICT", False),
        ("MKL_CBWR", "COMPATIBLE", "COMPATIBLE", True),
        ("MKL_CBWR", "AVX2", "", False),
    ],
)
def test_a_value_counts_as_run_only_if_the_library_reports_it(name, value, report, follows):
    assert capabilities.honoured(name, value, report) is follows


def test_a_value_that_the_library_ignores_is_printed_as_not_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(capabilities, "reported", lambda name: "AUTO")
    assert capabilities.main("MKL_CBWR", "AVX512", tmp_path) == capabilities.NOT_RUN
    assert capsys.readouterr().out == "NOT RUN: MKL_CBWR=AVX512 is not honoured here; the library reports AUTO\n"


def test_instructions_that_the_processor_lacks_are_not_reported(monkeypatch):
    """torch reports the requested ATEN_CPU_CAPABILITY even if the processor lacks it, and crashes in its first loop."""
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGILL); print('reports AVX512')"
    monkeypatch.setitem(capabilities.PROBES, "ATEN_CPU_CAPABILITY", dies)
    assert capabilities.reported("ATEN_CPU_CAPABILITY") == ""
