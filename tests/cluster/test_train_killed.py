"""A training run that was killed, that has no memory left, or whose labels are computed on the fly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dendro.errors import BadRequest

from cluster.training import data, drafter
from cluster.training.drafter import CHUNK_S, DrafterRun, train_drafter
from cluster.training.plan import Length
from cluster.training.stages import only_run_in
from drafter_service.training import loop
from drafter_service.training.loop import Budget, Recipe
from tests.support.small_training import plan_of, write_cluster, write_text

# Saves after every step, and is killed in the step that it is given.
CHILD = """
import functools, os, signal, sys
from pathlib import Path
from tests.support.small_training import Length, plan_of
from cluster.training import drafter
from drafter_service.training.loop import Trainer
take_step = Trainer._take_step
def killed(trainer, rate):
    if [str(trainer.step)] == sys.argv[2:]:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(trainer, rate)
Trainer._take_step = killed
drafter.Recipe = functools.partial(drafter.Recipe, save_every_s=0.0)
drafter.rows_within = lambda *_: 16
folder = Path(sys.argv[1])
drafter.train_drafter(
    plan_of(folder / "cluster.yaml", folder / "text.txt", length=Length(steps=60), out=folder / "killed")
)
"""


@pytest.mark.long  # another Python imports torch, twice
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_goes_on_and_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, text = write_cluster(tmp_path), write_text(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    state = tmp_path / "killed.training" / "distil.state"
    child = subprocess.run([*command, "20"], env=environment, stdout=subprocess.DEVNULL)
    assert child.returncode == -signal.SIGKILL and torch.load(state, weights_only=True)["step"] == 20
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    monkeypatch.setattr(drafter, "rows_within", lambda *_: 16)
    whole = plan_of(cluster, text, length=Length(steps=60), out=tmp_path / "whole")
    train_drafter(whole)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "killed" / file).read_bytes() == (whole.out / file).read_bytes()


def test_a_kill_loses_at_most_a_minute() -> None:
    """Of tokens, of labels, and of a training whose labels of its last steps are computed again."""
    saved = Recipe(Budget(steps=1)).save_every_s
    assert max(data.SAVE_EVERY_S, CHUNK_S["disk"], saved + CHUNK_S["fly"]) <= 60


def test_labels_on_the_fly_leave_none_on_disk_and_the_card_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "rows_within", lambda *_: 4)
    plan = plan_of(write_cluster(tmp_path), write_text(tmp_path), labels="fly", length=Length(steps=6))
    run = train_drafter(plan)
    assert not list((plan.work / "teacher").iterdir())
    assert run.done.facts("distil")["steps"] == 6
    card = " ".join((plan.out / "README.md").read_text().split())
    groups = 3  # of two steps of eight rows
    assert f"labelled {groups * 4 * 4 * 32:,} tokens" in card and "25% of them are its own text" in card


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
]


def test_a_second_run_in_the_folder_of_a_running_one_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    plan = plan_of(write_cluster(tmp_path), write_text(tmp_path))
    train_drafter(plan, stop_after="data")
    before = sorted(tmp_path.rglob("*"))
    with only_run_in(plan.work):
        for resume in (True, False):
            with pytest.raises(BadRequest, match=f"^--out: {plan.work} is in use: another training runs in it"):
                train_drafter(plan, resume)
        assert sorted(tmp_path.rglob("*")) == before
    train_drafter(plan, resume=False, stop_after="data")


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["gpu", "cpu"])
def test_a_step_that_does_not_fit_in_memory_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def step(trainer: loop.Trainer, rate: float) -> float:
        raise error

    monkeypatch.setattr(loop.Trainer, "_take_step", step)
    monkeypatch.setattr(DrafterRun, "answers", lambda run: {})  # what the target says is not asked for
    sentence = "^--rows: a step of 8 rows of 32 tokens does not fit in the memory of cpu: give fewer, or --row-tokens"
    with pytest.raises(BadRequest, match=sentence):
        train_drafter(plan_of(write_cluster(tmp_path), write_text(tmp_path)))


def test_a_folder_that_cannot_be_made_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = plan_of(write_cluster(tmp_path), write_text(tmp_path), out=tmp_path / "file" / "drafter")
    with pytest.raises(BadRequest, match="^--out: .*drafter.training cannot be made: Not a directory$"):
        train_drafter(plan)


@pytest.mark.parametrize("changes", [{"rows": 16}, {"labels": "fly"}])
def test_a_run_is_not_resumed_with_other_rows_or_labels(tmp_path: Path, changes: dict[str, Any]) -> None:
    cluster, text = write_cluster(tmp_path), write_text(tmp_path)
    train_drafter(plan_of(cluster, text), stop_after="data")
    with pytest.raises(BadRequest, match=f"^--{next(iter(changes))}: .*--no-resume begins anew"):
        train_drafter(plan_of(cluster, text, **changes))
