"""Texts that a target writes and labels itself, by the bundled target's own engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.text import Sampling
from transformers import AutoModelForCausalLM
from tree_layers.checkpoint import read_facts

from cluster.config import DEMO_MODELS, TargetConfig
from cluster.training import answering
from cluster.training.answering import ChatFrame, PromptOrder, answers_in, write_answers
from drafter_service.training.labels import TeacherFolder
from drafter_service.training.loop import Budget

CPU = torch.device("cpu")
PROMPTS = [np.array([5, 6, 7, 8 + number]) for number in range(5)]


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "TEXTS", 4)
    monkeypatch.setattr(answering, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(answering, "QUESTION_TOKENS", 6)


def written(folder: Path, prompts: PromptOrder, chunks: int, max_length: int = 512) -> TeacherFolder:
    checkpoint = DEMO_MODELS / "target"
    target = TargetConfig(checkpoint=checkpoint, dtype="float32", max_length=max_length)
    found = TeacherFolder(folder)
    write_answers("t", target, read_facts(checkpoint), prompts, CPU, found, Budget(steps=chunks), lambda spent: None)
    return found


def test_labels_are_the_targets_log_probs_of_its_answers_alone(few_texts: None, tmp_path: Path) -> None:
    """Of given prompts, and of questions that it asks itself between what the template puts around them."""
    prompts = PromptOrder(PROMPTS, ChatFrame((3, 4), (9, 10), (11, 3, 4)), seed=3)
    folder = written(tmp_path, prompts, 2)
    chunks = folder.read()
    answers = answers_in(chunks, prompts)
    assert len(answers) == 8 and {each.sampling.temperature for each in answers} == {0.0, 1.0, 0.7}
    assert [tuple(each.tokens[:4]) for each in answers[::2]] == [prompts.text(number).prompt for number in (0, 2, 4, 6)]
    assert all(
        each.tokens[:2] == [3, 4] and each.tokens[each.begin - 2 : each.begin] == [9, 10] for each in answers[1::2]
    )
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODELS / "target", dtype=torch.float32).eval()
    labelled = [(place, chunk) for chunk in chunks for place in range(len(chunk.tokens))]
    begin = 0
    for answer in answers:
        with torch.no_grad():
            expected = model(torch.tensor([answer.tokens])).logits[0].log_softmax(-1)
        for place in range(len(answer.tokens)):
            at, chunk = labelled[begin + place]
            inside = answer.begin - 1 <= place < len(answer.tokens) - 1
            assert np.isfinite(chunk.log_probs[at]).all() == inside
            if inside:
                ids = torch.from_numpy(chunk.ids[at].astype(np.int64))
                found = torch.tensor(chunk.log_probs[at]).float()
                torch.testing.assert_close(found, expected[place, ids], rtol=2e-3, atol=4e-3)
                if answer.sampling.temperature == 0:
                    assert answer.tokens[place + 1] == expected[place].argmax()
        begin += len(answer.tokens)


def test_a_resumed_writer_writes_the_chunks_of_an_uninterrupted_one(few_texts: None, tmp_path: Path) -> None:
    prompts = PromptOrder(PROMPTS, None, seed=0)
    whole = written(tmp_path / "whole", prompts, 3).read()
    written(tmp_path / "begun", prompts, 1)
    resumed = written(tmp_path / "begun", prompts, 3).read()
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.ids, other.ids)


def test_each_prompt_is_answered_once_an_epoch_and_text_n_depends_on_n_alone() -> None:
    prompts = PromptOrder(PROMPTS, None, seed=1)
    texts = [prompts.text(number) for number in range(10)]
    assert sorted(text.prompt for text in texts[:5]) == sorted(tuple(each.tolist()) for each in PROMPTS)
    assert sorted(text.prompt for text in texts[5:]) == sorted(tuple(each.tolist()) for each in PROMPTS)
    assert texts[7] == prompts.text(7) and len({text.sampling.seed for text in texts}) == 10
    assert prompts.text(4).sampling == Sampling(temperature=0.7, seed=(1 << 32) + 4)


def test_prompts_and_questions_leave_half_of_a_short_target_for_answers(few_texts: None, tmp_path: Path) -> None:
    frame, long = ChatFrame((3, 4), (9, 10), (11, 3, 4)), [np.arange(5, 45)]
    prompts = PromptOrder.fitting(long, frame, seed=3, max_length=16)
    answers = answers_in(written(tmp_path, prompts, 1, max_length=16).read(), prompts)
    assert all(each.begin <= 8 and each.begin < len(each.tokens) <= 16 for each in answers)
    assert answers[0].tokens[:8] == long[0][-8:].tolist()
    assert PromptOrder.fitting(long, frame, seed=3, max_length=8).frame is None  # no room for a question
