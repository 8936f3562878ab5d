"""Machine code of kernels: compiled once, loaded without numba, and never from a folder that others may write to."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from tree_kernels import kernel_cache, printing
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
    # Python takes bytecode for current where the source has the second and the size of before.
    own = {FOLDER: str(tmp_path / "kernels"), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    environment = own | environment
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


def test_kernels_that_were_precompiled_are_loaded_without_numba_and_failures_are_not_errors(tmp_path, module):
    (tmp_path / "failing.py").write_text("raise ValueError")
    main = "import sys; from tree_kernels.precompile import main; sys.argv[1:] = ['failing', 'doubling']; main()"
    assert run(tmp_path, main) == ""
    assert run(tmp_path) == f"{DOUBLED} False"


def test_a_module_is_kept_from_its_compilation_until_its_source_changes(tmp_path, module):
    kept = """
    import sys
    from tree_kernels.kernel_cache import kept
    print(kept("doubling"), {"torch", "numba"} & {*sys.modules})
    """
    assert run(tmp_path, kept) == "False set()"
    run(tmp_path)
    assert run(tmp_path, kept) == "True set()"
    later = module.stat().st_mtime + 3600
    os.utime(module, (later, later))
    assert run(tmp_path, kept) == "False set()"


def test_the_garbage_collector_runs_again_after_a_compilation(tmp_path, module):
    assert run(tmp_path, f"{USE}\nimport gc; print(gc.isenabled())").endswith("True\nTrue")
    failing = """
    import gc
    from tree_kernels.compiling import machine_code
    try:
        machine_code("nowhere")
    except ImportError:
        print(gc.isenabled())
    """
    assert run(tmp_path, failing) == "True"


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


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775], ids=["all", "all-sticky", "group"])
def test_the_log_names_the_folder_that_others_may_write_to(tmp_path, monkeypatch, caplog, mode):
    tmp_path.chmod(mode)
    monkeypatch.setattr(kernel_cache, "_own_group", lambda group: False)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert kernel_cache._folder() is None
    assert f"others may write to {tmp_path}" in caplog.text and FOLDER in caplog.text


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_may_replace_is_not_used(tmp_path, monkeypatch, caplog, above):
    kernels = tmp_path / "one" / "two" / "kernels"
    kernels.mkdir(parents=True)
    kernels.parents[above].chmod(0o777)
    monkeypatch.setenv(FOLDER, str(kernels))
    with caplog.at_level(logging.WARNING):
        assert kernel_cache._folder() is None
    assert f"others may write to {kernels.parents[above]} " in caplog.text


def test_a_link_to_a_folder_that_others_may_replace_is_not_followed(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    (shared / "kernels").mkdir(parents=True)
    shared.chmod(0o777)
    (tmp_path / "mine").symlink_to(shared / "kernels")
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    assert kernel_cache._folder() is None


def test_a_link_that_is_changed_after_the_check_changes_nothing(tmp_path, monkeypatch):
    mine, others, link = tmp_path / "mine", tmp_path / "others", tmp_path / "link"
    mine.mkdir()
    others.mkdir()
    link.symlink_to(mine)
    monkeypatch.setenv(FOLDER, str(link))
    check = kernel_cache._why_not_safe

    def checked_and_changed(folder):
        why = check(folder)
        link.unlink()
        link.symlink_to(others)
        return why

    monkeypatch.setattr(kernel_cache, "_why_not_safe", checked_and_changed)
    folder = kernel_cache._folder()
    assert folder is not None
    assert folder.samefile(mine)


def test_a_folder_in_a_shared_one_where_only_owners_rename_is_used(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv(FOLDER, str(shared / "mine" / "kernels"))
    assert kernel_cache._folder() == shared / "mine" / "kernels"


def test_folders_that_are_made_for_kernels_are_closed_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "one" / "kernels"))
    before = os.umask(0)
    try:
        assert kernel_cache._folder() is not None
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("one", "one/kernels")} == {0o700}


def test_another_users_folder_is_not_used(tmp_path, monkeypatch, caplog):
    folder, user = tmp_path / "kernels", os.geteuid()
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    monkeypatch.setenv(FOLDER, str(folder))
    with caplog.at_level(logging.WARNING):
        assert kernel_cache._folder() is None
    assert "is not this user's" in caplog.text


def test_a_group_of_the_user_alone_may_write(monkeypatch):
    user, others = pwd.getpwuid(os.geteuid()), ["someone"]
    group = user.pw_gid or 7
    monkeypatch.setattr(pwd, "getpwuid", lambda number: pwd.struct_passwd((*user[:3], group, *user[4:])))
    for members, expected in (([], True), ([user.pw_name], True), (others, False)):
        found = grp.struct_group((user.pw_name, "x", group, members))
        monkeypatch.setattr(grp, "getgrgid", lambda number, found=found: found)
        assert kernel_cache._own_group(group) is expected
    assert not kernel_cache._own_group(group + 1)


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


@pytest.mark.parametrize("read", [False, True], ids=["unused", "used"])
def test_files_that_no_process_read_for_a_month_are_removed_when_a_new_one_is_written(tmp_path, module, read):
    run(tmp_path)
    (old,) = (tmp_path / "kernels").glob("*.zip")
    month = kernel_cache.KEPT_S + 60
    os.utime(old, (old.stat().st_atime - month, old.stat().st_mtime - month))
    if read:
        run(tmp_path)
    module.write_text(DOUBLING.replace("float32(2)", "float32(3)"))
    run(tmp_path)
    assert len([*(tmp_path / "kernels").glob("*.zip")]) == (2 if read else 1)
    assert old.exists() == read


def test_a_process_that_compiles_kernels_can_use_numba_for_other_things(tmp_path, module):
    both = USE + textwrap.dedent("""
    import numba
    @numba.njit
    def total(numbers):
        return numbers.sum() + len("text")
    print(total(numbers))
    """)
    assert run(tmp_path, both) == f"{DOUBLED} True\n24.0"


def test_the_code_of_a_kernel_is_printed_by_its_name(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["printing", "tree_kernels.ranking.loops", "ranking"])
    printing.main()
    assert "define" in (out := capsys.readouterr().out) and "@cfunc." in out
    monkeypatch.setattr("sys.argv", ["printing", "tree_kernels.ranking.loops", "TILES", "--assembly"])
    printing.main()
    assert not capsys.readouterr().out, "it has no tiles"
