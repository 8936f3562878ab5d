"""What `dendro demo` serves and sends: a published target through its chat template, or else the bundled pair."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from dendro.text import Finish

from cluster.config import demo_config
from cluster.demo import real_pair
from cluster.demo.real_pair import chosen_pair, real_config
from cluster.demo.turns import CONTINUATION, chat_turns, demo_turns
from cluster.router.tokenizer import CheckpointTokenizer
from tests.support import tiny_models
from tests.support.tiny_gguf import TEMPLATE

ENDED = TEMPLATE.replace("{% endfor %}", "<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")


def test_without_the_package_the_bundled_pair_is_served_and_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(real_pair, "SMOLLM2", "package:no_such_package/a.gguf")
    config, what = chosen_pair()
    assert config == demo_config()
    assert "the bundled pair (" in what and "no installed package no_such_package" in what and "make setup" in what


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with the file that the demo looks for."""
    folder = tmp_path / "site" / "some_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(real_pair, "SMOLLM2", "package:some_weights/a.gguf")


@pytest.mark.usefixtures("package")
def test_with_the_package_its_file_is_served_and_the_drafter_is_used_once_its_folder_exists(tmp_path):
    config, what = chosen_pair(tmp_path / "smollm2-mamba2")
    assert config.targets["smollm2"].checkpoint.as_posix() == "package:some_weights/a.gguf"
    assert not config.drafters and "no drafter: prompt lookup guesses" in what
    (tmp_path / "smollm2-mamba2").mkdir()
    config, what = chosen_pair(tmp_path / "smollm2-mamba2")
    assert list(config.drafters) == ["smollm2-mamba2"] and what.endswith("with the drafter smollm2-mamba2")
    assert config == real_config(tmp_path / "smollm2-mamba2")


@pytest.mark.parametrize(
    ("finish", "second"),
    [(Finish.END_OF_TEXT, "[user]and?<|end|>[assistant]"), (Finish.LENGTH, "<|end|>[user]and?<|end|>[assistant]")],
)
def test_the_second_question_follows_an_answer_that_has_ended_or_was_cut(finish, second, tmp_path):
    tiny_models.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": ENDED}))
    tokenizer = CheckpointTokenizer(tmp_path, "")
    turns = chat_turns(tokenizer, frozenset({tiny_models.END}), "why?", "and?")
    assert turns.first == "[user]why?<|end|>[assistant]"
    assert turns.second(SimpleNamespace(complete=SimpleNamespace(finish=finish))) == second


def test_without_a_chat_template_a_passage_is_continued():
    turns = demo_turns(demo_config())
    assert turns.first and turns.second(SimpleNamespace()) == CONTINUATION
    assert demo_turns(demo_config(), "def area(").first == "def area("
