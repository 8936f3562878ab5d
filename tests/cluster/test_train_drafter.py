"""`dendro train drafter`: its data, its models, and whole runs for tiny targets with a tokenizer of their own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from dendro.errors import BadRequest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tree_layers.checkpoint import read_facts
from typer.testing import CliRunner

from cluster.checking import examine
from cluster.cli import app
from cluster.config import Config, demo_config
from cluster.drafter_figures import read_figures
from cluster.pairing import fit_of
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training import models
from cluster.training.acceptance import Answers, measure_acceptance
from cluster.training.adding import with_drafter, write_drafter, write_head_entry
from cluster.training.checkpoints import export, load_fp32
from cluster.training.data import DataFolder, DataSource, held_out_prompts
from cluster.training.drafter import DrafterRun, train_drafter
from cluster.training.models import checked_target, load_teacher, start_from, student_from
from cluster.training.plan import Length
from cluster.training.stages import StageFolder
from drafter_service.models import load_model
from drafter_service.training import loop
from drafter_service.training.labels import Chunk, TeacherFolder
from drafter_service.training.saving import NotSaved
from drafter_service.training.sizes import SIZES
from drafter_service.training.vocabulary import draft_embedding
from tests.support import tiny_mamba, tiny_models
from tests.support.small_hub import small_hub, use
from tests.support.small_training import CPU, TEMPLATE, WORDS, plan_of, words, write_cluster, write_text, write_words


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    return write_cluster(tmp_path)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def tokenize(folder: Path, source: DataSource, tokenizer_folder: Path, vocabulary: int = WORDS) -> DataFolder:
    data = DataFolder(folder, vocabulary)
    data.write(source, CheckpointTokenizer(tokenizer_folder, ""), 1, 64, lambda written: None)
    return data


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


CHAT = [message("user", "w5 w6"), message("assistant", "w7 w8")]


# ---- data


def test_texts_json_lines_and_folders_become_one_stream_in_which_each_text_ends(tmp_path: Path) -> None:
    write_words(tmp_path)
    texts = tmp_path / "texts"
    (texts / "b").mkdir(parents=True)
    (texts / ".git").mkdir()
    (texts / ".git" / "config").write_bytes(b"\xff")
    (texts / "a.txt").write_text("w4 w5")
    (texts / "b" / "c.txt").write_text("w6\nw7")
    (texts / "ignored.md").write_text("w9")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"body": "w8"}\n\n{"body": "w9 w10", "n": 1}\n')
    source = DataSource((texts, lines), "*.txt", "body")
    data = tokenize(tmp_path / "data", source, tmp_path)
    assert data.read("train").tokens.tolist() == [4, 5, 1, 6, 7, 1, 8, 1, 9, 10, 1]
    assert len(data.read("held_out").tokens) == 0


def test_a_long_text_is_tokenized_in_pieces_and_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_words(tmp_path)
    (tmp_path / "long.txt").write_text("".join(f"w{4 + line}\n" for line in range(15)))
    monkeypatch.setattr("cluster.training.data.PIECE_CHARACTERS", 10)
    documents = list(DataSource((tmp_path / "long.txt",)).documents())
    assert len(documents) > 3 and [each.begins for each in documents] == [True] + [False] * (len(documents) - 1)
    data = tokenize(tmp_path / "data", DataSource((tmp_path / "long.txt",)), tmp_path)
    assert data.read("train").tokens.tolist() == [*range(4, 19), 1]


def test_conversations_go_through_the_chat_template_and_the_last_answers_place_is_known(tmp_path: Path) -> None:
    write_words(tmp_path, TEMPLATE)
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT[:1]}) + "\n")
    data = tokenize(tmp_path / "data", DataSource((file,)), tmp_path).read("train")
    assert data.tokens.tolist() == [2, 5, 6, 1, 3, 7, 8, 1, 2, 5, 6, 1]
    assert data.answers.tolist() == [5]


def test_every_twentieth_text_is_held_out_and_of_a_single_text_its_end(tmp_path: Path) -> None:
    write_words(tmp_path)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"w{4 + line % 80} " * 40}) + "\n" for line in range(80)))
    many = tokenize(tmp_path / "many", DataSource((lines,)), tmp_path)
    assert sorted(set(many.read("held_out").tokens.tolist())) == [1, 23, 43, 63, 83]
    assert not {23, 43, 63, 83} & set(many.read("train").tokens.tolist())
    (tmp_path / "one.txt").write_text(words(0, 1999))
    one = tokenize(tmp_path / "one", DataSource((tmp_path / "one.txt",)), tmp_path)
    assert [len(one.read(part).tokens) for part in ("train", "held_out")] == [1901, 100]
    whole = np.concatenate([one.read(part).tokens for part in ("train", "held_out")])
    assert whole.tolist() == [int(word[1:]) for word in words(0, 1999).split()] + [1]
    assert held_out_prompts(one.read("held_out"), 8, 30).tolist() == [
        whole[start : start + 30].tolist() for start in (1901, 1934, 1967)
    ]


def test_tokens_above_65535_are_kept_and_a_killed_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tokenizer(WordLevel({"w0": 0, **{f"w{n}": n for n in range(69_000, 70_000)}}, unk_token="w0")).save(
        str(tmp_path / "tokenizer.json")
    )
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"w{69_000 + line}"}) + "\n" for line in range(400)))
    source = DataSource((lines,))
    whole = tokenize(tmp_path / "whole", source, tmp_path, 70_000)
    assert whole.read("train").tokens.tolist()[:4] == [69_000, 1, 69_001, 1]
    monkeypatch.setattr("cluster.training.data.SAVE_EVERY_S", 0.0)
    encode, calls = CheckpointTokenizer.encode, []

    def killed(self: CheckpointTokenizer, text: str, begins: bool) -> list[int]:
        calls.append(text)
        if len(calls) == 150:
            raise KeyboardInterrupt
        return encode(self, text, begins)

    monkeypatch.setattr(CheckpointTokenizer, "encode", killed)
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "killed", source, tmp_path, 70_000)
    with (tmp_path / "killed" / "train.tokens").open("ab") as stream:
        stream.write(b"half")  # of what was written after the last save
    resumed = tokenize(tmp_path / "killed", source, tmp_path, 70_000)
    assert len(calls) < 150 + 400
    for part in ("train", "held_out"):
        assert resumed.read(part).tokens.tolist() == whole.read(part).tokens.tolist()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({}, "there is no file or folder .*bad"),
    "empty": ({"bad.txt": ""}, r"bad.txt is empty"),
    "blank": ({"bad.jsonl": "\n\n"}, r"bad.jsonl is empty"),
    "no-match": ({"bad/a.md": "w4"}, r"bad has no file that matches '\*.txt'"),
    "binary": ({"bad.txt": b"w4\xff"}, r"bad.txt is not UTF-8 text: invalid start byte at byte 2"),
    "broken-line": ({"bad.jsonl": '{"text": "w4"}\n{"text": '}, r"bad.jsonl:2 is not JSON: Expecting value"),
    "surrogate": (
        {"bad.jsonl": '{"text": "w4 \\ud83d\\ude00"}\n{"text": "\\uD800"}'},
        r"bad.jsonl:2 has a surrogate code",
    ),
    "list": ({"bad.jsonl": "[1]"}, r"bad.jsonl:1 is not a JSON object"),
    "no-field": ({"bad.jsonl": '{"body": "w4", "id": 3}'}, r"bad.jsonl:1 has no field 'text'; its fields are body, id"),
    "empty-field": ({"bad.jsonl": '{"text": ""}'}, r"bad.jsonl:1 has no text in field 'text'"),
    "bad-messages": ({"bad.jsonl": '{"messages": ["w4"]}'}, r"bad.jsonl:1: messages must be a list of objects"),
    "no-template": ({"bad.jsonl": json.dumps({"messages": CHAT})}, r"bad.jsonl:1 has messages, and .*no chat template"),
    "short": ({"bad.txt": "w4 w5"}, r"bad.txt has 3 tokens, and 0 held out; more than 320 and 128 are needed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_ends_in_one_sentence_that_names_file_and_line(cluster_file: Path, case: str) -> None:
    files, sentence = BAD[case]
    for name, content in files.items():
        path = cluster_file.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    first = next(iter(files), "bad").split("/")[0]
    plan = plan_of(cluster_file, cluster_file.parent, source=DataSource((cluster_file.parent / first,), "*.txt"))
    with pytest.raises(BadRequest, match=f"^--data: .*{sentence}") as caught:
        train_drafter(plan)
    assert "\n" not in str(caught.value)


def test_a_token_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    write_words(tmp_path)
    (tmp_path / "text.txt").write_text("w4 w60")
    with pytest.raises(BadRequest, match=r"text.txt has the token 60; the target has 50"):
        tokenize(tmp_path / "data", DataSource((tmp_path / "text.txt",)), tmp_path, vocabulary=50)


# ---- models


def test_a_target_that_does_not_fit_in_memory_is_refused_in_one_sentence(
    cluster_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Config.load(cluster_file).targets["llama"]
    monkeypatch.setattr(models, "free_bytes", lambda device: 1000)
    with pytest.raises(BadRequest, match=r"^targets.llama.checkpoint: its .* parameters need .* GB are free on cpu$"):
        load_teacher("llama", served, checked_target("llama", served), CPU)


@pytest.mark.parametrize("layout", ["transformers", "state-spaces"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_training_continues_from_a_checkpoint_of_either_layout(
    cluster_file: Path, tmp_path: Path, kind: str, layout: str
) -> None:
    folder, groups = tmp_path / "start", {} if kind == "mamba" else {"n_groups": 1}
    folder.mkdir()
    model = tiny_mamba.make_checkpoint(folder, kind, config=tiny_mamba.tiny_config(kind, 104, **groups))
    if layout == "state-spaces":
        (folder / "model.safetensors").unlink()
        tiny_mamba.make_state_spaces(folder, model)
    write_words(folder)
    served = Config.load(cluster_file).targets["llama"]
    target = checked_target("llama", served)
    start = start_from(folder, None, target)
    assert start.transplant(target, served.tokenizer_folder) is None
    made = student_from(start, target, None, seed=0, device=CPU)
    assert made.config.vocab_size == WORDS
    ids = torch.randint(WORDS, (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits[..., :WORDS], rtol=1e-4, atol=1e-4)


def test_training_continues_with_the_files_head_though_the_configuration_says_tied(
    cluster_file: Path, tmp_path: Path
) -> None:
    folder, written = tmp_path / "start", tmp_path / "written"
    folder.mkdir()
    config = tiny_mamba.tiny_config("mamba2", 104, n_groups=1, tie_word_embeddings=False)
    model = tiny_mamba.make_checkpoint(folder, "mamba2", config=config)
    config.tie_word_embeddings = True
    config.save_pretrained(folder)
    write_words(folder)
    target = checked_target("llama", Config.load(cluster_file).targets["llama"])
    made = student_from(start_from(folder, None, target), target, None, seed=0, device=CPU)
    assert not made.config.tie_word_embeddings
    export(made, written, [])
    ids = torch.randint(WORDS, (1, 20))
    with torch.no_grad():
        truth = model(ids).logits[..., :WORDS]
        torch.testing.assert_close(made(ids).logits, truth, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(load_fp32(written, CPU)(ids).logits, truth, rtol=0.1, atol=0.2)  # of bfloat16


def test_training_continues_from_a_name_on_the_hub(
    cluster_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = checked_target("llama", Config.load(cluster_file).targets["llama"])
    (tmp_path / "start").mkdir()
    tiny_mamba.make_checkpoint(tmp_path / "start", "mamba")
    with small_hub() as hub:
        use(monkeypatch, hub.url, tmp_path / "cache")
        hub.commit("people/mamba", tmp_path / "start")
        start = start_from(Path("people/mamba"), None, target)
    assert start.facts.digest == read_facts(start.folder).digest == read_facts(tmp_path / "start").digest
    assert start_from(tmp_path / "start", None, target).folder == tmp_path / "start"


def test_a_checkpoint_with_a_weight_that_is_not_finite_is_not_continued(cluster_file: Path, tmp_path: Path) -> None:
    target = checked_target("llama", Config.load(cluster_file).targets["llama"])
    model = tiny_mamba.make_checkpoint(tmp_path / "start", "mamba2")
    write_words(tmp_path / "start")
    with torch.no_grad():
        model.backbone.norm_f.weight[0] = torch.inf
    model.save_pretrained(tmp_path / "start")
    with pytest.raises(BadRequest, match="^--from: .*start: backbone.norm_f.weight has values that are not finite"):
        start_from(tmp_path / "start", None, target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_whose_scores_are_no_numbers_guesses_nothing(tmp_path: Path, temperature: float) -> None:
    model = tiny_mamba.make_checkpoint(tmp_path / "drafter", "mamba", config=tiny_mamba.tiny_config("mamba", WORDS))
    with torch.no_grad():
        model.backbone.norm_f.weight.fill_(torch.nan)
    texts = torch.randint(4, WORDS, (2, 20), generator=torch.Generator().manual_seed(0))
    answers = Answers.of(temperature, WORDS, 8, texts, frozenset({1}))
    assert measure_acceptance(model, [answers]).ranks == {f"{temperature:g}": [[WORDS] * 12] * 2}


def test_a_checkpoint_of_another_kind_or_without_a_tokenizer_is_not_continued(
    cluster_file: Path, tmp_path: Path
) -> None:
    served = Config.load(cluster_file).targets["llama"]
    target = checked_target("llama", served)
    (tmp_path / "neox").mkdir()
    tiny_models.make_checkpoint(tmp_path / "neox", "neox")
    with pytest.raises(BadRequest, match="^--from: .*neox is a gpt_neox; mamba, mamba2, llama can be trained"):
        start_from(tmp_path / "neox", None, target)
    (tmp_path / "bare").mkdir()
    tiny_mamba.make_checkpoint(tmp_path / "bare", "mamba")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(BadRequest, match="^--from: .*bare has no tokenizer: name a folder .*by --from-tokenizer"):
        start_from(tmp_path / "bare", None, target)
    assert start_from(tmp_path / "bare", tmp_path / "neox", target).tokenizer == tmp_path / "neox"
    (tmp_path / "groups").mkdir()
    tiny_mamba.make_checkpoint(tmp_path / "groups", "mamba2")
    write_words(tmp_path / "groups")
    with pytest.raises(BadRequest, match="^--from: .*supports n_groups 1, not 2"):
        student_from(start_from(tmp_path / "groups", None, target), target, None, seed=0, device=CPU)


# ---- runs


@pytest.mark.parametrize("kind", ["mamba2", "llama"])
def test_a_drafter_of_some_tokens_is_written_as_it_is_served(cluster_file: Path, text_file: Path, kind: str) -> None:
    """With the embedding of the trained model, of tokens that it guesses and of others."""
    plan = plan_of(cluster_file, text_file, kind=kind, length=Length(steps=4), vocabulary=40)
    train_drafter(plan)
    model, checkpoint = load_model(plan.out, torch.float32, CPU, form="eager")
    assert str(checkpoint.facts.draft) == f"guesses 40 of {WORDS} tokens" and model.vocabulary == 40
    assert fit_of(plan.facts, checkpoint.facts).fits and model.draft_ids is not None
    text = np.arange(4, 30)
    with torch.inference_mode():
        embedding = draft_embedding(load_fp32(plan.out, CPU))
        assert embedding is not None
        found = model.embed(torch.from_numpy(model.draft_ids.inside(text)))
        torch.testing.assert_close(found, embedding(torch.from_numpy(text)), rtol=1e-5, atol=1e-6)
    assert f"It guesses 40 of the target's {WORDS} tokens and reads all" in (plan.out / "README.md").read_text()
    with pytest.raises(BadRequest, match=f"^--from: .*drafter guesses 40 of {WORDS} tokens; a drafter that"):
        start_from(plan.out, None, plan.facts)


@pytest.mark.parametrize(("target", "kind"), [("llama", "mamba2"), ("llama", "mamba"), ("mamba2", "llama")])
def test_the_written_checkpoint_is_accepted_as_a_drafter_of_its_target(
    cluster_file: Path, text_file: Path, target: str, kind: str
) -> None:
    plan = plan_of(cluster_file, text_file, target, kind=kind, length=Length(steps=4, pretrain=0.5))
    run = train_drafter(plan)
    model, checkpoint = load_model(plan.out, torch.float32, CPU)
    assert model.vocabulary == WORDS == checkpoint.facts.vocabulary
    assert checkpoint.facts.tokenizer == plan.facts.tokenizer
    sections = yaml.safe_load(cluster_file.read_text())
    sections["drafters"] = {"d": {"checkpoint": "drafter", "targets": [target], "dtype": "float32"}}
    report = examine(Config.of(sections, cluster_file.parent), load=False, show_line=lambda line: None)
    assert not report.problems and [pair.fits for pair in report.pairs] == [True]
    card = (plan.out / "README.md").read_text()
    stated = ("dendro train drafter", "Seed: 0", "text.txt", "| before | 0 |", "| after | 1 |", "| pretrain | 4 |")
    assert not [words for words in stated if words not in card]
    figures = read_figures(plan.out)
    assert figures is not None and figures.target == target
    assert [each.temperature for each in figures.by_temperature] == [0, 0.7, 1]
    assert f"| after | 0 | {figures.at(0).first:.1%} |" in card
    assert run.done.facts("distil")["steps"] == 4


@pytest.mark.parametrize("name", ["data", "teacher"])
def test_a_drafter_may_have_the_name_of_a_folder_of_its_run(cluster_file: Path, text_file: Path, name: str) -> None:
    plan = plan_of(cluster_file, text_file, out=cluster_file.parent / name, length=Length(steps=1), seed=(1 << 32) - 1)
    train_drafter(plan)
    assert load_fp32(plan.out, CPU).config.vocab_size == WORDS and len(TeacherFolder(plan.work / "teacher"))


def test_labels_of_fewer_tokens_than_a_row_are_refused_after_their_first_chunk(
    cluster_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a resumed run too, after the next chunk, or at the training if all were written."""

    def write(*given: Any) -> None:
        folder, _, on_chunk = given[-3:]
        tokens = np.zeros(32, np.uint16)
        folder.add(len(folder), Chunk(tokens, tokens[:, None], np.zeros((32, 1), np.float16)), own=True, seconds=1.0)
        on_chunk(0.5)
        raise AssertionError("more is written")

    write_words(tmp_path / "llama", TEMPLATE)
    chat = tmp_path / "chat.jsonl"
    turns = ({"role": role, "content": words(1, 9)} for role in ("user", "assistant"))
    chat.write_text((json.dumps({"messages": list(turns)}) + "\n") * 100)
    plan = plan_of(cluster_file, chat, rows=1)
    monkeypatch.setattr("cluster.training.drafter.write_answers", write)
    for _ in range(2):
        with pytest.raises(BadRequest, match="^--row-tokens: 32 are not fewer than the 32 tokens of .* give fewer"):
            train_drafter(plan)
    run = DrafterRun(plan, StageFolder(plan.work, plan.settings(), resume=True), None)
    with pytest.raises(BadRequest, match="^--row-tokens: 32"):
        run.distil()


def test_a_killed_and_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    cluster_file: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.training.drafter.rows_within", lambda *_: 16)  # else by the speed of the machine
    whole = plan_of(cluster_file, text_file, out=cluster_file.parent / "whole")
    train_drafter(whole)
    killed = plan_of(cluster_file, text_file, out=cluster_file.parent / "killed")
    train_drafter(killed, stop_after="teacher")
    step = loop.Trainer._take_step

    def kill_at_step_four(trainer: Any, rate: float) -> float:
        if trainer.step == 3:
            trainer._save()
        if trainer.step == 4:
            raise KeyboardInterrupt
        return step(trainer, rate)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_take_step", kill_at_step_four)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(killed)
    steps: list[int] = []
    monkeypatch.setattr(loop.Trainer, "_take_step", lambda t, rate: steps.append(t.step) or step(t, rate))
    train_drafter(killed)
    assert steps == [3, 4, 5]
    for file in ("model.safetensors", "config.json"):
        assert (killed.out / file).read_bytes() == (whole.out / file).read_bytes()
    train_drafter(killed)  # finished: nothing is done again
    assert steps == [3, 4, 5]
    weights = (whole.out / "model.safetensors").read_bytes()
    shutil.rmtree(killed.out)
    train_drafter(killed)  # its result is gone: it is written again from the trained state
    assert steps == [3, 4, 5] and (killed.out / "model.safetensors").read_bytes() == weights


def test_a_folder_that_is_there_and_other_settings_are_refused(cluster_file: Path, text_file: Path) -> None:
    plan = plan_of(cluster_file, text_file)
    plan.out.mkdir()
    with pytest.raises(BadRequest, match="^--out: .*drafter is there already; name another folder$"):
        train_drafter(plan)
    plan.out.rmdir()
    train_drafter(plan, stop_after="data")
    with pytest.raises(BadRequest, match="^--seed: .*was begun with seed 0, not 1; --no-resume begins anew$"):
        train_drafter(plan_of(cluster_file, text_file, seed=1))
    train_drafter(plan_of(cluster_file, text_file, seed=1), resume=False, stop_after="data")


def test_distillation_lowers_the_loss_and_a_full_disk_keeps_the_chunks(
    cluster_file: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(cluster_file, text_file, length=Length(steps=60))
    save = np.save

    def full(to: Any, array: np.ndarray) -> None:
        if "00001.partial" in str(to):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(to, array)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(NotSaved, match=r"teacher/00001 cannot be written: No space left on device; nothing of it"):
            train_drafter(plan)
    assert [path.name for path in (plan.work / "teacher").iterdir()] == ["00000"]
    run = train_drafter(plan)
    assert run.done.facts("export")["held_out_loss"] < run.done.facts("answers")["held_out_loss"] - 0.05


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["train", "drafter", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_command_prints_and_writes_lines_with_which_the_configuration_is_valid(
    cluster_file: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["dendro", "train", "drafter", "cluster.yaml"])
    size = ("--layers", 1, "--width", 32, "--kind", "mamba", "--steps", 3, "--row-tokens", 32, "--no-compile")
    output = invoke(cluster_file, "--data", text_file, "--target", "mamba2", *size)
    lines = output[output.index("drafters:") : output.index("Then ")]
    by_hand = Config.of(yaml.safe_load(cluster_file.read_text() + lines), cluster_file.parent)
    invoke(cluster_file, "--data", text_file, "--target", "mamba2", *size, "--write")  # finished: it only writes
    assert by_hand == Config.load(cluster_file)
    config = Config.load(cluster_file)
    assert config.drafters["mamba2-mamba"].targets == ("mamba2",)
    assert read_facts(config.drafters["mamba2-mamba"].checkpoint).model_type == "mamba"
    assert "dendro tune" in output


ENTRY = {"checkpoint": "made", "targets": ["llama"]}


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("a: 1 # kept\n", "a: 1 # kept\n\ndrafters:\n  made: {checkpoint: made, targets: [llama]}\n"),
        ("{a: 1}", "{drafters: {made: {checkpoint: made, targets: [llama]}}, a: 1}"),
        ("drafters:\na: 1\n", "drafters: {made: {checkpoint: made, targets: [llama]}}\na: 1\n"),
        ("drafters: {}\n", "drafters: {made: {checkpoint: made, targets: [llama]}}\n"),
        ("drafters:\n  b: {} # kept\n", "drafters:\n  made: {checkpoint: made, targets: [llama]}\n  b: {} # kept\n"),
    ],
)
def test_an_entry_is_written_before_the_others_and_the_rest_is_unchanged(text: str, edited: str) -> None:
    assert with_drafter(text, "made", ENTRY) == edited
    assert with_drafter(edited, "made", ENTRY) == edited
    with pytest.raises(BadRequest, match="^--write: the configuration has another drafter 'made'; name another --out$"):
        with_drafter(edited, "made", ENTRY | {"threads": 2})


def test_entries_are_written_into_a_file_of_crlf_lines_with_its_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(b"a: 1\r\ndrafters:\r\n  d:\r\n    checkpoint: x\r\n")
    write_drafter(file, "made", {"checkpoint": "y"})
    write_head_entry(file, "d", "h")
    begun, rest = b"a: 1\r\ndrafters:\r\n  made: {checkpoint: y}\r\n", b"  d:\r\n    head: h\r\n    checkpoint: x\r\n"
    assert file.read_bytes() == begun + rest


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--size", "huge"), "--size: must be one of tiny, 30m, 130m, 370m, got 'huge'"),
        (("--kind", "rwkv"), "--kind: must be one of mamba, mamba2, llama, got 'rwkv'"),
        (("--layers", 2), "--layers: and --width belong together"),
        (("--layers", 2, "--width", 100), "--width: layers must be at least 1, and the width a multiple of 16"),
        (("--from", "start", "--kind", "mamba"), "--from: has the kind and the size"),
        (("--from-tokenizer", "start"), "--from-tokenizer: belongs to --from"),
        (("--labels", "cloud"), "--labels: must be one of disk, fly, got 'cloud'"),
        (("--rows", 7, "--processes", 2), "--rows: must be a multiple of the 2 processes, got 7"),
        (("--minutes", 1, "--steps", 1), "--minutes: or --steps: give one of them"),
        *((("--minutes", minutes), "--minutes: must be finite and more than 0") for minutes in (0, -1, "inf", "nan")),
        (("--pretrain", 1), "--pretrain: must be at least 0 and less than 1"),
        (("--out", "my drafter"), "--out: the name 'my drafter' may have letters"),
        (("--target", "big"), "model: 'big' is not served here"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(
    cluster_file: Path, text_file: Path, arguments: tuple[object, ...], sentence: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        invoke(cluster_file, "--data", text_file, *arguments)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("model", ["drafter", "head"])
def test_a_seed_of_more_than_32_bits_is_refused_by_name(cluster_file: Path, model: str) -> None:
    result = CliRunner().invoke(app, ["train", model, str(cluster_file), "--seed", str(1 << 32)])
    assert result.exit_code == 2 and "'--seed'" in result.output


@pytest.mark.long  # four minutes on a busy core
@pytest.mark.timeout(600)
def test_distillation_raises_emitted_per_round_on_the_demo_target(tmp_path: Path) -> None:
    """Of random weights few guesses are right; after 120 steps on part of the standard library many are."""
    plan = plan_of(
        tmp_path,
        tmp_path,
        name="target",
        target=demo_config().targets["target"],
        source=DataSource((Path(sysconfig.get_path("stdlib")) / "asyncio",), "*.py"),
        size=SIZES["mamba2"]["tiny"],
        length=Length(steps=120),
        row_tokens=256,
        out=tmp_path / "drafter",
    )
    run = train_drafter(plan)
    before, after = (run.done.facts(stage)["acceptance"]["emitted"]["0"] for stage in ("answers", "export"))
    assert before["(1,1,1,1)"] < 1.1
    assert after["(1,1,1,1)"] > 1.3
