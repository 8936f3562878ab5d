"""Training of drafters that guess some of their target's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Mamba2Config

from drafter_service.training.batches import distillation_loss
from drafter_service.training.labels import Chunk, LabelledRows
from drafter_service.training.losses import TeacherRows, projected_loss
from drafter_service.training.sizes import new_model
from drafter_service.training.vocabulary import draft_embedding, guess, most_frequent, save_vocabulary, with_vocabulary

CPU = torch.device("cpu")
VOCABULARY, GUESSED, WIDTH, KEPT = 40, 24, 16, 5


def config() -> Mamba2Config:
    return Mamba2Config(
        vocab_size=GUESSED,
        hidden_size=WIDTH,
        head_dim=8,
        num_heads=4,
        state_size=8,
        n_groups=1,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )


def labels_of_tokens_that_the_student_lacks() -> tuple[Tensor, Tensor, Tensor]:
    """Labels, and a teacher's ids and log-probabilities; ids from GUESSED on cannot be guessed."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCABULARY, (13,), generator=generator)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:KEPT] for _ in labels])
    scores = torch.randn(13, KEPT + 1, generator=generator)
    return labels, ids, scores.log_softmax(-1)[:, :KEPT]


def test_the_loss_leaves_out_what_the_student_cannot_guess() -> None:
    """Against the sums written out, with their gradients by autograd."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(13, WIDTH, generator=generator, requires_grad=True)
    head = torch.randn(GUESSED, WIDTH, generator=generator, requires_grad=True)
    labels, ids, log_probs = labels_of_tokens_that_the_student_lacks()
    found = projected_loss(hidden, head, labels, TeacherRows(ids, log_probs), hard_share=0.1)
    own, expected = (hidden @ head.T).log_softmax(-1), torch.zeros(())
    for row, label in enumerate(labels.tolist()):
        if label < GUESSED:
            expected = expected - 0.1 * own[row, label]
        known = ids[row] < GUESSED
        kept, rest = own[row, ids[row][known]], 1 - log_probs[row].exp().sum()
        soft = (log_probs[row][known].exp() * kept).sum() + rest * (1 - kept.exp().sum()).log()
        expected = expected - 0.9 * soft
    torch.testing.assert_close(found, expected / 13, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(each, (hidden, head)) for each in (found, expected / 13))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rows_of_guessed_tokens_are_the_heads_and_others_resemble_the_given_rows(tmp_path: Path) -> None:
    """Sixteen tokens are not guessed, and their rows have rank 16: they come out whole."""
    ids = np.sort(np.random.default_rng(0).permutation(VOCABULARY)[:GUESSED])
    rows = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2))
    model = guess(new_model(config(), 0, CPU), ids, rows)
    embedding = draft_embedding(model)
    assert embedding is not None and embedding.weight is model.lm_head.weight
    read = embedding(torch.arange(VOCABULARY))
    others = np.setdiff1d(np.arange(VOCABULARY), ids)
    torch.testing.assert_close(read[ids], model.lm_head.weight)
    torch.testing.assert_close(read[others], rows[others], rtol=1e-4, atol=1e-4)
    save_vocabulary(embedding, tmp_path / "file")
    loaded = draft_embedding(with_vocabulary(new_model(config(), 0, CPU), tmp_path / "file"))
    assert loaded is not None
    torch.testing.assert_close(loaded(torch.arange(VOCABULARY)), read, rtol=2e-2, atol=2e-2)


def test_the_tokens_that_a_teacher_likeliest_writes_are_guessed_and_those_that_end_a_text() -> None:
    ids = np.array([[3, 9], [9, 4], [7, 3], [5, 6]])
    log_probs = np.log(np.array([[0.6, 0.3], [0.5, 0.4], [0.7, 0.1], [1, 1]])).astype(np.float16)
    log_probs[3] = -np.inf  # not labelled
    chunk = Chunk(np.zeros(4, np.uint16), ids, log_probs)
    assert most_frequent([chunk], 12, 4, frozenset({11})).tolist() == [3, 7, 9, 11]


def test_a_step_trains_the_rows_of_all_tokens_that_it_reads() -> None:
    rng = np.random.default_rng(0)
    log_probs = np.full((200, KEPT), -3, np.float16)
    log_probs[::3] = -np.inf
    chunk = Chunk(rng.integers(VOCABULARY, size=200), rng.integers(VOCABULARY, size=(200, KEPT)), log_probs)
    ids = np.arange(0, VOCABULARY, VOCABULARY / GUESSED).astype(np.int64)
    model = guess(new_model(config(), 0, CPU), ids, torch.randn(VOCABULARY, WIDTH))
    loss = distillation_loss(model, LabelledRows([chunk], 32, 32), 0, CPU, compile_forward=False, step_rows=4)
    loss(0).backward()
    embedding = draft_embedding(model)
    assert embedding is not None
    for weight in (embedding.weight, embedding.others_rows, embedding.others_basis):
        assert weight.grad is not None and weight.grad.abs().sum() > 0
