"""`dendro bench speed`: contenders are comparable, and the report follows from the measurements."""

from __future__ import annotations

import json
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from dendro.answer import SpeculationStats
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed
from dendro.text import Sampling
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from cluster.api.grpc import serve_router
from cluster.config import DEFAULT_ARMS, DEMO_MODELS
from cluster.demo.prompts import Prompt
from cluster.measure import baselines as library
from cluster.measure import speed_command as command
from cluster.measure.bench import draw
from cluster.measure.costly import WIDTH_STEP, costly_checkpoint, costly_width
from cluster.measure.measurement import (
    ASSISTED,
    AUTO,
    BASELINES,
    BATCH,
    BEST_LOOKUP,
    GENERATE,
    GRIDS,
    LLAMA_CPP,
    LLAMA_CPP_LOOKUP,
    LLAMA_CPP_ROWS,
    LOOKUP,
    OFF,
    RoundTimes,
    TimedAnswer,
)
from cluster.measure.options import parse_temperatures
from cluster.measure.ours import ClusterClient, mean_round
from cluster.measure.report import as_markdown
from cluster.measure.speed import (
    Contenders,
    SpeedPlan,
    SpeedResult,
    measure,
    rows_of,
)
from cluster.measure.speed_command import SPEED as SPEED_BENCH
from cluster.measure.statistics import median_estimate, paired_ratio
from cluster.measure.targets import COSTLY, DEMO, parameter_count, target_config
from tests.support import edge
from tests.support.layouts import FORMS, copy_as
from tests.support.tiny_hybrids import make_checkpoint as make_hybrid

VOCABULARY = 64


def tiny_llama(folder: Path, seed: int, **changes: object) -> Path:
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, eos_token_id=0, **{**sizes, **changes})
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("small"), 1)


@pytest.fixture(scope="module")
def costly(small, tmp_path_factory) -> Path:
    return costly_checkpoint(small, tmp_path_factory.mktemp("cache"), parameters=200_000)


# The costly target


def test_the_costly_target_has_the_function_of_the_small_one_at_a_larger_size(small, costly):
    narrow = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(costly, dtype=torch.float32)
    ids = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, narrow(ids).logits, atol=1e-5, rtol=1e-5)
        greedy = [model.generate(ids, max_new_tokens=16, do_sample=False).tolist() for model in (narrow, wide)]
    assert greedy[0] == greedy[1]
    assert wide.config.intermediate_size % WIDTH_STEP == 0
    assert sum(parameter.numel() for parameter in wide.parameters()) >= 200_000


@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_counted_in_every_form_of_weight_files(small, tmp_path, form):
    assert parameter_count(copy_as(small, tmp_path / "copy", form)) == parameter_count(small) > 0


def test_the_added_hidden_units_have_nonzero_inputs_and_zero_outputs(costly):
    for layer in AutoModelForCausalLM.from_pretrained(costly).model.layers:
        assert layer.mlp.gate_proj.weight[48:].float().std() > 0.1
        assert layer.mlp.up_proj.weight[48:].float().std() > 0.1
        assert (layer.mlp.down_proj.weight[:, 48:] == 0).all()


def test_a_costly_mamba_has_more_groups_of_heads_with_zero_outputs(tmp_path):
    """Each group has its own gated norm, so the old groups are normed as before."""
    small = make_hybrid(tmp_path / "small", "mamba2")
    folder = costly_checkpoint(tmp_path / "small", tmp_path / "cache", parameters=200_000)
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    times = wide.config.num_heads // small.config.num_heads
    assert parameter_count(folder) >= 200_000 and times > 1
    assert wide.config.n_groups == times * small.config.n_groups
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (wide(ids).logits - small(ids).logits).abs().max() < 1e-5
    inner = int(small.config.expand * small.config.hidden_size)
    for layer in wide.backbone.layers:
        assert layer.mixer.out_proj.weight[:, inner:].count_nonzero() == 0
        assert layer.mixer.in_proj.weight.count_nonzero() == layer.mixer.in_proj.weight.numel()


def test_the_costly_target_is_made_once_and_is_always_the_same(small, costly, tmp_path):
    again = costly_checkpoint(small, tmp_path, parameters=200_000)
    assert again.name == costly.name and again != costly
    assert (again / "model.safetensors").read_bytes() == (costly / "model.safetensors").read_bytes()
    assert (again / "tokenizer.json").exists()
    written = (again / "model.safetensors").stat().st_mtime_ns
    assert costly_checkpoint(small, tmp_path, parameters=200_000) == again
    assert (again / "model.safetensors").stat().st_mtime_ns == written
    assert [folder.name for folder in tmp_path.iterdir()] == [again.name]


def test_the_costly_demo_target_has_a_hundred_million_parameters_or_more():
    with torch.device("meta"):
        sizes = dict(hidden_size=384, intermediate_size=1152, num_hidden_layers=4, vocab_size=4096)
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    width = costly_width(model, 100_000_000)
    total = sum(parameter.numel() for parameter in model.parameters()) + (width - 1152) * 3 * 384 * 4
    assert width % 256 == 0 and width % 320 == 0
    assert 100_000_000 <= total < 106_000_000


def test_a_checkpoint_without_gated_mlps_is_refused(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).save_pretrained(tmp_path / "neox")
    with pytest.raises(BadRequest, match="gpt_neox has no gated MLPs"):
        costly_checkpoint(tmp_path / "neox", tmp_path / "cache", parameters=1000)
    with pytest.raises(BadRequest, match=r"holds no config\.json"):
        costly_checkpoint(tmp_path / "nowhere", tmp_path / "cache")


# Statistics


def test_the_interval_of_16_prompts_runs_from_the_5th_to_the_12th():
    estimate = median_estimate([float(value) for value in range(1, 17)])
    assert (estimate.median, estimate.low, estimate.high) == (8.5, 5.0, 12.0)
    assert 0.9 <= estimate.coverage < 0.95


@pytest.mark.parametrize("count, coverage", [(1, 0.0), (2, 0.5), (3, 0.75), (4, 0.875)])
def test_the_interval_of_few_prompts_is_their_range_and_its_coverage_is_reported(count, coverage):
    values = [3.0, 1.0, 2.0, 5.0][:count]
    estimate = median_estimate(values)
    assert (estimate.low, estimate.high, estimate.coverage) == (min(values), max(values), coverage)


@pytest.mark.parametrize("count", [5, 8, 16, 31])
def test_the_interval_contains_the_true_median_as_often_as_its_coverage(count):
    """Of 2,000 skewed samples at least 88 %: with a true coverage of 90 % or more, fewer have probability < 2e-3."""
    rng = random.Random(5)
    held = 0
    for _ in range(2000):
        estimate = median_estimate([rng.lognormvariate(0.0, 1.0) for _ in range(count)])
        held += estimate.low <= 1.0 <= estimate.high
    assert held / 2000 >= 0.88
    assert estimate.coverage >= 0.9


def test_pairing_removes_factors_that_two_rows_share():
    rng = random.Random(7)
    pace = {(prompt, repetition): rng.uniform(1, 50) for prompt in range(16) for repetition in range(2)}
    ratio = paired_ratio({key: 2.0 * value for key, value in pace.items()}, pace)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_prompt_counts_once_however_often_it_is_repeated():
    under = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0, (2, 0): 1.0}
    over = {(0, 0): 2.0, (0, 1): 8.0, (1, 0): 3.0, (2, 0): 5.0}
    assert paired_ratio(over, under).median == pytest.approx(4.0)  # of 4, 3 and 5
    with pytest.raises(ValueError, match="are not pairs"):
        paired_ratio({(0, 0): 1.0}, {(1, 0): 1.0})


# Baselines


SETTINGS = (LOOKUP, ASSISTED, *(setting for grid in GRIDS.values() for setting in grid))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [GENERATE, *SETTINGS])
def test_a_baseline_answers_with_as_many_tokens_as_requested_and_no_end_id_stops_it(
    small, tmp_path_factory, row, temperature
):
    assistant = tiny_llama(tmp_path_factory.mktemp("assistant"), 1, num_hidden_layers=1)
    baselines = library.Baselines(small, assistant, "float32", threads=1)
    prompt = [3, 5, 7, 3, 5, 7, 3]
    answer = baselines.answer(row, prompt, temperature, seed=4, tokens=40)
    assert len(answer.tokens) == 40
    assert 0 < answer.first_seconds < answer.seconds
    assert 1 <= answer.first_tokens <= 21
    assert answer.round_count == 40 if row == GENERATE else 1 <= answer.round_count <= 40
    assert answer.tokens == baselines.answer(row, prompt, temperature, seed=4, tokens=40).tokens


def test_the_librarys_greedy_speculation_equals_its_plain_decoding(small):
    baselines = library.Baselines(small, small, "float32", threads=1)
    answers = {row: baselines.answer(row, [3, 5, 7, 3, 5], 0.0, seed=0, tokens=24) for row in (GENERATE, *SETTINGS)}
    assert len({answer.tokens for answer in answers.values()}) == 1
    # An assistant that is the target itself: as many tokens a round as it guesses, and one.
    rounds = {guesses: answers[f"{ASSISTED} by {guesses}"].round_count for guesses in (2, 4, 6)}
    assert rounds == {2: 8, 4: 5, 6: 4}


def test_sampling_is_from_the_full_distribution_not_from_its_50_likeliest_tokens(small):
    """64 tokens, nearly equally likely at temperature 1000: 300 draws miss 14 of them with a probability below 1e-9."""
    baselines = library.Baselines(small, None, "float32", threads=1)
    assert len({baselines.answer(GENERATE, [3, 5, 7], 1000.0, seed, 1).tokens for seed in range(300)}) > 50


def test_a_batch_of_prompts_of_different_lengths_answers_as_each_of_them_alone(small, monkeypatch):
    baselines = library.Baselines(small, None, "float32", threads=1)
    prompts = ([3, 5, 7, 3, 5], [9, 4], [3, 5, 7])
    alone = [baselines.answer(GENERATE, prompt, 0.0, 0, 12).tokens for prompt in prompts]
    plain, found = baselines.target.generate, []
    monkeypatch.setattr(baselines.target, "generate", lambda *a, **o: found.append(plain(*a, **o)) or found[-1])
    assert baselines.batch(BATCH, prompts, 12)["seconds"] > 0
    assert [tuple(answer) for answer in found[0][:, 5:].tolist()] == alone


async def test_the_baselines_process_answers_as_this_one_does_and_reports_errors(small):
    here = library.Baselines(small, None, "float32", threads=1).answer(GENERATE, [3, 5, 7], 1.0, 4, 12)
    async with library.library_process(small, None, "float32", threads=1) as process:
        there = await process.answer(GENERATE, [3, 5, 7], 1.0, 4, 12)
        with pytest.raises(EngineFailed, match="needs an assistant"):
            await process.answer(ASSISTED, [3, 5, 7], 0.0, 4, 12)
        assert (await process.answer(GENERATE, [3, 5, 7], 1.0, 4, 12)).tokens == here.tokens
    assert there.tokens == here.tokens and there.round_count == here.round_count
    assert process.process.returncode is not None


# The plan, the rows and the aims

SHAPES = ("(1,1,1,1)", "(3,2,1)")
PLAN = SpeedPlan(
    "costly", tuple((prompt,) for prompt in range(6)), 12, (0.0, 1.0), 2, SHAPES, (GENERATE, LOOKUP), 3, COSTLY
)
SPEED = {GENERATE: 10.0, LOOKUP: 12.0, OFF: 10.0, "(1,1,1,1)": 15.0, "(3,2,1)": 18.0, AUTO: 31.0}
WITH_LLAMA = replace(PLAN, baselines=(*PLAN.baselines, *LLAMA_CPP_ROWS))
LLAMA_SPEED = {**SPEED, LLAMA_CPP: 16.0, LLAMA_CPP_LOOKUP: 17.0}


class ScriptedSpeeds:
    """Answers at a known speed: tokens per second of `speeds`, times a factor of the prompt that all rows share."""

    def __init__(self, speeds: dict[str, float], wrong: str = "") -> None:
        self.speeds = speeds
        self.wrong = wrong
        self.requests: list[tuple[str, int, float]] = []

    async def answer(self, row, prompt, temperature, seed, tokens):
        self.requests.append((row, prompt[0], temperature))
        seconds = tokens / (self.speeds[row] * (1 + prompt[0]))
        answer = tuple(range(tokens)) if row != self.wrong else (*range(tokens - 1), 99)
        if row in (GENERATE, LOOKUP, *LLAMA_CPP_ROWS):
            return TimedAnswer(answer, seconds, seconds / 10, 1, tokens)
        shape = row if row != AUTO else "(3,2,1)"
        total = 1000 * seconds * 0.9 / 3  # of the three rounds after the first
        shapes = {"off": 1, shape: 3} if shape != OFF else {"off": 4}
        rounds = RoundTimes(total, 0.2 * total, 0.72 * total, 0.04 * total, shapes)
        return TimedAnswer(answer, seconds, seconds / 10, 2, 4, rounds)


async def measured_with(speeds: dict[str, float] = SPEED, plan: SpeedPlan = PLAN, wrong: str = "") -> SpeedResult:
    scripted = ScriptedSpeeds(speeds, wrong)
    return await measure(plan, Contenders(scripted, dict.fromkeys(plan.baselines, scripted)), 1000.0, lambda: None)


async def measured_with_llama(
    speeds: dict[str, float] = LLAMA_SPEED, plan: SpeedPlan = WITH_LLAMA, wrong: str = ""
) -> SpeedResult:
    scripted = ScriptedSpeeds(speeds, wrong)
    return await measure(
        plan, Contenders(scripted, dict.fromkeys(WITH_LLAMA.baselines, scripted)), 1000.0, lambda: None
    )


async def test_every_row_answers_every_prompt_equally_often_and_in_changing_order():
    scripted = ScriptedSpeeds(SPEED)
    steps = []
    await measure(PLAN, Contenders(scripted, dict.fromkeys(PLAN.baselines, scripted)), 1000.0, lambda: steps.append(1))
    assert len(steps) == len(scripted.requests) == PLAN.answers == 6 * 6 * 2 * 2
    assert all(scripted.requests.count((row, prompt, 1.0)) == 2 for row in PLAN.rows for prompt in range(6))
    rows = len(PLAN.rows)
    orders = {tuple(row for row, _, _ in scripted.requests[at : at + rows]) for at in range(0, len(steps), rows)}
    assert len(orders) > 20
    assert len({order[0] for order in orders}) == rows


async def test_a_pair_shares_its_seed_and_repetitions_differ():
    assert PLAN.answer_seed(2, 0) != PLAN.answer_seed(2, 1)
    seeds = {PLAN.answer_seed(prompt, repetition) for prompt in range(16) for repetition in range(4)}
    assert len(seeds) == 64


async def test_a_prompt_past_the_time_limit_is_left_out_for_all_rows():
    scripted = ScriptedSpeeds(SPEED)
    measured = await measure(PLAN, Contenders(scripted, dict.fromkeys(PLAN.baselines, scripted)), 0.0, lambda: None)
    assert "after 1 of 12 passes" in measured.note
    assert {tuple(answers) for answers in measured.answers.values()} == {((0, 0),)}
    assert {(row["prompts"], row["answers"]) for row in rows_of(measured)} == {(1, 1)}


async def test_rows_have_rates_and_ratios():
    rows = {(row["name"], row["temperature"]): row for row in rows_of(await measured_with())}
    assert len(rows) == len(PLAN.rows) * 2
    auto = rows[AUTO, 1.0]
    assert auto["tokens_per_second"]["median"] == pytest.approx(31 * 3.5)
    assert auto["ratio_over"][OFF] == {"median": 3.1, "low": 3.1, "high": 3.1, "coverage": pytest.approx(0.969)}
    assert auto["ratio_over"].keys() == {GENERATE, LOOKUP, OFF}
    assert OFF not in rows[OFF, 1.0]["ratio_over"]
    assert auto["emitted_per_round"] == 3.0 and rows[GENERATE, 0.0]["emitted_per_round"] == 1.0
    assert auto["decode_tokens_per_second"] == pytest.approx(10 / (12 / (31 * 3.5) * 0.9), rel=1e-3)


async def test_the_librarys_settings_are_chosen_on_other_prompts_and_answer_in_the_rows_name():
    plan = replace(PLAN, baselines=(GENERATE, BEST_LOOKUP), choosing=((7,), (8,)))
    few, some, many = GRIDS[BEST_LOOKUP]
    scripted = ScriptedSpeeds({**SPEED, few: 9.0, some: 14.0, many: 13.0})
    contenders, steps = Contenders(scripted, dict.fromkeys(plan.baselines, scripted)), []
    await contenders.choose(plan, lambda: steps.append(1))
    assert len(steps) == len(scripted.requests) == plan.choosing_answers == 1 + 3 * 2 * 2
    assert {prompt for _, prompt, _ in scripted.requests} == {7, 8}
    assert contenders.best == {(BEST_LOOKUP, 0.0): some, (BEST_LOOKUP, 1.0): some}
    rows = list(rows_of(await measure(plan, contenders, 1000.0, lambda: None)))
    (found,) = [row for row in rows if (row["name"], row["temperature"]) == (BEST_LOOKUP, 0.0)]
    assert found["tokens_per_second"]["median"] == pytest.approx(14 * 3.5)


class LuckyArm(ScriptedSpeeds):
    """(1,1,1,1) answers the even prompts four times as fast."""

    async def answer(self, row, prompt, temperature, seed, tokens):
        found = await super().answer(row, prompt, temperature, seed, tokens)
        return replace(found, seconds=found.seconds / 4) if row == "(1,1,1,1)" and prompt[0] % 2 == 0 else found


async def test_the_policy_is_compared_with_the_arm_that_was_best_on_the_other_half_of_the_prompts():
    scripted = LuckyArm(SPEED)
    measured = await measure(PLAN, Contenders(scripted, dict.fromkeys(PLAN.baselines, scripted)), 1000.0, lambda: None)
    auto = next(row for row in rows_of(measured) if row["name"] == AUTO)
    found = auto["over_best_arm"]
    assert found["arms"] == ["(3,2,1)", "(1,1,1,1)"]  # the even prompts' by the odd ones, then the other way round
    assert (found["low"], found["high"]) == pytest.approx((31 / 18, 31 / 15), abs=1e-4)


async def test_a_round_is_split_into_the_peers_times_and_the_rest():
    rows = {(row["name"], row["temperature"]): row for row in rows_of(await measured_with())}
    split = rows[AUTO, 0.0]["round_ms"]
    shares = {part: ms / split["total"] for part, ms in split.items()}
    assert shares == pytest.approx({"draft": 0.2, "verify": 0.72, "queue": 0.04, "hop": 0.04, "total": 1.0}, abs=1e-4)
    assert rows[AUTO, 0.0]["hop_share"]["median"] == 0.04
    assert rows[AUTO, 0.0]["kept"]["median"] == 0.92
    assert rows[AUTO, 0.0]["arms"] == {"(3,2,1)": 0.75, "off": 0.25}
    assert "round_ms" not in rows[GENERATE, 0.0]


async def test_a_different_token_is_found_and_named_in_the_check_and_in_the_measurement():
    check = replace(PLAN, prompts=PLAN.prompts[:2], repetitions=1)
    identity = (await measured_with(plan=check, wrong="(3,2,1)")).identity
    assert (identity.answers_compared, identity.tokens_compared) == (2 * 2 * 3, 2 * 2 * 3 * 12)
    assert len(identity.differences) == 4
    assert identity.differences[0].startswith("costly, (3,2,1), prompt 1, temperature 0: token 12 differs")
    measured = await measured_with(wrong="(3,2,1)")
    assert len(measured.identity.differences) == 6 * 2 * 2
    assert not (await measured_with()).identity.differences


# llama.cpp beside them


async def test_llama_cpps_lookup_answers_at_temperature_0_alone_and_ratios_over_llama_cpp_are_paired():
    measured = await measured_with_llama()
    rows = {(row["name"], row["temperature"]): row for row in rows_of(measured)}
    answered = {(LLAMA_CPP, 0.0), (LLAMA_CPP, 1.0), (LLAMA_CPP_LOOKUP, 0.0)}
    assert {key for key in rows if key[0] in LLAMA_CPP_ROWS} == answered
    assert WITH_LLAMA.answers == len(PLAN.prompts) * 2 * (8 + 7)
    assert rows[AUTO, 0.0]["ratio_over"][LLAMA_CPP]["median"] == pytest.approx(31 / 16, abs=1e-4)
    assert rows[LLAMA_CPP_LOOKUP, 0.0]["ratio_over"][LLAMA_CPP]["median"] == pytest.approx(17 / 16, abs=1e-4)
    assert LLAMA_CPP not in rows[LLAMA_CPP, 0.0]["ratio_over"]
    assert "equal_to_generate" not in rows[LLAMA_CPP, 1.0], "other draws are other tokens"


async def test_answers_of_llama_cpp_that_rounding_changed_are_counted_and_are_no_differences_of_ours():
    measured = await measured_with_llama(wrong=LLAMA_CPP)
    rows = {(row["name"], row["temperature"]): row for row in rows_of(measured)}
    assert rows[LLAMA_CPP, 0.0]["equal_to_generate"] == "0 of 12"
    assert rows[LLAMA_CPP_LOOKUP, 0.0]["equal_to_generate"] == "12 of 12"
    assert "equal_to_generate" not in rows[OFF, 0.0] and not measured.identity.differences


class FailsAfter(ScriptedSpeeds):
    """llama.cpp, whose process ends before the given number of answers is reached."""

    def __init__(self, answers: int) -> None:
        super().__init__(LLAMA_SPEED)
        self.answers = answers

    async def answer(self, row, prompt, temperature, seed, tokens):
        if len(self.requests) >= self.answers:
            raise EngineFailed("llama.cpp: its process was ended by SIGILL")
        return await super().answer(row, prompt, temperature, seed, tokens)


@pytest.mark.parametrize("answers", [0, 1, 5])
async def test_llama_cpp_that_fails_loses_its_rows_and_no_others(answers):
    scripted = ScriptedSpeeds(SPEED)
    others = dict.fromkeys(PLAN.baselines, scripted) | dict.fromkeys(LLAMA_CPP_ROWS, FailsAfter(answers))
    contenders = Contenders(scripted, others)
    await measure(replace(WITH_LLAMA, prompts=PLAN.prompts[:1], repetitions=1), contenders, 1000.0, lambda: None)
    steps = []
    measured = await measure(WITH_LLAMA, contenders, 1000.0, lambda: steps.append(1))
    assert len(steps) == WITH_LLAMA.answers
    assert contenders.left_out == dict.fromkeys(LLAMA_CPP_ROWS, "llama.cpp: its process was ended by SIGILL")
    assert list(rows_of(measured)) == list(rows_of(await measured_with()))


def aims_of(rows) -> list[dict]:
    return [row for aim in SPEED_BENCH.aims for row in aim.judged({"rows": rows})]


async def test_without_llama_cpp_its_aims_are_not_judged():
    aims = aims_of(list(rows_of(await measured_with())))
    assert [aim["met"] for aim in aims] == [True] * 12 + [None] * 2


@pytest.mark.parametrize(
    "slower, expected", [({AUTO: 19.9}, [False, True]), ({OFF: 9.5}, [True, False]), ({LLAMA_CPP: 30.0}, [False] * 2)]
)
async def test_aims_over_llama_cpp_are_judged_at_the_median(slower, expected):
    rows = list(rows_of(await measured_with_llama({**LLAMA_SPEED, **slower})))
    for row in rows:
        if over := row["ratio_over"].get(LLAMA_CPP):
            row["ratio_over"][LLAMA_CPP] = over | {"low": 0.1, "high": 9.0}
    aims = aims_of(rows)[12:]
    assert [aim["met"] for aim in aims] == expected
    assert all("over llama.cpp, by the median" in aim["aim"] for aim in aims)


def met(aims: list[dict], start: str) -> dict[float, bool | None]:
    return {float(aim["aim"].split("temperature ")[1]): aim["met"] for aim in aims if aim["aim"].startswith(start)}


async def test_aims_that_are_reached_are_met():
    aims = aims_of(list(rows_of(await measured_with_llama())))
    assert [aim["met"] for aim in aims] == [True] * 14
    bars = [[over_off, 1.0, 0.95, best_arm, 0.9, 0.05] for over_off, best_arm in ((3.0, 1.0), (2.2, 0.97))]
    assert [aim["bar"] for aim in aims] == [*bars[0], *bars[1], 1.25, 0.6]
    assert aims[0]["value"] == 3.1 and aims[0]["interval"] == [3.1, 3.1]


@pytest.mark.parametrize(
    "slower, start, expected",
    [
        ({AUTO: 29.0}, "policy over off", {0.0: False, 1.0: True}),
        ({AUTO: 21.5}, "policy over off", {0.0: False, 1.0: False}),
        ({AUTO: 17.8}, "policy over the best fixed arm", {0.0: False, 1.0: True}),
        ({AUTO: 17.0}, "policy over the best fixed arm", {0.0: False, 1.0: False}),
        ({AUTO: 11.9}, "policy over every transformers row", {0.0: False, 1.0: False}),
        ({OFF: 9.4}, "off over generate", {0.0: False, 1.0: False}),
    ],
)
async def test_aims_that_are_not_reached_are_not_met(slower, start, expected):
    aims = aims_of(list(rows_of(await measured_with({**SPEED, **slower}))))
    assert met(aims, start) == expected


async def test_the_policy_is_compared_with_the_strongest_row_by_the_lower_end_of_the_interval():
    rows = list(rows_of(await measured_with()))
    auto = next(row for row in rows if row["name"] == AUTO and row["temperature"] == 0)
    assert auto["closest"] == LOOKUP
    auto["over_library"] = {"median": 1.8, "low": 0.98, "high": 2.0, "coverage": 0.92}
    aim = next(aim for aim in aims_of(rows) if "every transformers row" in aim["aim"])
    assert (aim["value"], aim["met"]) == (0.98, False)
    assert LOOKUP in aim["why"]


async def test_hops_above_a_twentieth_of_a_round_miss_their_bar():
    rows = list(rows_of(await measured_with()))
    for row in rows:
        if row["name"] == AUTO:
            row["hop_share"] = {"median": 0.06, "low": 0.05, "high": 0.07, "coverage": 0.92}
    assert met(aims_of(rows), "hops") == {0.0: False, 1.0: False}


async def test_rows_that_no_bar_is_for_have_no_aims():
    assert not aims_of(list(rows_of(await measured_with_llama(plan=replace(WITH_LLAMA, judged="")))))


async def test_aims_of_few_prompts_report_the_coverage():
    plan = replace(WITH_LLAMA, prompts=PLAN.prompts[:2])
    aims = aims_of(list(rows_of(await measured_with_llama(plan=plan))))
    assert all("covers 50%" in aim["why"] for aim in aims)


# The report


async def a_report() -> dict:
    measured = await measured_with_llama()
    rows = list(rows_of(measured))
    target = {
        "parameters": 100_000_001,
        "prompts": 6,
        "note": None,
        "identity": measured.identity.as_json(),
        "best_settings": [f"{LOOKUP} of 10 at 0"],
        "llama_cpp": {"facts": {"version": "0.3.99", "instructions": ["AVX2", "F16C"]}, "left_out": {}},
    }
    return {"bench": "speed", "targets": {"costly": target}, "rows": rows, "categories": [], "aims": aims_of(rows)}


async def test_markdown_shows_every_row_every_aim_and_the_parts_of_a_round():
    report = await a_report()
    text = as_markdown(report, [], SPEED_BENCH.all_tables(report))
    assert all(f"| {name} |" in text for name in WITH_LLAMA.rows)
    assert all(aim["aim"] in text for aim in report["aims"])
    assert "parts of a round" in text and "3.10 (3.10-3.10)" in text and "off 25%" in text


async def test_a_report_says_what_llama_cpp_ran_with_or_why_it_did_not_run():
    report = await a_report()
    text = as_markdown(report, [], SPEED_BENCH.all_tables(report))
    assert "version 0.3.99, instructions AVX2, F16C" in text and "12 of 12" in text
    assert f"{LOOKUP} of 10 at 0" in text and "| over llama.cpp |" in text
    report["targets"]["costly"]["llama_cpp"] = {"facts": {}, "left_out": dict.fromkeys(LLAMA_CPP_ROWS, "gone")}
    report["rows"] = list(rows_of(await measured_with()))
    text = as_markdown(report, [], SPEED_BENCH.all_tables(report))
    assert "llama.cpp gone, llama.cpp lookup gone" in text and "| over llama.cpp |" not in text


async def test_the_plot_is_written_in_the_format_of_its_suffix(tmp_path):
    draw(SPEED_BENCH.plots, await a_report(), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


# The command


def test_temperatures_are_read_or_refused():
    assert parse_temperatures("0,1") == (0.0, 1.0)
    for wrong in ("", "hot", "-1", "nan", "inf", "1,1"):
        with pytest.raises(BadRequest, match="temperatures"):
            parse_temperatures(wrong)


def test_the_costly_target_differs_from_the_demo_only_by_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("cluster.measure.costly.PARAMETERS", 1)
    tiny_llama(tmp_path / "models" / "target", 1)
    demo, costly = (target_config(tmp_path / "models", name) for name in ("demo", "costly"))
    assert costly.drafters == demo.drafters and costly.speculation == demo.speculation
    changed = costly.targets["costly"].model_dump(exclude={"checkpoint"})
    assert changed == demo.targets["demo"].model_dump(exclude={"checkpoint"})
    assert changed["threads"] == 2
    assert demo.targets["demo"].checkpoint == tmp_path / "models" / "target"
    assert costly.targets["costly"].checkpoint.parent == tmp_path / "cache" / "dendroaspis"
    assert parameter_count(demo.targets["demo"].checkpoint) == 2 * 64 * 32 + 32 + 2 * (3 * 32 * 48 + 3 * 32 * 32 + 64)


def test_a_run_exits_with_status_1_if_speculation_changed_a_token(tmp_path, monkeypatch):
    for folder in ("target", command.ASSISTANT):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "target" / "model.safetensors")
    app = typer.Typer()
    app.command()(SPEED_BENCH.command())

    def run_with(wrong: str) -> tuple[int, dict]:
        @asynccontextmanager
        async def scripted(pair, local):
            speeds = dict.fromkeys((*SPEED, *SETTINGS, *pair.config.speculation.arms), 20.0)
            fake = ScriptedSpeeds(speeds, wrong)
            left_out = dict.fromkeys(LLAMA_CPP_ROWS, "llama.cpp was not started")
            yield Contenders(fake, dict.fromkeys(BASELINES, fake), left_out=left_out)

        monkeypatch.setattr(command, "contenders_for", scripted)
        monkeypatch.setattr(command, "load_tokenizer", lambda models: None)
        prompts = [Prompt("made up", "", (prompt,), ()) for prompt in range(2 + command.CHOOSING_PROMPTS)]
        monkeypatch.setattr(command, "held_out_prompts", lambda count, *rest: prompts[:count])
        found = tmp_path / f"{len(wrong)}.json"
        options = ["--quick", "--target", "demo", "--json", str(found), "--models", str(tmp_path)]
        options += ["--markdown", str(found.with_suffix(".md")), "--plot", str(found.with_suffix(".svg"))]
        result = CliRunner().invoke(app, options)
        assert found.exists(), result.exception
        return result.exit_code, json.loads(found.read_text())

    status, report = run_with("")
    assert status == 0
    assert report["aims"] == [], "they are of the costly target"
    assert set(report["targets"]["demo"]["llama_cpp"]["left_out"].values()) == {"llama.cpp was not started"}
    identity = report["targets"]["demo"]["identity"]
    # Every shape but off, and the policy, against off at 2 temperatures: 1 prompt to check, 2 measured.
    assert identity["answers_compared"] == len(DEFAULT_ARMS) * 2 * (1 + 2) and identity["differences"] == []
    assert {path.suffix for path in tmp_path.glob("0.*")} == {".json", ".md", ".svg"}
    status, report = run_with(AUTO)
    assert status == 1
    assert len(report["targets"]["demo"]["identity"]["differences"]) == 2 * (1 + 2)


# Ours


@pytest.mark.parametrize("row, rounds", [(OFF, 16), ("(1,1,1)", 4), (AUTO, None)])
async def test_ours_answers_over_a_socket_with_the_tokens_of_plain_decoding(row, rounds):
    prompt, sampling = list(b"the snake"), Sampling(1.0, seed=5)
    server = await serve_router(edge.ingress(edge.EdgePeers()))
    try:
        async with AsyncClient(server.address) as client:
            answer = await ClusterClient(client).answer(row, prompt, sampling.temperature, sampling.seed, 16)
    finally:
        await server.stop()
    assert list(answer.tokens) == edge.plain_answer(prompt, sampling, 16)
    assert 0 < answer.first_seconds <= answer.seconds
    assert rounds is None or (answer.round_count, answer.rounds.shapes) == (rounds, {row: rounds})


@pytest.mark.parametrize("policy", ["conservative_ucb", "off", "fixed"])
def test_the_mean_round_is_that_of_the_rounds_after_the_first_in_milliseconds(policy):
    """Where the request fixes a shape, the first round has times of its own."""
    stats = SpeculationStats(
        policy=policy, rounds=5, draft_us=4000, verify_us=16000, ahead_us=4000, queue_us=1000, decode_us=24000
    )
    found, times = mean_round(stats), 4 if policy != "fixed" else 5
    expected = (4.0 / times, 20.0 / times, 1.0 / times)
    assert (found.total_ms, found.draft_ms, found.verify_ms, found.queue_ms) == (6.0, *expected)
    assert found.hop_ms == pytest.approx(6.0 - sum(expected))
    assert mean_round(SpeculationStats(rounds=1, decode_us=0)) is None


@pytest.mark.parametrize("name", [DEMO, COSTLY])
def test_no_row_of_a_bench_can_use_another_rows_answers(name, monkeypatch):
    monkeypatch.setattr("cluster.measure.targets.costly_checkpoint", lambda checkpoint: checkpoint)
    config = target_config(DEMO_MODELS, name)
    (target,) = config.targets.values()
    assert config.speculation.proposers == ("lookup",) and not target.share_prefixes
