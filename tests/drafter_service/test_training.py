"""The training forwards equal the recurrences and Hugging Face's models; a resumed run equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
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

from drafter_service.training import teacher
from drafter_service.training.loop import Budget, Recipe, Trainer
from drafter_service.training.losses import TeacherRows, projected_loss
from drafter_service.training.scans import mamba1_scan, mamba1_scan_by_steps, mamba2_scan, mamba2_scan_by_steps
from drafter_service.training.students import StudentForward

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
    """A teacher with chunks of six rows of 140 tokens, not compiled, as that would take longer than the test."""
    monkeypatch.setattr(teacher, "CHUNK_ROWS", 6)
    monkeypatch.setattr(teacher, "ROW_TOKENS", 140)
    monkeypatch.setattr(teacher, "compiled", lambda module: module)
    monkeypatch.setattr(teacher, "autocast", lambda device: nullcontext())
    return tiny_model("llama").eval()


def test_teacher_outputs_are_the_models_largest_log_probs(tiny_teacher: PreTrainedModel, tmp_path: Path) -> None:
    corpus = np.random.default_rng(0).integers(61, size=4000).astype(np.uint16)
    folder = teacher.TeacherFolder(tmp_path)
    teacher.write_teacher_outputs(tiny_teacher, corpus, folder, Budget(steps=2), 0, lambda spent, chunks: None)
    text = folder.read()
    assert len(folder) == 2 and folder.own_share() == 0.5
    inputs, labels, rows = text.batch(step=1, rows=4, seed=5)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    with torch.no_grad():
        expected = tiny_teacher(inputs).logits.log_softmax(-1).gather(-1, rows.ids)
    torch.testing.assert_close(rows.log_probs.float(), expected, rtol=2e-3, atol=2e-3)

    # A resumed folder gets the same chunks.
    begun = teacher.TeacherFolder(tmp_path / "begun")
    for chunks in (1, 2):
        teacher.write_teacher_outputs(tiny_teacher, corpus, begun, Budget(steps=chunks), 0, lambda *_: None)
    assert np.array_equal(begun.read().tokens, text.tokens)


def test_generated_text_begins_with_real_tokens_and_is_greedy_at_temperature_zero(
    tiny_teacher: PreTrainedModel,
) -> None:
    starts = torch.randint(61, (6, 128))
    text = teacher.write_own_text(tiny_teacher, starts, length=140, seed=1)
    shortest, longest = teacher.OWN_TEXT_STARTS
    assert torch.equal(text[:, :shortest], starts[:, :shortest])
    greedy = teacher.OWN_TEXT_TEMPERATURES.index(0.0)
    with torch.no_grad():
        guesses = tiny_teacher(text).logits.argmax(-1)
    assert torch.equal(text[greedy, longest:], guesses[greedy, longest - 1 : -1])


def tiny_trainer(state_path: Path) -> Trainer:
    model = tiny_model("mamba2")
    forward = StudentForward(model)

    def batch_loss(step: int) -> Tensor:
        token_ids = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(step))
        return projected_loss(forward(token_ids[:, :-1]), model.lm_head.weight, token_ids[:, 1:])

    return Trainer(model, batch_loss, 32, Recipe(Budget(steps=8)), state_path)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = tiny_trainer(tmp_path / "whole.state")
    whole.run(lambda progress: None)
    tiny_trainer(tmp_path / "killed.state").run(lambda progress: None, stop_at_step=3)
    resumed = tiny_trainer(tmp_path / "killed.state")
    assert resumed.step == 3
    assert resumed.run(lambda progress: None).steps == 8
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], weight, rtol=0, atol=0)


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "run.state").run(lambda progress: None)
    steps: list[int] = []
    tiny_trainer(tmp_path / "run.state").run(lambda progress: steps.append(progress.step))
    assert steps == []


def test_a_budget_is_seconds_or_steps() -> None:
    with pytest.raises(ValueError, match="either seconds or steps"):
        Budget(seconds=1.0, steps=1)
