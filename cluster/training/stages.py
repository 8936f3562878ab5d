"""The stages of a training run: a finished one is skipped when the run is started again."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest

from drafter_service.training.saving import replacing

log = logging.getLogger("dendro.training")

SETTINGS = "settings.json"
LOCK = "lock"


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Context of a run: make its folder and lock it against other runs. The lock ends with the process, even a killed
    one.

    Raises BadRequest, naming the folder, while another run is in it, and where it cannot be made.
    """
    _make(folder)
    try:
        opened = (folder / LOCK).open("w")
    except OSError as error:
        raise BadRequest("--out", f"{folder} cannot be written to: {error.strerror}") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadRequest(
                "--out", f"{folder} is in use: another training runs in it; wait for its end, or name another folder"
            ) from error
        except OSError as error:  # a network's file system may have no locks
            log.warning("two trainings in %s would overwrite each other, as it cannot be locked: %s", folder, error)
        yield


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest("--out", f"{folder} cannot be made: {error.strerror}") from error


class StageFolder:
    """The folder of a run, with the facts of each finished stage; it may be deleted afterwards."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """Begin a run, or resume the one that was begun in the folder; without `resume`, begin anew.

        settings: what the outcome depends on, under the names of options. Raises BadRequest for a folder that was begun
        with other settings. Call it in `only_run_in` the folder.
        """
        self.folder = folder
        _make(folder)
        if not resume:
            for each in folder.iterdir():
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each, ignore_errors=True)
                elif each.name != LOCK:
                    each.unlink()
        with replacing(folder / ".gitignore") as partial:
            partial.write_text("*\n")
        file, wanted = folder / SETTINGS, json.loads(json.dumps(settings))
        if file.exists():
            begun = json.loads(file.read_text())
            for name in wanted.keys() | begun.keys():
                if begun.get(name) != wanted.get(name):
                    raise BadRequest(
                        f"--{name}",
                        f"{folder} was begun with {name} {begun.get(name)}, not {wanted.get(name)}; --no-resume begins "
                        "anew",
                    )
        else:
            _write(file, wanted)

    @staticmethod
    def begun(folder: Path) -> bool:
        """True if a run was begun in the folder."""
        return (folder / SETTINGS).exists()

    def done(self, stage: str) -> bool:
        return self._file(stage).exists()

    def facts(self, stage: str) -> dict[str, Any]:
        """The facts of a finished stage, for the model card."""
        facts: dict[str, Any] = json.loads(self._file(stage).read_text())
        return facts

    def run(self, stage: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """Do the work of a stage and write down the facts that it returns, unless that was done before."""
        if not self.done(stage):
            self.finish(stage, work())

    def finish(self, stage: str, facts: Mapping[str, Any]) -> None:
        """Write down that a stage is finished, with its facts."""
        _write(self._file(stage), facts)

    def forget(self, stage: str) -> None:
        """Mark a stage as not done."""
        self._file(stage).unlink(missing_ok=True)

    def _file(self, stage: str) -> Path:
        return self.folder / f"{stage}.done.json"


def _write(file: Path, facts: Mapping[str, Any]) -> None:
    with replacing(file) as partial:
        partial.write_text(json.dumps(facts, indent=1) + "\n")
