"""The demo pair's text, prompts, measurements and checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from dendro.errors import BadRequest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Mamba2ForCausalLM, PreTrainedModel

from cluster.config import DEMO_MODELS as MODELS
from cluster.demo.architectures import (
    DRAFTER_LIMIT,
    DRAFTERS,
    TARGET_LIMIT,
    TARGETS,
    DrafterName,
    TargetName,
    drafter_config,
    target_config,
)
from cluster.demo.corpus import END_OF_TEXT, END_OF_TEXT_ID, HELD_OUT, VOCABULARY, source_files, train_tokenizer
from cluster.demo.growth import grow
from cluster.demo.kinds import BLOCK_TOKENS, EDITS, KINDS, PROSE, kind_prompts
from cluster.demo.measure import answers_to, repeated_4grams
from cluster.demo.passages import candidate_passages
from cluster.demo.prompts import held_out_prompts, load_passages, load_tokenizer
from cluster.demo.train import TrainingPlan, train_demo
from cluster.training.acceptance import emitted_per_round, noise_rows, perturbed
from cluster.training.checkpoints import export, load_fp32
from cluster.training.stages import StageFolder, only_run_in
from drafter_service.training.rows import TokenRows
from drafter_service.training.sizes import new_model
from drafter_service.training.students import StudentForward

CPU = torch.device("cpu")
NAMES = (*TARGETS, *DRAFTERS)
LIMITS = {**TARGET_LIMIT, **dict.fromkeys(DRAFTERS, DRAFTER_LIMIT)}


def untrained(name: TargetName | DrafterName, seed: int) -> PreTrainedModel:
    config = target_config(name) if name in TARGET_LIMIT else drafter_config(name)
    return new_model(config, seed, CPU).eval()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of a few files, some of which are not for the corpus."""
    files = {
        "heapq.py": b"def heappush(heap, item):\n    pass\n",
        "abc.py": b"class ABC:\r\n    pass\r\n",
        "test/test_abc.py": b"import unittest\n",
        "site-packages/torch.py": b"import everything\n",
        "lib2to3/tests/data/bad.py": b"print 'py2'\n",
        "latin.py": b"# -*- coding: ascii -*-\n# \xe4\n",
        "empty.py": b"",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_corpus_is_the_readable_library_without_packages(library: Path) -> None:
    found = {source.name: source.text for source in source_files(library)}
    assert sorted(found) == ["abc.py", "heapq.py", "test/test_abc.py"]
    assert found["abc.py"] == "class ABC:\n    pass\n"


def test_training_excludes_every_held_out_module_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.demo import corpus

    names = {source.name for source in source_files()}
    assert set(HELD_OUT) <= names
    assert {source.name for source in corpus.training_files()} == names - set(HELD_OUT)


def test_tokenizer_round_trips_any_text_and_numbers_end_of_text_first(library: Path) -> None:
    tokenizer = train_tokenizer(list(source_files(library)))
    text = 'def f():\n\treturn "äöü 😀 \\x00"  # \x00\r\n'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID


def test_rows_depend_on_seed_and_step_alone_and_labels_are_one_ahead() -> None:
    tokens = torch.arange(1000).numpy().astype("uint16")
    rows, again = (TokenRows(tokens, rows=4, length=16, seed=3) for _ in range(2))
    for step in (40, 0, 17):  # of epochs 2, 0 and 1
        inputs, labels = rows.batch(step)
        assert torch.equal(labels, inputs + 1)
        assert torch.equal(again.batch(step)[0], inputs)
    first_epoch = torch.cat([rows.batch(step)[0][:, 0] for step in range(rows.windows // 4)])
    assert len(first_epoch.unique()) == len(first_epoch)


def test_prompts_are_deterministic_have_the_requested_length_and_spread_over_modules() -> None:
    for length in (16, 128, 256):
        prompts = held_out_prompts(48, length)
        assert prompts == held_out_prompts(48, length)
        assert {len(prompt.token_ids) for prompt in prompts} == {length}
        assert min(len(prompt.continuation_ids) for prompt in prompts) >= 128
        assert len({prompt.name for prompt in prompts}) == 48
        assert len({prompt.name.split(":")[0] for prompt in prompts[:32]}) >= 16
    tokenizer = load_tokenizer()
    assert tokenizer.encode(prompts[0].text).ids == list(prompts[0].token_ids)


def test_prompts_that_are_too_long_or_too_many_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256"):
        held_out_prompts(1, 257)
    with pytest.raises(ValueError, match="not 1000"):
        held_out_prompts(1000, 128)


def test_shipped_passages_come_from_held_out_modules_and_start_at_definitions() -> None:
    for passage in load_passages():
        assert passage.name.split(":")[0] in HELD_OUT
        assert passage.text.lstrip().startswith(("def ", "class "))


def test_passages_can_be_extracted_from_the_running_python() -> None:
    modules = {passage.name.split(":")[0] for passage in candidate_passages()}
    assert modules == set(HELD_OUT)


def test_repeated_4grams_counts_those_that_occurred_before() -> None:
    assert repeated_4grams([1, 2, 3, 4, 5, 6, 7]) == 0
    assert repeated_4grams([1] * 7) == 0.75  # three of four
    assert repeated_4grams([1, 2]) == 0


def test_emitted_per_round_replays_ranks_through_a_shape() -> None:
    # Shape (2,1): round one accepts ranks 1 and 0 and emits the token of rank 5; round two accepts nothing at rank 2.
    assert emitted_per_round([[1, 0, 5, 2, 9, 9]], (2, 1)) == pytest.approx((3 + 1) / 2)
    assert emitted_per_round([[0] * 11], (1, 1, 1, 1)) == 5


@pytest.mark.parametrize("name", NAMES)
def test_shipped_checkpoints_load_and_are_small_enough(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / name)
    tokenizer = Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    assert model.num_parameters() <= LIMITS[name]
    assert model.config.vocab_size == tokenizer.get_vocab_size() == VOCABULARY
    assert model.config.eos_token_id == model.generation_config.eos_token_id == END_OF_TEXT_ID
    assert (MODELS / name / "tokenizer.json").read_bytes() == (MODELS / "target" / "tokenizer.json").read_bytes()
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_shipped_checkpoints_stay_under_their_share_of_the_repository() -> None:
    total = sum(path.stat().st_size for name in NAMES for path in (MODELS / name).iterdir())
    assert total <= 36_000_000


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_has_the_probabilities_of_the_trained_one(
    name: TargetName | DrafterName, tmp_path: Path
) -> None:
    model = untrained(name, seed=1)
    export(model, tmp_path / name, [MODELS / "target" / "tokenizer.json"])
    token_ids = torch.randint(VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = (each(token_ids).logits.log_softmax(-1) for each in (model, load_fp32(tmp_path / name, CPU)))
    assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
    assert (before.exp() * (before - after)).sum(-1).mean() < 1e-3  # nats; bf16 has three digits


@pytest.mark.parametrize("name", NAMES)
def test_models_keep_to_their_limits(name: TargetName | DrafterName) -> None:
    assert untrained(name, seed=0).num_parameters() <= LIMITS[name]


def test_a_grown_model_begins_as_the_drafter_it_grew_from_and_all_of_it_learns() -> None:
    small, large = load_fp32(MODELS / "mamba2", CPU), untrained("target_mamba2", seed=0)
    assert isinstance(small, Mamba2ForCausalLM) and isinstance(large, Mamba2ForCausalLM)
    grow(small, large)
    token_ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    expected, got = (each.lm_head(StudentForward(each)(token_ids)) for each in (small, large))
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)  # the norms' epsilon weighs more in a wider model
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(got[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten()).backward()
    optimizer.step()  # a new layer's zero output weights get a gradient first, its other weights after a step
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(
        large.lm_head(StudentForward(large)(token_ids))[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten()
    ).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in large.parameters())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_written_with_a_cache_are_those_of_the_whole_text(name: TargetName, temperature: float) -> None:
    model = load_fp32(MODELS / name, CPU)
    answers = answers_to(model, held_out_prompts(2, 128), temperature, length=12)
    with torch.inference_mode():
        logits = StudentForward(model)(answers.texts[:, :-1]) @ model.lm_head.weight.T
    noise = torch.stack([noise_rows(temperature, 2, position, VOCABULARY) for position in range(12)], 1)
    guesses = perturbed(logits[:, 127:], temperature, noise).argmax(-1)
    assert torch.equal(answers.texts[:, 128:], guesses)


def test_a_finished_stage_is_skipped_and_another_seed_is_refused(tmp_path: Path) -> None:
    plan = TrainingPlan(minutes=1, seed=7, out=tmp_path, device=CPU)
    StageFolder(plan.work, {"seed": 7}, resume=True).run("corpus", dict)
    threads = torch.get_num_threads()
    train_demo(tmp_path, minutes=1, seed=7, threads=threads, stop_after="corpus")
    assert not (plan.work / "tokens.npy").exists()
    with pytest.raises(BadRequest, match="^--seed: .*begun with seed 7, not 8"):
        train_demo(tmp_path, minutes=1, seed=8, threads=threads, stop_after="corpus")
    with only_run_in(plan.work), pytest.raises(BadRequest, match=f"^--out: {plan.work} is in use: another training"):
        train_demo(tmp_path, minutes=1, seed=7, threads=threads, stop_after="corpus")


def test_one_model_is_trained_alone_for_all_minutes_with_the_vocabulary_of_the_folder(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.demo import train

    monkeypatch.setattr(train, "training_files", lambda: list(source_files(library)))
    ran = []
    monkeypatch.setattr(train, "_target", lambda plan, name: ran.append((name, plan.budget(name).seconds)) or {})
    (tmp_path / "out" / "target").mkdir(parents=True)
    shutil.copy(MODELS / "target" / "tokenizer.json", tmp_path / "out" / "target")
    train_demo(tmp_path / "out", minutes=2, threads=torch.get_num_threads(), only="target_mamba2")
    assert ran == [("target_mamba2", 120)]
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / ".train" / "tokenizer.json"))
    assert tokenizer.to_str() == load_tokenizer().to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_each_kind_are_held_out_of_the_right_length_and_always_the_same(kind):
    prompts = kind_prompts(kind, 8, 128)
    assert prompts == kind_prompts(kind, 8, 128)
    assert [len(prompt.token_ids) for prompt in prompts] == [128] * 8
    assert len({prompt.token_ids for prompt in prompts}) == 8
    modules = {prompt.name.rpartition(":")[0] for prompt in prompts}
    assert modules <= set(HELD_OUT)


def test_prose_ends_inside_a_docstring_and_edits_repeat_a_block_under_other_names():
    texts = {passage.name: passage.text for passage in load_passages()}
    for prompt in kind_prompts(PROSE, 8, 128):
        prose = prompt.text.removeprefix('"""')
        assert prose != prompt.text and '"""' not in prose
        assert prose.strip() in texts[prompt.name], "unchanged from the passage"
    tokenizer = load_tokenizer()
    for prompt in kind_prompts(EDITS, 8, 128):
        name = texts[prompt.name].split("(")[0].split(":")[0].split()[1]
        copies = [f"{name}_{letter}" for letter in "abc"]
        assert all(copy in prompt.text for copy in copies)
        blocks = prompt.text.replace("_a", "").replace("_b", "").replace("_c", "")
        first = texts[prompt.name].splitlines()[0]
        assert blocks.count(first) >= 3, "nothing but the name differs"
        assert len(tokenizer.encode(prompt.text.split(copies[1])[0]).ids) <= BLOCK_TOKENS + 10


def test_more_prompts_than_there_are_and_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="prompts of prose"):
        kind_prompts(PROSE, 50, 128)
    with pytest.raises(ValueError, match="is not one of code, prose, edits"):
        kind_prompts("poetry", 1, 128)
