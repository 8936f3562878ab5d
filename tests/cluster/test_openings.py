"""Openings of the questions that a target asks itself: read from a file, and put before questions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from tree_layers.checkpoint import read_facts

from cluster.config import DEMO_MODELS, TargetConfig
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training import answering
from cluster.training.answering import ChatFrame, PromptOrder, answers_in, write_answers
from cluster.training.lockstep import Conversations
from cluster.training.openings import MOST_TOKENS, read_openings
from drafter_service.training.labels import TeacherFolder
from drafter_service.training.loop import Budget

FRAME = ChatFrame((3, 4), (9, 10), (2, 11, 12))
OPENINGS = [(20, 21), (30,)]


@pytest.fixture(scope="module")
def tokenizer() -> CheckpointTokenizer:
    return CheckpointTokenizer(DEMO_MODELS / "target", read_facts(DEMO_MODELS / "target").tokenizer)


def test_an_openings_line_breaks_and_spaces_are_kept(tokenizer: CheckpointTokenizer, tmp_path: Path) -> None:
    file, texts = tmp_path / "openings.jsonl", ["Translate:\n\n", "def add("]
    file.write_text("\n\n".join(json.dumps({"opening": text}) for text in texts))
    assert [tokenizer.decode(each) for each in read_openings(file, tokenizer)] == texts


@pytest.mark.parametrize(
    ("lines", "refusal"),
    [
        ("", "has no openings"),
        ('{"opening": "a"}\n{"text": "b"}', ":2 has no text in the field 'opening'"),
        ('{"opening": 3}', ":1 has no text in the field 'opening'"),
        ('{"opening": " "}', ":1 has no text in the field 'opening'"),
        ("[1]", ":1"),
        (json.dumps({"opening": "one two " * MOST_TOKENS}), f"at most {MOST_TOKENS} are allowed"),
        ("\udcff", "is not UTF-8 text"),
    ],
)
def test_a_line_without_an_opening_is_refused_by_its_number(
    tokenizer: CheckpointTokenizer, tmp_path: Path, lines: str, refusal: str
) -> None:
    file = tmp_path / "openings.jsonl"
    file.write_bytes(lines.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadRequest, match="--openings") as refused:
        read_openings(file, tokenizer)
    assert refusal in str(refused.value)
    with pytest.raises(BadRequest, match="cannot be read"):
        read_openings(tmp_path, tokenizer)


def test_half_of_the_targets_questions_begin_with_an_opening_in_every_turn() -> None:
    prompts = PromptOrder([], FRAME, seed=1, openings=OPENINGS)
    for turn in (0, 3):
        drawn = [prompts.opening(number, turn) for number in range(400)]
        shares = [drawn.count(each) / len(drawn) for each in ((), *OPENINGS)]
        assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.06)
    assert prompts.opening(5, 1) == prompts.opening(5, 1)
    assert [prompts.opening(number, 0) for number in range(9)] != [prompts.opening(number, 1) for number in range(9)]


def test_a_conversations_questions_begin_with_their_turns_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.training.lockstep.QUESTION_TOKENS", 2)
    monkeypatch.setattr("cluster.training.lockstep.ANSWER_TOKENS", 2)
    prompts = PromptOrder([], FRAME, seed=1, openings=OPENINGS)
    batch = Conversations(prompts, 0, 6, frozenset({2}))
    columns = [batch.next(np.full(6, 50))[0] for _ in range(40)]
    for row, tokens in enumerate(np.stack(columns, 1).tolist()):
        expected = [*FRAME.opening]
        for turn in range(8):
            expected += [*prompts.opening(row, turn), 50, *FRAME.closing, 50, 50, *FRAME.between]
        assert tokens == expected[:40]


def test_an_answered_prompt_of_the_targets_own_begins_with_its_opening(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("TEXTS", 4), ("ANSWER_TOKENS", 4), ("QUESTION_TOKENS", 3)):
        monkeypatch.setattr(answering, name, value)
    checkpoint, folder = DEMO_MODELS / "target", TeacherFolder(tmp_path)
    prompts = PromptOrder.fitting([], FRAME, 3, 64, [*OPENINGS, (7,) * 40])
    assert prompts.openings == OPENINGS, "the longest leaves no room for a question"
    target = TargetConfig(checkpoint=checkpoint, dtype="float32", max_length=64)
    facts, cpu = read_facts(checkpoint), torch.device("cpu")
    write_answers("t", target, facts, prompts, cpu, folder, Budget(steps=2), lambda spent: None)
    for number, answer in enumerate(answers_in(folder.read(), prompts)):
        begun = [*FRAME.opening, *prompts.opening(number, 0)]
        assert answer.tokens[: len(begun)] == begun
        assert answer.begin <= len(begun) + 3 + len(FRAME.closing)
    assert len({prompts.opening(number, 0) for number in range(8)}) == 3
