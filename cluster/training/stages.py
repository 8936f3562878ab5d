"""The stages of a training run: a finished one is skipped when the run is started again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest

from drafter_service.training.saving import replacing

SETTINGS = "settings.json"


class StageFolder:
    """The folder of a run, with the facts of each finished stage; it may be deleted afterwards."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """Begin a run, or resume the one that was begun in the folder; without `resume`, begin anew.

        settings: what the outcome depends on, under the names of options. Raises BadRequest for a folder that was begun
        with other settings.
        """
        self.folder = folder
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRequest("--out", f"{folder} cannot be made: {error.strerror}") from error
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
        """Whether a run was begun in the folder."""
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

    def _file(self, stage: str) -> Path:
        return self.folder / f"{stage}.done.json"


def _write(file: Path, facts: Mapping[str, Any]) -> None:
    with replacing(file) as partial:
        partial.write_text(json.dumps(facts, indent=1) + "\n")
