"""The training forwards equal the recurrences and Hugging Face's models; a resumed run equals an uninterrupted one."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from drafter_service.training import stepping, teacher
from drafter_service.training.labels import LabelledRows, TeacherFolder
from drafter_service.training.loop import Budget, Diverged, Recipe, Trainer
from drafter_service.training.losses import TeacherRows, projected_loss
from drafter_service.training.saving import NotSaved
from drafter_service.training.scans import mamba1_scan, mamba1_scan_by_steps, mamba2_scan, mamba2_scan_by_steps
from drafter_service.training.sizes import SIZES, StudentSize, new_model, student_config
from drafter_service.training.students import StudentForward
from drafter_service.training.teacher import (
    Labeller,
    LiveRows,
    TeacherText,
    write_teacher_outputs,
)
from tests.support import tiny_hybrids

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def mamba1_inputs(length: int) -> list[Tensor]:
    torch.manual_seed(length)
    x, dt = torch.randn(2, length, 5), torch.rand(2, length, 5)
    return [x, dt, -8 * torch.rand(5, 3), torch.randn(2, length, 3), torch.randn(2, length, 3)]


def mamba2_inputs(length: int) -> list[Tensor]:
    torch.manual_seed(length)
    x, dt = torch.randn(2, length, 3, 4), torch.rand(2, length, 3)
    return [x, dt, -8 * torch.rand(3), torch.randn(2, length, 6), torch.randn(2, length, 6)]


@pytest.mark.parametrize("length", [1, 16, 33, 64, 129])
@pytest.mark.parametrize(
    ("scan", "by_steps", "inputs"),
    [(mamba1_scan, mamba1_scan_by_steps, mamba1_inputs), (mamba2_scan, mamba2_scan_by_steps, mamba2_inputs)],
    ids=["mamba1", "mamba2"],
)
def test_scan_and_its_gradient_equal_the_recurrence(
    scan: Scan, by_steps: Scan, inputs: Callable[[int], list[Tensor]], length: int
) -> None:
    arguments = [argument.requires_grad_() for argument in inputs(length)]
    expected, got = by_steps(*arguments), scan(*arguments)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    direction = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, arguments, direction)
    got_grads = torch.autograd.grad(got, arguments, direction)
    for got_grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-4, atol=1e-4)


def tiny_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    common = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": True}
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(state_size=4, **common))
    if kind == "mamba2":
        return Mamba2ForCausalLM(
            Mamba2Config(state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=32, **common)
        )
    return LlamaForCausalLM(LlamaConfig(intermediate_size=48, num_attention_heads=2, **common))


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "llama"])
def test_training_forward_equals_hugging_face(kind: str) -> None:
    model = tiny_model(kind).eval()
    token_ids = torch.randint(61, (2, 70))
    with torch.no_grad():
        logits = model.lm_head(StudentForward(model)(token_ids))
        torch.testing.assert_close(logits, model(token_ids).logits, rtol=1e-4, atol=1e-4)


def test_projected_loss_and_its_gradients_equal_the_plain_formula() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 300, 8, requires_grad=True)
    projection = torch.randn(40, 8, requires_grad=True)
    labels = torch.randint(40, (2, 300))
    teacher_law = torch.randn(2, 300, 40).log_softmax(-1)
    kept = teacher_law.topk(5)

    log_probs = (hidden @ projection.T).log_softmax(-1)
    hard = -log_probs.gather(-1, labels[..., None]).mean()
    kept_mass, student_mass = kept.values.exp(), log_probs.gather(-1, kept.indices).exp()
    soft_kept = -(kept_mass * log_probs.gather(-1, kept.indices)).sum(-1)
    soft_rest = -(1 - kept_mass.sum(-1)) * (1 - student_mass.sum(-1)).log()
    expected = 0.3 * hard + 0.7 * (soft_kept + soft_rest).mean()

    got = projected_loss(hidden, projection, labels, TeacherRows(kept.indices, kept.values), hard_share=0.3)
    torch.testing.assert_close(got, expected)
    for loss, plain in ((got, expected), (projected_loss(hidden, projection, labels), hard)):
        grads = torch.autograd.grad(loss, (hidden, projection), retain_graph=True)
        plain_grads = torch.autograd.grad(plain, (hidden, projection), retain_graph=True)
        for grad, plain_grad in zip(grads, plain_grads, strict=True):
            torch.testing.assert_close(grad, plain_grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def tiny_teacher(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A teacher of float32 arithmetic."""
    monkeypatch.setattr(teacher, "autocast", lambda device: nullcontext())
    return tiny_model("llama").eval()


def teacher_text(**changes: Any) -> TeacherText:
    """Chunks of six rows of 140 tokens, of ids that are all in the model's vocabulary."""
    corpus = np.random.default_rng(0).integers(50, size=4000).astype(np.uint16)
    return TeacherText(**{"corpus": corpus, "vocabulary": 61, "chunk_rows": 6, "row_tokens": 140, **changes})


def label(model: PreTrainedModel, text: TeacherText, folder: TeacherFolder, chunks: int) -> LabelledRows:
    """Labels of so many chunks."""
    write_teacher_outputs(Labeller(model, text, 0), folder, Budget(steps=chunks), lambda *_: None)
    return LabelledRows(folder.read(), text.row_tokens, text.row_tokens + 1)


def test_teacher_outputs_are_the_models_largest_log_probs_of_the_tokens_that_it_has(
    tiny_teacher: PreTrainedModel, tmp_path: Path
) -> None:
    """The padding of the model's head, here from id 50 on, has no part in them."""
    folder = TeacherFolder(tmp_path / "whole")
    rows = label(tiny_teacher, teacher_text(vocabulary=50), folder, 2)
    assert len(folder) == 2 and folder.own_share() == 0.5 and folder.labelled() == 2 * 6 * 140
    inputs, labels, outputs = rows.batch(step=1, rows=4, seed=5)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert labels.max() < 50
    with torch.no_grad():
        expected = tiny_teacher(inputs).logits[..., :50].log_softmax(-1).gather(-1, outputs.ids)
    torch.testing.assert_close(outputs.log_probs.float(), expected, rtol=2e-3, atol=2e-3)


def test_a_resumed_teacher_writes_the_chunks_of_an_uninterrupted_one(
    tiny_teacher: PreTrainedModel, tmp_path: Path
) -> None:
    whole = label(tiny_teacher, teacher_text(), TeacherFolder(tmp_path / "whole"), 3)
    begun = TeacherFolder(tmp_path / "begun")
    label(tiny_teacher, teacher_text(), begun, 2)
    (tmp_path / "begun" / "00002.partial").mkdir()  # a kill left it
    resumed = label(tiny_teacher, teacher_text(), begun, 3)
    for one, other in zip(whole.batch(0, 18, seed=1), resumed.batch(0, 18, seed=1), strict=True):
        assert str(one) == str(other)


def test_labels_on_the_fly_are_the_models_of_new_text_and_the_same_after_a_resumed_run(
    tiny_teacher: PreTrainedModel,
) -> None:
    """A group is three chunks of real text and one of the teacher's own, and has as many steps as rows allow."""
    labeller = Labeller(tiny_teacher, teacher_text(vocabulary=50), 0)
    rows = LiveRows(labeller)
    seen = [rows.batch(step, 4, seed=5) for step in range(7)]
    inputs, labels, outputs = seen[6]
    with torch.no_grad():
        expected = tiny_teacher(inputs).logits[..., :50].log_softmax(-1).gather(-1, outputs.ids)
    torch.testing.assert_close(outputs.log_probs.float(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    texts = {tuple(row) for given, *_ in seen[:6] for row in given.tolist()}
    groups = [labeller.chunk(chunk).tokens.reshape(6, 141)[:, :-1] for chunk in range(4)]
    assert texts == {tuple(row) for each in groups for row in each.tolist()} and len(texts) == 24
    again, _, resumed = LiveRows(labeller).batch(6, 4, seed=5)
    assert torch.equal(again, inputs) and torch.equal(resumed.log_probs, outputs.log_probs)
    assert [rows.tokens(steps, 4) for steps in (6, 7)] == [4 * 6 * 140, 2 * 4 * 6 * 140]


def test_ids_above_65535_are_stored_whole(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=70_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    corpus = (69_000 + np.arange(300)).astype(np.uint32)
    text = teacher_text(corpus=corpus, vocabulary=70_000, chunk_rows=2, row_tokens=16)
    rows = label(LlamaForCausalLM(config).eval(), text, TeacherFolder(tmp_path), 2)
    inputs, _, outputs = rows.batch(0, 4, seed=0)
    assert inputs.min() >= 69_000 or inputs.max() >= 1 << 16
    assert outputs.ids.max() >= 1 << 16


def own_text(model: PreTrainedModel, starts: Tensor, given: Tensor, text: TeacherText) -> Tensor:
    return teacher.write_own_text(model, starts, given, text, seed=1)


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "llama"])
def test_generated_text_begins_with_real_tokens_and_is_greedy_at_temperature_zero(
    tiny_teacher: PreTrainedModel, kind: str
) -> None:
    """For each kind of cache."""
    model = tiny_model(kind).eval()
    starts, given = torch.randint(61, (6, 60)), torch.tensor([35, 40, 45, 50, 35, 59])
    text = own_text(model, starts, given, teacher_text(row_tokens=59))
    greedy = teacher.OWN_TEXT_TEMPERATURES.index(0.0)
    with torch.no_grad():
        guesses = model(text).logits.argmax(-1)
    for row, count in enumerate(given.tolist()):
        assert torch.equal(text[row, :count], starts[row, :count])
    assert torch.equal(text[greedy, 35:], guesses[greedy, 34:-1])


def test_a_model_without_a_cache_generates_the_same_text(
    tiny_teacher: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, given = torch.randint(61, (3, 40)), torch.tensor([10, 12, 14])
    expected = own_text(tiny_teacher, starts, given, teacher_text(row_tokens=39))
    monkeypatch.setattr(stepping, "CACHES", ())
    assert torch.equal(own_text(tiny_teacher, starts, given, teacher_text(row_tokens=39)), expected)


@pytest.mark.parametrize("longest", [None, 24, 20])
@pytest.mark.parametrize("family", tiny_hybrids.SETTINGS)
def test_a_hybrid_has_the_logits_of_its_whole_text_at_every_step(
    tmp_path: Path, family: str, longest: int | None
) -> None:
    """Also where memory was taken for its text, or for less than its text."""
    model = tiny_hybrids.make_checkpoint(tmp_path, family)
    ids = torch.randint(tiny_hybrids.VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(0))
    stepped = stepping.SteppedText(model, longest)
    with torch.no_grad():
        got = [stepped.feed(ids[:, :16]), *(stepped.feed(ids[:, place : place + 1]) for place in range(16, 24))]
        expected = model(ids, use_cache=False).logits[:, 15:]
    torch.testing.assert_close(torch.stack(got, 1), expected, rtol=1e-2, atol=1e-2)


def test_reserved_keys_and_values_stay_where_they_are(tiny_teacher: PreTrainedModel) -> None:
    ids = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(0))
    stepped, caches = stepping.SteppedText(tiny_teacher, 12), list[int]()
    with torch.no_grad():
        for place in range(12):
            stepped.feed(ids[:, place : place + 1])
            (cache,) = stepped._caches.values()
            caches.append(cache.layers[0].keys.data_ptr())
    assert stepped._cached and len(set(caches)) == 1


def test_where_the_teacher_ends_its_text_the_row_goes_on_with_real_text(tiny_teacher: PreTrainedModel) -> None:
    starts, given = torch.randint(61, (3, 40)), torch.tensor([10, 10, 10])
    free = own_text(tiny_teacher, starts, given, teacher_text(row_tokens=39))
    end = int(free[0, 15])
    first = 10 + free[0, 10:].tolist().index(end)
    ended = own_text(tiny_teacher, starts, given, teacher_text(row_tokens=39, end_ids=frozenset({end})))
    assert torch.equal(ended[0, : first + 1], free[0, : first + 1])
    assert torch.equal(ended[0, first + 1 :], starts[0, first + 1 :])


def test_own_text_begins_where_answers_begin(tiny_teacher: PreTrainedModel, tmp_path: Path) -> None:
    """Of three answers, the first and the last have too little text on one side. 16 to 70 tokens are given."""
    text = teacher_text(answers=np.array([5, 610, 3990]))
    label(tiny_teacher, text, TeacherFolder(tmp_path), 2)
    heads = [text.corpus[610 - given :][:16].tolist() for given in range(16, 71)]
    own = np.load(tmp_path / "00001" / "tokens.npy").reshape(6, 141)
    assert all(row[:16].tolist() in heads for row in own)


def test_chunks_of_a_slow_teacher_have_fewer_rows(
    tiny_teacher: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of r rows takes r milliseconds, and a row has 140."""
    clock, fed = [0.0], stepping.SteppedText.feed

    def slow(stepped: stepping.SteppedText, tokens: Tensor) -> Tensor:
        clock[0] += 0.001 * len(tokens) * tokens.shape[1]
        return fed(stepped, tokens)

    monkeypatch.setattr(stepping.SteppedText, "feed", slow)
    monkeypatch.setattr(teacher, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = [teacher.rows_within(tiny_teacher, teacher_text(chunk_rows=64), seconds) for seconds in (100, 9, 3, 0.01)]
    assert found == [64, 64, 16, 1]


def tiny_trainer(state_path: Path, model: PreTrainedModel | None = None, seed: int = 0) -> Trainer:
    model = model or tiny_model("mamba2")
    forward = StudentForward(model)

    def batch_loss(step: int) -> Tensor:
        token_ids = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(step))
        return projected_loss(forward(token_ids[:, :-1]), model.lm_head.weight, token_ids[:, 1:])

    return Trainer(model, batch_loss, 32, Recipe(Budget(steps=8)), state_path, seed=seed)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = tiny_trainer(tmp_path / "whole.state")
    whole.run(lambda progress: None)
    tiny_trainer(tmp_path / "killed.state").run(lambda progress: None, stop_at_step=3)
    resumed = tiny_trainer(tmp_path / "killed.state")
    assert resumed.step == 3
    assert resumed.run(lambda progress: None).steps == 8
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], weight, rtol=0, atol=0)


def model_with_dropout() -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


def trained_weights(trainer: Trainer) -> Tensor:
    trainer.run(lambda progress: None)
    return torch.cat([weight.flatten() for weight in trainer.model.state_dict().values()])


def test_a_resumed_run_with_dropout_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = trained_weights(tiny_trainer(tmp_path / "whole.state", model_with_dropout()))
    tiny_trainer(tmp_path / "killed.state", model_with_dropout()).run(lambda progress: None, stop_at_step=3)
    torch.manual_seed(99)  # a new process has drawn other numbers
    resumed = tiny_trainer(tmp_path / "killed.state", model_with_dropout())
    assert torch.equal(trained_weights(resumed), whole)
    for seed in (1, 20261126_123456_789):  # of any size, such as a date's digits
        other_seed = tiny_trainer(tmp_path / f"{seed}.state", model_with_dropout(), seed=seed)
        assert not torch.equal(trained_weights(other_seed), whole)


FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    SafetensorError("Error while serializing: I/O error"),
]


@pytest.mark.parametrize("error", FULL, ids=["python", "torch", "safetensors"])
def test_a_full_disk_ends_in_one_sentence_and_keeps_the_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = tmp_path / "run.state"
    tiny_trainer(path).run(lambda progress: None, stop_at_step=2)
    before = path.read_bytes()

    def full(state: object, to: Path) -> None:
        to.write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
        with pytest.raises(NotSaved, match="run.state cannot be written: the disk is full; the previous one is kept"):
            tiny_trainer(path).run(lambda progress: None)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.state"]
    assert tiny_trainer(path).run(lambda progress: None).steps == 8


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_step_that_is_not_finite_ends_the_run_before_its_weights_change(tmp_path: Path, fault: str) -> None:
    tiny_trainer(tmp_path / "run.state").run(lambda progress: None, stop_at_step=2)
    trainer = tiny_trainer(tmp_path / "run.state")
    before, whole_loss = {name: each.clone() for name, each in trainer.model.state_dict().items()}, trainer.batch_loss

    def batch_loss(step: int) -> Tensor:
        loss = whole_loss(step)
        return loss * math.nan if fault == "loss" else loss + (loss - loss.detach()).clamp(min=0).sqrt()

    trainer.batch_loss = batch_loss
    with pytest.raises(Diverged, match="^step 2: the loss is .* --no-resume and another --seed"):
        trainer.run(lambda progress: None)
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    assert tiny_trainer(tmp_path / "run.state").step == 2


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "run.state").run(lambda progress: None)
    steps: list[int] = []
    tiny_trainer(tmp_path / "run.state").run(lambda progress: steps.append(progress.step))
    assert steps == []


def test_a_budget_is_seconds_or_steps() -> None:
    with pytest.raises(ValueError, match="either seconds or steps"):
        Budget(seconds=1.0, steps=1)


@pytest.mark.parametrize(
    ("kind", "name", "published"),
    [
        ("mamba", "130m", {"hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "intermediate_size": 1536}),
        ("mamba", "370m", {"hidden_size": 1024, "num_hidden_layers": 48, "state_size": 16}),
        ("mamba2", "130m", {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}),
        ("mamba2", "370m", {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "num_hidden_layers": 48}),
    ],
)
def test_published_sizes_have_their_published_shapes(kind: Any, name: str, published: dict[str, int]) -> None:
    config = student_config(kind, SIZES[kind][name], {"vocab_size": 50280})
    assert {key: getattr(config, key) for key in published} == published


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "llama"])
@pytest.mark.parametrize("width", [16, 96, 384])
def test_a_size_by_numbers_makes_a_model_that_runs(kind: Any, width: int) -> None:
    model = new_model(student_config(kind, StudentSize(width, 1), {"vocab_size": 61}), 0, torch.device("cpu"))
    assert StudentForward(model)(torch.randint(61, (1, 9))).shape == (1, 9, width)


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="the width a multiple of 16; got width 100, layers 2"):
        StudentSize(100, 2)
