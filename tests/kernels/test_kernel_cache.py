"""Machine code of kernels: compiled once, loaded without numba, and never from a folder that others may write to."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from tree_kernels import kernel_cache
from tree_kernels.kernel_cache import FOLDER, NoKernelsError, load_kernels
from tree_kernels.matmul import why_not_packed

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

DOUBLING = """
from numba import types
from tree_kernels.vectors import floats

def double(numbers: int, count: int) -> None:
    given = floats(numbers)
    for i in range(count):
        given[i] *= types.float32(2)

KERNELS = {"double": (double, "ii")}
"""
USE = """
import numpy as np, sys
from tree_kernels.kernel_cache import load_kernels
numbers = np.arange(5, dtype=np.float32)
load_kernels("doubling").functions["double"](numbers.ctypes.data, 5)
print(numbers.tolist(), "numba" in sys.modules)
"""
DOUBLED = "[0.0, 2.0, 4.0, 6.0, 8.0]"


@pytest.fixture
def module(tmp_path):
    (tmp_path / "doubling.py").write_text(DOUBLING)
    return tmp_path / "doubling.py"


def run(tmp_path, source=USE, **environment):
    """What a new process prints, with this folder for its kernels."""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {FOLDER: str(tmp_path / "kernels"), "PYTHONPATH": path} | environment
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_second_process_loads_the_kernels_without_numba(tmp_path, module):
    assert run(tmp_path) == f"{DOUBLED} True"
    assert run(tmp_path) == f"{DOUBLED} False"


def test_kernels_whose_source_changed_are_compiled_again(tmp_path, module):
    run(tmp_path)
    module.write_text(DOUBLING.replace("float32(2)", "float32(3)"))
    assert run(tmp_path) == "[0.0, 3.0, 6.0, 9.0, 12.0] True"


def test_a_damaged_file_is_compiled_again(tmp_path, module):
    run(tmp_path)
    (file,) = (tmp_path / "kernels").glob("*.zip")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert run(tmp_path) == f"{DOUBLED} True"
    assert run(tmp_path) == f"{DOUBLED} False"


@pytest.mark.parametrize("folder", ["shared", "/proc/nowhere"])
def test_without_a_folder_of_its_own_a_process_compiles_and_stores_nothing(tmp_path, module, folder):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    place = str(shared) if folder == "shared" else folder
    for _ in range(2):
        assert run(tmp_path, **{FOLDER: place}) == f"{DOUBLED} True"
    assert not list(shared.iterdir())


def test_the_log_names_the_folder_that_others_may_write_to(tmp_path, monkeypatch, caplog):
    tmp_path.chmod(0o777)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert kernel_cache._folder() is None
    assert str(tmp_path) in caplog.text and FOLDER in caplog.text


def test_a_kernel_that_may_raise_is_refused_while_it_is_compiled(tmp_path, module):
    module.write_text(DOUBLING.replace("range(count)", "range(0, count, count)"))
    refused = """
    from tree_kernels.kernel_cache import NoKernelsError, load_kernels
    try:
        load_kernels("doubling")
    except NoKernelsError as error:
        print(error)
    """
    assert "needs numba at run time" in run(tmp_path, refused)


def test_without_numba_the_reason_names_the_extra(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(kernel_cache, "version", missing)
    with pytest.raises(NoKernelsError, match="numba is not installed; the extra `cpu` has it"):
        load_kernels("doubling")


def test_a_processor_without_vectors_is_named(monkeypatch):
    monkeypatch.setattr(kernel_cache, "why_not_vectors", lambda: "this processor has no avx2")
    with pytest.raises(NoKernelsError, match="no avx2"):
        load_kernels("doubling")


def test_every_module_that_a_kernel_imports_is_part_of_its_key():
    names = {
        path.relative_to(path.parents[1]).as_posix() for path in kernel_cache.sources_of("tree_kernels.matmul.loops")
    }
    assert {"matmul/loops.py", "matmul/shapes.py", "matmul/tiles.py"} <= names
    found = {path.name for path in kernel_cache.sources_of("tree_kernels.mamba_level.mamba2")}
    assert {"mamba2.py", "parts.py", "curves.py", "loops.py", "tiles.py", "vectors.py", "processor.py"} <= found


def test_a_full_disk_costs_only_the_kept_file(tmp_path, module, monkeypatch, caplog):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path / "kernels"))
    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.WARNING):
        assert "double" in load_kernels("doubling").functions
    assert "No space left" in caplog.text
    assert {path.suffix for path in (tmp_path / "kernels").iterdir()} == {".lock"}


def test_a_user_without_a_home_compiles_in_every_process(monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in (FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING):
        assert kernel_cache._folder() is None
    assert "home directory" in caplog.text


def test_files_of_a_month_ago_are_removed_when_a_new_one_is_written(tmp_path, module):
    run(tmp_path)
    (old,) = (tmp_path / "kernels").glob("*.zip")
    month = kernel_cache.KEPT_S + 60
    os.utime(old, (old.stat().st_atime - month, old.stat().st_mtime - month))
    module.write_text(DOUBLING.replace("float32(2)", "float32(3)"))
    run(tmp_path)
    (new,) = (tmp_path / "kernels").glob("*.zip")
    assert new != old
