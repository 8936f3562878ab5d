"""Conversations that a target writes in lock-step, by the bundled target on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from tree_layers.checkpoint import read_facts

from cluster.config import DEMO_MODELS
from cluster.training import lockstep
from cluster.training.answering import ChatFrame, PromptOrder
from cluster.training.lockstep import Conversations, write_conversations
from drafter_service.training.labels import TeacherFolder
from drafter_service.training.loop import Budget

FRAME = ChatFrame((3, 4), (9, 10), (2, 11, 12))
PROMPTS = [np.array([5, 6, 7, 8 + number]) for number in range(5)]
END = frozenset({2})


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "TEXTS", 6)
    monkeypatch.setattr(lockstep, "ANSWER_TOKENS", 7)
    monkeypatch.setattr(lockstep, "QUESTION_TOKENS", 3)


def spoken(prompts: PromptOrder, drawn: list[int]) -> tuple[list[int], list[bool]]:
    """The first text's tokens, and which of them are of answers, where the target draws these."""
    batch, tokens, answers = Conversations(prompts, 0, 1, END), [], []
    for token in drawn:
        (new,), (answer,) = batch.next(np.array([token]))
        tokens.append(new)
        answers.append(answer)
    return tokens, answers


def test_an_answer_is_followed_by_a_question_of_the_targets_own_in_the_templates_words() -> None:
    prompts = PromptOrder(PROMPTS[:1], FRAME, seed=0)
    drawn = [0, 0, 0, 0, 41, 42, 2, 0, 0, 51, 2, 0, 61, 62]
    tokens, answers = spoken(prompts, drawn)
    assert tokens == [5, 6, 7, 8, 41, 42, 2, 11, 12, 51, 9, 10, 61, 62]
    assert [tokens[place] for place, answer in enumerate(answers) if answer] == [41, 42, 2, 61, 62]


def test_a_turn_that_reaches_its_most_tokens_is_ended_by_the_templates_words() -> None:
    tokens, _ = spoken(PromptOrder([], FRAME, seed=0), list(range(100, 120)))
    assert tokens == [3, 4, 102, 103, 9, 10, *range(106, 113), 2, 11, 12, 116, 117, 9, 10]


def test_a_template_that_puts_no_end_token_after_an_answer_keeps_all_its_words() -> None:
    prompts = PromptOrder(PROMPTS[:1], ChatFrame((3, 4), (9, 10), (11, 12)), seed=0)
    tokens, _ = spoken(prompts, [0, 0, 0, 0, 41, 2, 0, 0, 51])
    assert tokens == [5, 6, 7, 8, 41, 2, 11, 12, 51]


def test_without_a_frame_the_next_prompt_follows_an_answer() -> None:
    prompts = PromptOrder(PROMPTS, None, seed=1)
    tokens, answers = spoken(prompts, [0] * 4 + [41, 2] + [0] * 4 + [51])
    assert tuple(tokens[:4]) == prompts.text(0).prompt and tokens[4:6] == [41, 2]
    assert tuple(tokens[6:10]) in {tuple(each.tolist()) for each in PROMPTS} and tokens[10] == 51
    assert answers == [False] * 4 + [True] * 2 + [False] * 4 + [True]


def test_labels_are_the_targets_log_probs_of_answers_and_a_resumed_run_writes_the_same(tmp_path: Path) -> None:
    checkpoint = DEMO_MODELS / "target"
    facts, prompts = read_facts(checkpoint), PromptOrder(PROMPTS, FRAME, seed=3)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def written(folder: Path, chunks: int) -> TeacherFolder:
        found, sizes = TeacherFolder(folder), (facts.vocabulary, facts.end_ids)
        write_conversations(model, *sizes, prompts, 24, found, Budget(steps=chunks), lambda spent: None)
        return found

    folder = written(tmp_path / "whole", 2)
    written(tmp_path / "begun", 1)
    for one, other in zip(folder.read(), written(tmp_path / "begun", 2).read(), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert folder.labelled() > 0
    for chunk in folder.read():
        texts = torch.from_numpy(chunk.tokens.reshape(-1, 24).astype(np.int64))
        with torch.no_grad():
            expected = model(texts).logits.log_softmax(-1).flatten(0, 1)
        labelled = np.isfinite(chunk.log_probs[:, 0])
        assert not labelled.reshape(-1, 24)[:, -1].any()  # the last token's label would be of the next text
        places = torch.from_numpy(np.flatnonzero(labelled))
        ids = torch.from_numpy(chunk.ids[labelled].astype(np.int64))
        found = torch.from_numpy(chunk.log_probs[labelled].astype(np.float32))
        torch.testing.assert_close(found, expected[places].gather(1, ids), rtol=2e-3, atol=4e-3)
        greedy = [row for row in range(0, 6) if prompts.text(row).sampling.temperature == 0]
        for row in greedy:
            for place in np.flatnonzero(labelled.reshape(-1, 24)[row]):
                assert texts[row, place + 1] == expected[row * 24 + place].argmax()
