"""The wheel: all our code and its data, without the demo's weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_names import SOURCE_ROOTS, modules

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
MOST_BYTES = 2_000_000


@pytest.mark.long  # 7 s
def test_the_wheel_has_every_module_and_no_weights(tmp_path):
    source = tmp_path / "source"
    for name in ("cluster", "drafter_service", "verifier_service", "protos", "kernels"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    wheel = tmp_path / done.stdout.splitlines()[-1]
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not [name for name in names if name.endswith((".safetensors", "tokenizer.json"))]
    ours = {str(path.relative_to(ROOT / SOURCE_ROOTS[name.split(".")[0]])) for name, path in modules().items()}
    ours |= {"cluster/demo/held_out.json", "dendro/v1/generation.proto", "dendro/v1/generation_pb2_grpc.py"}
    ours |= {f"{name}/py.typed" for name in SOURCE_ROOTS}
    assert not ours - names
