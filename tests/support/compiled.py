"""Runs code that compiles Triton kernels for an accelerator: in a process of its own, without the interpreter that the
other tests run kernels in."""

from __future__ import annotations

import os
import subprocess
import sys


def printed_by(code: str) -> list[str]:
    """The lines that the code prints. Raises AssertionError, with the end of its errors, if it fails."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()
