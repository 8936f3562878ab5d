"""Several processes that train together take the steps of one: each row is one process's, the losses are the same."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from dendro.errors import BadRequest
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM

from drafter_service.training.batches import text_loss
from drafter_service.training.labels import Chunk, LabelledRows, TeacherFolder
from drafter_service.training.loop import Budget, Recipe, Trainer
from drafter_service.training.rows import ALONE, Share, TokenRows
from drafter_service.training.teacher import _process, is_own
from drafter_service.training.together import TrainingFailed, train_together

STEPS = 6


def shares(processes: int) -> list[Share]:
    return [Share(process, processes) for process in range(processes)]


@pytest.mark.parametrize("processes", [2, 4])
def test_the_rows_of_a_step_are_divided_among_the_processes(processes: int) -> None:
    tokens = np.arange(700, dtype=np.uint16)
    whole = TokenRows(tokens, 4, 16, seed=3)
    parts = [TokenRows(tokens, 4, 16, 3, share) for share in shares(processes)]
    for step in (0, 5, 30):
        assert torch.equal(torch.cat([part.batch(step)[0] for part in parts]), whole.batch(step)[0])
    chunk = Chunk(np.arange(90), np.arange(180).reshape(90, 2), np.zeros((90, 2), np.float16))
    for step in range(5):
        found = [LabelledRows([chunk], 8, 9, share).batch(step, 4, seed=1) for share in shares(processes)]
        expected = LabelledRows([chunk], 8, 9).batch(step, 4, seed=1)
        assert torch.equal(torch.cat([labels for _, labels, _ in found]), expected[1])
        assert torch.equal(torch.cat([teacher.ids for *_, teacher in found]), expected[2].ids)


def test_rows_that_cannot_be_shared_equally_are_refused() -> None:
    with pytest.raises(ValueError, match="8 rows cannot be shared by 3 processes"):
        Share(0, 3).of(8)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_every_chunk_is_one_processs_and_generated_ones_are_divided_equally(processes: int, tmp_path: Path) -> None:
    chunks = range(8 * 4 * 3)
    owners = [[share.process for share in shares(processes) if _process(chunk, share)] for chunk in chunks]
    assert all(len(each) == 1 for each in owners)
    for kind in (True, False):
        counts = np.bincount([owners[chunk][0] for chunk in chunks if is_own(chunk) == kind], minlength=processes)
        assert counts.max() - counts.min() <= 1
    folder = TeacherFolder(tmp_path)
    for chunk in range(8):
        folder.add(chunk, Chunk(*[np.zeros((1, 2))] * 3), is_own(chunk), 1.0)
    counted = [folder.seconds(partial(_process, share=share)) for share in shares(processes)]
    assert sum(counted) == folder.seconds() == 8


def untrained() -> Mamba2ForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return Mamba2ForCausalLM(Mamba2Config(state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=32, **sizes))


def train(processes: Accelerator | None, folder: Path, stop_at: int | None) -> None:
    """Train a tiny Mamba-2, or the rest of a stopped training; the losses of its steps are written to a file."""
    torch.set_num_threads(1)
    model = untrained()
    share = ALONE if processes is None else Share(processes.process_index, processes.num_processes)
    tokens = np.random.default_rng(0).integers(61, size=2000).astype(np.uint16)
    loss = text_loss(model, TokenRows(tokens, 4, 24, 0, share), torch.device("cpu"), False, processes)
    trainer = Trainer(model, loss, 96, Recipe(Budget(steps=STEPS)), folder / "run.state", processes)
    losses: dict[int, float] = {}
    trainer.run(lambda progress: losses.__setitem__(progress.step, progress.loss), stop_at)
    if share.process == 0:
        (folder / f"{min(losses)}.json").write_text(json.dumps([*losses.values()]))


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / "run.state", weights_only=True)["model"]
    return found


def refuse(processes: Accelerator, words: str) -> None:
    """The first process fails while the other waits for it."""
    if processes.is_main_process:
        raise BadRequest("--data", words)
    processes.wait_for_everyone()


@pytest.mark.long  # each process imports torch and transformers anew
@pytest.mark.timeout(900)
def test_two_processes_have_the_losses_of_one_also_when_they_were_stopped_in_between(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    train(None, alone, None)
    train_together(2, train, together, 3)
    train_together(2, train, together, None)
    expected = json.loads((alone / "1.json").read_text())
    found = [json.loads((together / f"{first}.json").read_text()) for first in (1, 4)]
    assert [len(each) for each in found] == [3, 3]
    np.testing.assert_allclose(found[0] + found[1], expected, rtol=1e-5)
    # Adam divides a gradient by its size: one of nearly zero, whose sign its rounding decides, moves its weight as far
    # as any other. So weights are not compared one by one, but by how far apart both trainings moved them.
    names = sorted(weights(alone))
    begun, one, two = (
        torch.cat([each[name].flatten() for name in names])
        for each in (untrained().state_dict(), weights(alone), weights(together))
    )
    assert (two - one).norm() <= 0.05 * (one - begun).norm()


@pytest.mark.long  # as above
@pytest.mark.timeout(900)
def test_the_words_of_the_process_that_failed_are_the_error_and_the_others_end() -> None:
    with pytest.raises(TrainingFailed, match="^--data: text.jsonl:3 is not JSON$"):
        train_together(2, refuse, "text.jsonl:3 is not JSON")
