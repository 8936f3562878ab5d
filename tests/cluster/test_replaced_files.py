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
    replace_text("--out", tmp_path / "made.yaml", "new")
    assert stat.S_IMODE((tmp_path / "made.yaml").stat().st_mode) == 0o644


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
