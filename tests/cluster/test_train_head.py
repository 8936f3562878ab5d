"""`dendro train head`: whole runs for a tiny target and a tiny drafter, and a head that is served."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from dendro.errors import BadRequest
from dendro.options import Options
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tree_kernels.warp import Warp
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import Config
from cluster.precompiling import kernel_modules
from cluster.running import local_client
from cluster.training import head as stages
from cluster.training.adding import with_head
from cluster.training.data import DataSource
from cluster.training.head import train_head, warps_of
from cluster.training.head_plan import HeadPlan
from cluster.training.models import checked_target
from cluster.training.stages import only_run_in
from drafter_service.acceptance_head import read_head
from drafter_service.training import examples, loop
from drafter_service.training.examples import ExampleLaw
from drafter_service.training.saving import NotSaved
from tests.support import tiny_mamba, tiny_models
from tests.support.cut_heads import cut_head
from tests.support.tiny_heads import make_head

CPU = torch.device("cpu")
WORDS = 90
PROMPT = 12


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four prompts of twelve tokens with answers of eight."""
    sizes = {"PROMPT_TOKENS": PROMPT, "ANSWER_TOKENS": 8, "CHUNK_PROMPTS": 4, "HELD_OUT_PROMPTS": 4, "BATCH_ROWS": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(stages, name, value)


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    """A configuration of a Llama and its Mamba-2 drafter, whose tokenizer has words."""
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
    tokens = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    tiny_models.make_model("llama", **tokens).save_pretrained(tmp_path / "target")
    tiny_mamba.make_checkpoint(tmp_path / "drafter", "mamba2", config=tiny_mamba.tiny_config("mamba2", 96))
    for name in ("target", "drafter"):
        tokenizer = Tokenizer(WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    for name in ("code", "prose"):
        rng = np.random.default_rng(len(name))
        lines = (" ".join(f"w{word}" for word in rng.integers(2, WORDS, 60)) for _ in range(40))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    file = tmp_path / "cluster.yaml"
    shared = {"dtype": "float32", "resources": {"cpu": 0.5}}
    entries = {
        "targets": {"target": {"checkpoint": "target", "max_length": 256, **shared}},
        "drafters": {"drafter": {"checkpoint": "drafter", **shared}},
        "router": {"draft_timeout_ms": 20_000},
    }
    file.write_text(yaml.safe_dump(entries))
    return file


def plan_of(cluster_file: Path, **changes: Any) -> HeadPlan:
    config = Config.load(cluster_file)
    settings: dict[str, Any] = {
        "target_name": "target",
        "target": config.targets["target"],
        "facts": checked_target("target", config.targets["target"]),
        "drafter_name": "drafter",
        "drafter": config.drafters["drafter"],
        "kinds": {name: DataSource((cluster_file.parent / name,)) for name in ("code.jsonl", "prose.jsonl")},
        "law": ExampleLaw((Warp(), Warp(1.0)), 2),
        "blocks": 1,
        "tied": False,
        "rejection_weight": 1.0,
        "minutes": None,
        "chunks": 3,
        "seed": 0,
        "out": cluster_file.parent / "head",
        "device": CPU,
        "command": "dendro train head",
    }
    return HeadPlan(**settings | changes)


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["train", "head", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


async def test_the_command_writes_a_head_that_is_served_and_changes_no_token(cluster_file, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dendro", "train", "head", "cluster.yaml"])
    data = [word for name in ("code", "prose") for word in ("--data", cluster_file.parent / f"{name}.jsonl")]
    plain = Config.load(cluster_file)
    output = invoke(cluster_file, *data, "--chunks", 2, "--depth", 2, "--tied", "--w-rej", 6, "--write")
    config = Config.load(cluster_file)
    head = config.drafters["drafter"].head
    assert head == cluster_file.parent / "drafter-head" / "acceptance_head.safetensors" and "Held out" in output
    facts = read_head(head, CPU).facts
    assert (facts.blocks, facts.tied, facts.width, facts.vocabulary) == (2, True, 32, WORDS)
    card = (head.parent / "acceptance_head.md").read_text()
    stated = (
        "dendro train head",
        "Seed: 0",
        "tied; width 32",
        "Weight of rejections in the loss: 6",
        "| code.jsonl |",
        "| all |",
    )
    assert not [words for words in stated if words not in card]
    assert "tree_kernels.acceptance_head.loops" in kernel_modules(config)
    assert "tree_kernels.acceptance_head.loops" not in kernel_modules(plain)
    async with local_client(config) as client:
        for temperature in (0.0, 0.8):
            options: Options = {"temperature": temperature, "seed": 7, "max_new_tokens": 24, "ignore_end": True}
            wanted = await client.generate_text("w5 w6 w7 w8", **options, speculation="off")
            for shape in ("(1,1,1)", "(3,2,1)", "beam(4,3)", "dynamic(4,4,12)"):
                found = await client.generate_text("w5 w6 w7 w8", **options, speculation=shape)
                assert found.token_ids == wanted.token_ids


def test_a_killed_and_resumed_run_ends_with_the_head_of_an_uninterrupted_one(cluster_file, monkeypatch):
    """It is killed in its second chunk of examples, and again in its training."""
    whole = plan_of(cluster_file, out=cluster_file.parent / "whole")
    train_head(whole)
    killed = plan_of(cluster_file, out=cluster_file.parent / "killed")
    write, chunks = examples.write_answers, list[int]()

    def kill_second(*arguments: Any) -> Any:
        chunks.append(1)
        if len(chunks) == 4 + 2:  # held out: two splits of two kinds
            raise KeyboardInterrupt
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_answers", kill_second)
        with pytest.raises(KeyboardInterrupt):
            train_head(killed)
    step = loop.Trainer._take_step

    def kill_at_step_two(trainer: Any, rate: float) -> float:
        if trainer.step == 2:
            trainer._save()
            raise KeyboardInterrupt
        return step(trainer, rate)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_take_step", kill_at_step_two)
        with pytest.raises(KeyboardInterrupt):
            train_head(killed)
    steps: list[int] = []
    monkeypatch.setattr(loop.Trainer, "_take_step", lambda t, rate: steps.append(t.step) or step(t, rate))
    run = train_head(killed)
    assert steps[0] == 2 and len(steps) == run.done.facts("train")["steps"] - 2
    assert killed.file.read_bytes() == whole.file.read_bytes()
    ended = len(steps)
    train_head(killed)  # finished: nothing is done again
    assert len(steps) == ended
    killed.file.unlink()
    train_head(killed)  # its result is gone: it is written again from the trained state
    assert len(steps) == ended and killed.file.read_bytes() == whole.file.read_bytes()


def test_a_full_disk_ends_in_one_sentence_and_keeps_the_chunks(cluster_file, monkeypatch):
    plan, save = plan_of(cluster_file), np.savez

    def full(stream: Any, **arrays: Any) -> None:
        if "examples/00001" in stream.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(stream, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(NotSaved, match=r"examples/00001.npz cannot be written: No space left on device; nothing"):
            train_head(plan)
    assert [file.name for file in (plan.work / "examples").iterdir()] == ["00000.npz"]


def test_bad_data_a_head_that_is_there_and_other_settings_are_refused_by_name(cluster_file):
    (cluster_file.parent / "short.txt").write_text("w4 w5")
    short = {"short.txt": DataSource((cluster_file.parent / "short.txt",))}
    with pytest.raises(BadRequest, match="^--data: short.txt has .* tokens, and .* held out; more than .* are needed"):
        train_head(plan_of(cluster_file, kinds=short, out=cluster_file.parent / "none"))
    train_head(plan_of(cluster_file), stop_after="data")
    with pytest.raises(BadRequest, match="^--w-rej: .*was begun with w-rej 1.0, not 3.0; --no-resume begins anew$"):
        train_head(plan_of(cluster_file, rejection_weight=3.0))
    work = plan_of(cluster_file).work
    with only_run_in(work), pytest.raises(BadRequest, match=f"^--out: {work} is in use: another training runs in it"):
        train_head(plan_of(cluster_file), resume=False)
    there = cluster_file.parent / "there"
    there.mkdir()
    make_head(cluster_file.parent / "drafter", there)
    with pytest.raises(BadRequest, match=r"^--out: .*acceptance_head.safetensors is there already; name another"):
        train_head(plan_of(cluster_file, out=there))


def test_a_drafter_of_some_tokens_gets_no_head(cluster_file):
    folder = cluster_file.parent / "drafter"
    cut_head(folder, cluster_file.parent / "cut", range(4, 50), 90)
    plan = plan_of(cluster_file)
    cut = plan.drafter.model_copy(update={"checkpoint": cluster_file.parent / "cut"})
    with pytest.raises(BadRequest, match="^--drafter: drafter guesses 46 of .* heads are trained for drafters that"):
        train_head(replace(plan, drafter=cut))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--drafter", "big"), "--drafter: 'big' is not a drafter of target; there is drafter"),
        (("--feed", "both"), "--feed: must be one of text, mixed, got 'both'"),
        (("--minutes", 1, "--chunks", 1), "--minutes: or --chunks: give one of them"),
        *((("--minutes", minutes), "--minutes: must be finite and more than 0") for minutes in (0, -1, "inf", "nan")),
        (("--temperature", -1), "--temperature: must be 0"),
        (("--top-p", 0), "--top-p: must be above 0"),
        (("--target", "big"), "model: 'big' is not served here"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(cluster_file, arguments, sentence):
    data = cluster_file.parent / "code.jsonl"
    result = CliRunner().invoke(app, ["train", "head", str(cluster_file), "--data", str(data), *map(str, arguments)])
    assert isinstance(result.exception, BadRequest) and str(result.exception).startswith(sentence)


def test_the_data_must_be_named_once_each(cluster_file):
    data = str(cluster_file.parent / "code.jsonl")
    for given in ([], ["--data", data, "--data", data]):
        result = CliRunner().invoke(app, ["train", "head", str(cluster_file), *given])
        assert isinstance(result.exception, BadRequest) and result.exception.field == "--data"


def test_laws_have_the_masks_of_sampled_requests_alone() -> None:
    assert warps_of((0.0, 0.7), 50, 0.9) == (Warp(), Warp(0.7, 50, 0.9))


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("drafters:\n  a: {checkpoint: a} # kept\n", "drafters:\n  a: {head: h/x, checkpoint: a} # kept\n"),
        ("drafters:\n  a:\n    checkpoint: a\nb: 1\n", "drafters:\n  a:\n    head: h/x\n    checkpoint: a\nb: 1\n"),
    ],
)
def test_a_heads_line_is_written_into_the_drafters_entry_and_the_rest_is_unchanged(text, edited):
    assert with_head(text, "a", "h/x") == edited
    assert with_head(edited, "a", "h/x") == edited
    with pytest.raises(BadRequest, match="^--write: drafters.a has another head, 'h/x'; remove that line$"):
        with_head(edited, "a", "other")


def test_a_relative_head_starts_at_the_configurations_folder(cluster_file):
    entries = yaml.safe_load(cluster_file.read_text())
    entries["drafters"]["drafter"]["head"] = "heads/mine.safetensors"
    config = Config.of(entries, cluster_file.parent)
    assert config.drafters["drafter"].head == cluster_file.parent / "heads" / "mine.safetensors"
