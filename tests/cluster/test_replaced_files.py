"""Files of users that commands write: whole, or as they were."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from dendro.errors import BadRequest

from cluster.replaced_files import replace_text
from cluster.training.adding import write_drafter, write_head_entry
from cluster.tune.writing import write_arms

YAML = "targets: {t: {checkpoint: t}}\ndrafters: {d: {checkpoint: d}}\nspeculation: {arms: ['(1)']}\n"


def test_a_replaced_file_keeps_its_permissions_and_the_link_that_names_it(tmp_path: Path):
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "real.yaml").chmod(0o640)
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    replace_text("--write", tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink() and (tmp_path / "real.yaml").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real.yaml").stat().st_mode) == 0o640
    before = os.umask(0o077)
    try:
        replace_text("--out", tmp_path / "made.yaml", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "made.yaml").stat().st_mode) == 0o600


def test_a_file_that_is_a_mount_of_its_own_is_written_in_place_and_a_keys_file_never_is(tmp_path: Path, monkeypatch):
    """As one file of a container's host is."""
    file = tmp_path / "cluster.yaml"
    file.write_text("old")

    def mounted(source: Path, goal: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(os, "replace", mounted)
    with pytest.raises(BadRequest, match="Device or resource busy"):
        replace_text("auth.keys", file, "new", mode=0o600)
    assert file.read_text() == "old"
    replace_text("--write", file, "new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(BadRequest, match="--out: .*absent.yaml cannot be written: Device or resource busy"):
        replace_text("--out", tmp_path / "absent.yaml", "new")


def test_a_pipe_is_written_as_it_is(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_text("--json", tmp_path / "pipe", "a report")
        assert os.read(reader, 100) == b"a report"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize(
    "write",
    [
        lambda file: write_drafter(file, "other", {"checkpoint": "o"}),
        lambda file: write_head_entry(file, "d", "head"),
        lambda file: write_arms(file, file.read_text(), file, ("speculation", "arms"), ["(2,1)"]),
    ],
    ids=["train drafter", "train head", "tune"],
)
def test_a_full_disk_leaves_a_users_configuration_as_it_was(tmp_path: Path, monkeypatch, write: Callable[[Path], None]):
    file = tmp_path / "cluster.yaml"
    file.write_text(YAML)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(BadRequest, match=r"--write: .*cluster.yaml cannot be written: No space left on device"):
            write(file)
    assert file.read_text() == YAML and list(tmp_path.iterdir()) == [file]
    write(file)
    assert file.read_text() != YAML and list(tmp_path.iterdir()) == [file]
