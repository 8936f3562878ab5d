"""`dendro bench speed` of one's own target, drafters and prompts: what is measured, whose the answers are, reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import typer
from dendro.errors import BadRequest, EngineFailed
from typer.testing import CliRunner

from cluster.config import Config
from cluster.measure import speed_command as command
from cluster.measure import targets
from cluster.measure.measurement import (
    AUTO,
    BASELINES,
    GENERATE,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    LLAMA_CPP_LOOKUP,
    LLAMA_CPP_ROWS,
    LOOKUP,
    OFF,
    TimedAnswer,
)
from cluster.measure.ours import ClusterClient, TenantRule
from cluster.measure.report import as_markdown
from cluster.measure.speed import OWN, Contenders, SpeedPlan, answer_lengths, categories_of, measure, rows_of
from cluster.measure.speed_command import SPEED, SpeedOptions, file_pairs
from cluster.measure.statistics import lower_bound
from tests.support import tiny_models

SHAPES = ("(1,1)", "(2,1)")
CATEGORIES = ("code", "letters") * 4
PLAN = SpeedPlan(
    "own", tuple((at,) for at in range(8)), 20, (0.0,), 1, SHAPES, (GENERATE, LLAMA_CPP_FILE), 3, OWN, (), CATEGORIES
)
OPTIONS = SpeedOptions(prompts=3, tokens=8, repetitions=1, temperatures=(0.0,), local=True, seed=0)


class ByCategory:
    """Answers at rates by row: those of `code` first, those of `letters` second. A prompt's answer ends early."""

    def __init__(self, rates: Mapping[str, tuple[float, float]], broken: str = "") -> None:
        self.rates = rates
        self.broken = broken

    async def length(self, prompt, temperature, seed, tokens):
        return min(3 + prompt[0], tokens)

    async def answer(self, row, prompt, temperature, seed, tokens):
        if row == self.broken:
            raise EngineFailed(f"{row} fell over")
        seconds = tokens / self.rates[row][prompt[0] % 2]
        return TimedAnswer(tuple(range(tokens)), seconds, seconds / 2, 1, tokens)


RATES = {
    GENERATE: (5.0, 5.0),
    LLAMA_CPP_FILE: (20.0, 20.0),
    OFF: (10.0, 10.0),
    "(1,1)": (15.0, 8.0),
    "(2,1)": (5.0, 11.0),
    AUTO: (14.0, 9.9),
}


async def measured(rates=RATES, plan=PLAN, broken=""):
    script = ByCategory(rates, broken)
    contenders = Contenders(script, dict.fromkeys(plan.baselines, script))
    plan = replace(plan, lengths=await answer_lengths(plan, script, lambda: None))
    return await measure(plan, contenders, 1000.0, lambda: None), contenders


def aims_of(rows):
    return [row for aim in SPEED.aims for row in aim.judged({"rows": rows})]


# What is measured


async def test_every_row_is_timed_on_as_many_tokens_as_the_targets_answer_has_up_to_its_end():
    found, _ = await measured()
    lengths = {row: [len(answer.tokens) for answer in found.answers[row, 0.0].values()] for row in PLAN.rows}
    assert set(map(tuple, lengths.values())) == {tuple(range(3, 11))}
    assert next(rows_of(found))["answer_tokens"] == 6.5


@pytest.mark.parametrize("broken", [GENERATE, LLAMA_CPP_FILE])
async def test_another_program_that_fails_leaves_out_its_row_alone(broken):
    found, contenders = await measured(broken=broken)
    assert contenders.left_out == {broken: f"{broken} fell over"}
    assert found.names(0.0) == [row for row in PLAN.rows if row != broken]
    assert [row["name"] for row in rows_of(found)] == found.names(0.0)


async def test_a_failure_of_ours_ends_the_run():
    with pytest.raises(EngineFailed, match=r"\(2,1\) fell over"):
        await measured(broken="(2,1)")


def a_target(folder: Path, gguf: bool = False) -> Config:
    folder.mkdir()
    tiny_models.write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    if gguf:
        (folder / "model.gguf").write_bytes(b"GGUF")
    target = {"checkpoint": str(folder), "max_length": 20}
    drafters = {"own": {"checkpoint": str(folder), "targets": ["small"]}, "other": {"checkpoint": str(folder)}}
    targets = {"big": target, "small": target}
    arms = ["off", "(1,1)", "other:(2,1)", "proposed(7)"]
    return Config.of({"targets": targets, "drafters": drafters, "speculation": {"arms": arms}}, folder)


def some_prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    lines = [
        {"text": "a" * 13, "category": "long"},
        {"text": "one", "category": "a"},
        {"text": "two", "category": "a"},
        {"text": "three", "category": "b"},
        {"text": "four", "category": "b"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_a_plan_has_the_prompts_that_fit_a_mixture_of_categories_and_every_arm_of_the_target(tmp_path):
    config, file = a_target(tmp_path / "model"), some_prompts(tmp_path)
    (big,) = file_pairs({"big": config}, file, [TenantRule.ANSWERS], OPTIONS)
    assert [len(prompt) for prompt in big.plan.prompts] == [len("one"), len("three"), len("two")]
    assert big.plan.categories == ("a", "b", "a")
    assert big.plan.shapes == ("(1,1)", "(2,1)", "proposed(7)") and list(big.config.drafters) == ["other"]
    assert big.plan.baselines == (GENERATE, LOOKUP, LLAMA_CPP, LLAMA_CPP_LOOKUP)
    assert not big.target.share_prefixes and big.to_end and big.positions == 5 + 8
    small_alone = replace(OPTIONS, target="small", alone=True)
    (small,) = file_pairs({"small": config}, file, [TenantRule.ROWS], small_alone)
    assert small.plan.shapes == ("own:(1,1)", "other:(1,1)", "other:(2,1)", "proposed(7)")
    assert small.plan.baselines == ()
    (few,) = file_pairs({"small": config}, file, [TenantRule.ROWS], replace(small_alone, no_arms=True))
    assert few.plan.rows == (OFF, AUTO)


async def test_without_fixed_arms_the_policy_is_compared_with_off_alone():
    found, _ = await measured(plan=replace(PLAN, shapes=()))
    rows = list(rows_of(found))
    assert [row["name"] for row in rows] == [*PLAN.baselines, OFF, AUTO] and "over_best_arm" not in rows[-1]
    verdicts = {aim["aim"].split(",")[0]: aim["met"] for aim in aims_of(rows)}
    assert verdicts["policy over off"] is not None and verdicts["policy over the best fixed arm"] is None


def test_the_file_of_a_gguf_target_is_measured_as_it_is(tmp_path):
    config = a_target(tmp_path / "model", gguf=True)
    (pair,) = file_pairs({"big": config}, some_prompts(tmp_path), [TenantRule.ANSWERS], OPTIONS)
    assert LLAMA_CPP_FILE in pair.plan.baselines and pair.own_file == tmp_path / "model" / "model.gguf"


def test_each_configuration_and_kind_of_tenant_is_a_group_of_its_own(tmp_path):
    config = a_target(tmp_path / "model")
    found = file_pairs({"weak": config, "good": config}, some_prompts(tmp_path), tuple(TenantRule), OPTIONS)
    names = [f"{label}, tenants: {whose}" for label in ("weak", "good") for whose in ("answers", "rows")]
    assert [pair.plan.target for pair in found] == names


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--alone"], "alone: has an effect with CONFIG or --prompt-file alone"),
        (["--no-arms"], "no-arms: has an effect with CONFIG"),
        (["--tenants", "rows"], "tenants: has an effect with CONFIG"),
        (["--target", "own"], "target: 'own' is not one of demo, costly, both, mamba2"),
        (["CONFIG", "--tenants", "rows,rows"], "tenants: 'rows,rows' is not answers, rows"),
        (["CONFIG", "--target", "third"], "model: 'third' is not served here"),
        (["CONFIG", "--tokens", "5000"], "tokens: 5000; router.max_new_tokens is 4096"),
        (["CONFIG", "--tokens", "19"], "prompt-file: has no prompt of at most 1 tokens"),
        (["CONFIG", "CONFIG"], "config: two files have the same name"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_the_name_of_its_option(tmp_path, words, reason):
    config = a_target(tmp_path / "model")
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json", include={"targets"}, exclude_defaults=True)))
    words = [str(file) if word == "CONFIG" else word for word in words]
    app = typer.Typer()
    app.command()(SPEED.command())
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, BadRequest) and reason in str(result.exception)


# Whose the answers are


class Recorder:
    """A client that records the tenants of its requests."""

    def __init__(self, tenant: str = "", sent: list[str] | None = None) -> None:
        self.tenant, self.sent = tenant, [] if sent is None else sent

    def for_tenant(self, tenant: str) -> Recorder:
        return Recorder(tenant, self.sent)

    async def generate(self, prompt, **options):
        self.sent.append(self.tenant)
        raise EngineFailed("recorded")
        yield


async def tenants_of(tenants: TenantRule | None, *requests: tuple[str, int]) -> list[str]:
    recorder = Recorder()
    client = ClusterClient(recorder, tenants)
    for row, prompt in requests:
        with pytest.raises(EngineFailed, match="recorded"):
            await client.answer(row, (prompt,), 0.0, prompt, 4)
    return recorder.sent


async def test_each_answer_is_of_a_tenant_of_its_own():
    found = await tenants_of(TenantRule.ANSWERS, (OFF, 1), (AUTO, 1), (AUTO, 2), (AUTO, 1))
    assert len(set(found)) == 4 and "" not in found


async def test_a_rows_answers_are_of_one_tenant_which_never_answers_the_same_request_twice():
    one, two, again, off = await tenants_of(TenantRule.ROWS, (AUTO, 1), (AUTO, 2), (AUTO, 1), (OFF, 1))
    assert one == two != again and off not in (one, again)
    assert set(await tenants_of(None, (AUTO, 1), (OFF, 1))) == {""}


# The report


def test_the_lower_bound_is_below_the_true_median_in_nine_samples_of_ten_or_more():
    assert lower_bound([float(at) for at in range(1, 25)]).low == 9.0, "one tail: the interval's end is the 8th"
    assert (lower_bound([2.0, 1.0]).low, lower_bound([2.0, 1.0]).coverage) == (1.0, 0.75)
    assert all(lower_bound([1.0] * values).coverage >= 0.9 for values in range(4, 40))


async def test_ratios_of_a_category_are_of_its_prompts():
    found, _ = await measured()
    rows = {(row["category"], row["name"]): row for row in categories_of(found)}
    assert len(rows) == 2 * len(PLAN.rows)
    assert rows["code", AUTO]["over_off"]["median"] == pytest.approx(1.4)
    assert rows["letters", AUTO]["over_off"]["median"] == pytest.approx(0.99)
    assert rows["code", OFF]["prompts"] == 4 and rows["letters", OFF]["answer_tokens"] == 7.0
    plain, _ = await measured(plan=replace(PLAN, categories=()))
    assert not list(categories_of(plain))


async def test_the_best_arm_is_chosen_on_half_of_the_prompts_of_each_category():
    found, _ = await measured()
    auto = next(row for row in rows_of(found) if row["name"] == AUTO)
    assert auto["over_best_arm"]["arms"] == ["(1,1)", "(1,1)"], "it has 15 and 8, so 11 in the mean, `off` 10"
    assert [PLAN.half(at) for at in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "auto, met",
    [
        ((14.0, 10.7), [True, True, True]),
        ((9.7, 9.7), [False, True, False]),
        ((9.5, 9.9), [False, False, False]),
        ((9.5, 15.0), [True, False, True]),
        ((10.5, 10.5), [True, True, False]),
    ],
)
async def test_the_policy_must_not_be_slower_at_the_median_and_at_its_lower_bound(auto, met):
    rates = RATES | {AUTO: auto, "(1,1)": (11.0, 11.0), "(2,1)": (1.0, 1.0)}
    found, _ = await measured(rates)
    aims = aims_of(list(rows_of(found)))
    assert [aim["bar"] for aim in aims] == [0.98, 0.96, 0.97]
    assert [aim["met"] for aim in aims] == met


def run_with(config: Path, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str = ""):
    numbers = count()

    class Own(ByCategory):
        async def answer(self, row, prompt, temperature, seed, tokens):
            found = await super().answer(row, prompt, temperature, seed, tokens)
            return replace(found, tokens=(next(numbers) + 1000, *found.tokens[1:])) if row == wrong else found

    @asynccontextmanager
    async def scripted(pair, local):
        script = Own({row: (10.0, 10.0) for row in pair.plan.rows})
        left_out = dict.fromkeys((*LLAMA_CPP_ROWS, LLAMA_CPP_FILE), "llama.cpp was not started")
        yield Contenders(script, dict.fromkeys(BASELINES, script), left_out=left_out)

    monkeypatch.setattr(command, "contenders_for", scripted)
    monkeypatch.setattr(targets, "parameter_count", lambda checkpoint: 1)
    app = typer.Typer()
    app.command()(SPEED.command())
    options = [str(config), "--prompt-file", str(file), "--prompts", "4", "--tokens", "8", "--json", "found.json"]
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, [*options, "--plot", "found.svg"])
    return result.exit_code, json.loads((folder / "found.json").read_text())


def test_a_report_names_the_file_the_tenants_and_what_was_left_out_and_fails_for_a_changed_token(tmp_path, monkeypatch):
    config = a_target(tmp_path / "model")
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json", include={"targets"}, exclude_defaults=True)))
    status, report = run_with(file, some_prompts(tmp_path), tmp_path, monkeypatch)
    assert status == 0 and (tmp_path / "found.svg").stat().st_size > 1000
    written = as_markdown(report, SPEED.all_facts(report), SPEED.all_tables(report))
    assert "| 4 | 3 | 5 | prompts.jsonl | answers |" in written
    assert "llama.cpp llama.cpp was not started, llama.cpp lookup llama.cpp was not started" in written
    assert "big target, temperature 0: by category" in written and "policy over the best fixed arm" in written
    status, report = run_with(file, tmp_path / "prompts.jsonl", tmp_path, monkeypatch, wrong=AUTO)
    assert status == 1 and "big, auto, prompt 1" in report["targets"]["big"]["identity"]["differences"][0]
