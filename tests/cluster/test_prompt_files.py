"""Files of prompts: encoded as people send them, refused by line, mixed by category."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from dendro.errors import BadRequest

from cluster.prompt_files import QUESTIONS, FilePrompt, by_turns, read_prompts, that_fit
from cluster.router.tokenizer import CheckpointTokenizer
from tests.support import tiny_models

TEMPLATE = (
    "{% for each in messages %}[{{ each.role }}]{{ each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    folder = tmp_path_factory.mktemp("plain")
    tiny_models.write_tokenizer(folder)
    return CheckpointTokenizer(folder, "")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    folder = tmp_path_factory.mktemp("chatting")
    tiny_models.write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return CheckpointTokenizer(folder, "")


def texts_of(folder: Path, tokenizer: CheckpointTokenizer, *lines: object) -> list[str]:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return [tokenizer.decode(prompt.token_ids) for prompt in read_prompts(file, tokenizer)]


ASKED = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


def test_a_prompt_is_a_users_message_and_a_text_begins_as_it_is(chatting, plain, tmp_path):
    lines = ({"prompt": "one"}, {"text": "one"})
    assert texts_of(tmp_path, chatting, *lines) == ["[user]one\n[a]", "one"]
    assert texts_of(tmp_path, plain, *lines) == ["one", "one"], "without a template both are text"


def test_answers_at_the_end_of_a_conversation_are_not_part_of_its_prompt(chatting, tmp_path):
    again = [*ASKED, {"role": "user", "content": "three"}]
    found = texts_of(tmp_path, chatting, {"messages": ASKED}, {"messages": again, "source": "unused"})
    assert found == ["[user]one\n[a]", "[user]one\n[assistant]two\n[user]three\n[a]"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "prompts.jsonl:2 is not JSON"),
        ("[" * 100_000, "prompts.jsonl:2 is not JSON"),
        ("[]", "prompts.jsonl:2 is not a JSON object"),
        ("{}", "prompts.jsonl:2 must have one of messages, prompt and text, not 0"),
        ('{"prompt": "a", "text": "b"}', "must have one of messages, prompt and text, not 2"),
        ('{"prompt": ""}', "prompts.jsonl:2: prompt: must be a text that is not empty"),
        ('{"text": 5}', "prompts.jsonl:2: text: must be a text"),
        ('{"text": "a", "category": 5}', "prompts.jsonl:2: category must be a text"),
        ('{"messages": [5]}', "prompts.jsonl:2: messages: must be a list of objects"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "messages: must be a list of objects"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "prompts.jsonl:2: messages: asks nothing"),
        (f'{{"text": "{"a" * (1 << 20)}"}}', "prompts.jsonl:2 has more than 1,048,576 characters"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_prompt_is_refused_with_its_line(chatting, tmp_path, line: str, reason: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(BadRequest, match=reason):
        read_prompts(file, chatting)


def test_conversations_need_a_template(plain, tmp_path):
    with pytest.raises(BadRequest, match="prompts.jsonl:1: messages: the target has no chat template"):
        texts_of(tmp_path, plain, {"messages": ASKED})


@pytest.mark.parametrize("content", [None, b"\n\n", b"\xff\xfe"], ids=["missing", "blank", "not UTF-8"])
def test_a_file_without_prompts_is_refused(plain, tmp_path, content: bytes | None):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadRequest, match="--prompt-file: .*prompts.jsonl"):
        read_prompts(file, plain)


def test_the_first_prompts_by_turns_are_of_every_category(plain):
    found = by_turns(read_prompts(QUESTIONS, plain))
    assert len(found) == 40
    assert set(Counter(prompt.category for prompt in found[:8]).values()) == {1}
    uneven = [FilePrompt(name, name[0], (1,)) for name in ("a1", "a2", "a3", "b1")]
    assert [prompt.name for prompt in by_turns(uneven)] == ["a1", "b1", "a2", "a3"]


def test_prompts_that_are_too_long_are_left_out(plain):
    prompts = [FilePrompt("short", "", (1,) * 4), FilePrompt("long", "", (1,) * 5)]
    assert [prompt.name for prompt in that_fit(prompts, 4)] == ["short"]
    with pytest.raises(BadRequest, match="has no prompt of at most 3 tokens"):
        that_fit(prompts, 3)
