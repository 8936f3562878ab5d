"""`dendro predict`: ratios follow from ranks and prices, and agree with what runs on other prompts give."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from dendro.answer import SpeculationStats
from dendro.errors import BadRequest
from typer.testing import CliRunner

from cluster import cli
from cluster.arms import Arm
from cluster.config import Config
from cluster.drafter_figures import read_figures
from cluster.measure.bench import cells_of
from cluster.predict.command import TABLE, facts_of, plan_of, run_predict
from cluster.predict.prediction import (
    ceiling_of,
    emitted_of,
    longest_trees,
    over_off,
    predict_by_ranks,
    predict_by_runs,
    ranks_determine,
    replayed_lengths,
)
from cluster.tune.measuring import RunAnswer
from tests.support.tuned_pair import configured, make_pair

CHAIN, TREE, GROWN = (Arm.parse(f"noisy:{shape}") for shape in ("(1,1)", "(2,1)", "dynamic(2,2,4)"))


def answer(lengths: list[int], round_ms: float) -> RunAnswer:
    """An answer of these rounds, each after the first of so many milliseconds."""
    rounds = len(lengths)
    decode_us = round(1000 * round_ms * (rounds - 1))
    stats = SpeculationStats(
        policy="fixed", rounds=rounds, decode_tokens=sum(lengths[1:]), decode_us=decode_us, verify_us=decode_us
    )
    return RunAnswer(tuple(range(sum(lengths))), tuple(lengths), stats)


OFF = {0: answer([1] * 6, 10), 1: answer([1] * 6, 20)}


def test_only_trees_of_fixed_form_follow_from_ranks():
    assert ranks_determine(CHAIN) and ranks_determine(Arm.parse("noisy:nodes(2,0,1)"))
    for text in ("noisy:dynamic(2,2,4)", "noisy:beam(2,2)", "lookup:proposed(7)", "off"):
        assert not ranks_determine(Arm.parse(text))


def test_the_last_replayed_round_ends_with_the_answer():
    assert replayed_lengths(CHAIN.shape, [0, 0, 9, 0, 0]) == [3, 2]
    assert replayed_lengths(TREE.shape, [1, 0, 9, 1, 9]) == [3, 2]
    assert replayed_lengths(CHAIN.shape, []) == []


def test_a_tree_of_so_many_guesses_is_chosen_on_one_half_of_the_prompts_and_judged_on_the_other():
    always_first, always_second = [0] * 12, [1] * 12
    found = longest_trees([always_first, always_second] * 2, guesses=4)
    assert [str(shape) for shape, _ in found] == ["nodes(1,1,1,1)", "nodes(2,0,2)"]
    assert [emitted for _, emitted in found] == [1.0, 2.0]  # on the other half the first guess is wrong, or right
    (shape, emitted), _ = longest_trees([always_first] * 2, guesses=3)
    assert (str(shape), emitted) == ("nodes(1,1,1)", 4.0)


def test_the_first_round_is_left_out_of_tokens_a_round_as_of_the_measured_rate():
    assert emitted_of([[3, 2, 1], [1], [2, 3]]) == 2
    assert over_off({0: answer([3, 2, 1], 15)}, OFF) == {0: pytest.approx(1.5 * 10 / 15)}


def test_a_ratio_is_the_tokens_of_a_round_over_its_price():
    """The arm's rounds take 1.5 times as long as those of off, on a slow and on a fast prompt. On the first prompt all
    guesses are right, on the second none, on the third, which is not timed, again all."""
    right, wrong = [0] * 9, [9] * 9
    answers = {0: answer([3, 3, 3], 15), 1: answer([1] * 9, 30)}
    found = predict_by_ranks(CHAIN, [right, wrong, right], answers, OFF)
    assert found.price.over_off == pytest.approx(1.5) and found.by_ranks
    assert found.over_off == {0: pytest.approx(2), 1: pytest.approx(1 / 1.5), 2: pytest.approx(2)}
    assert found.emitted == pytest.approx((6 + 8 + 6) / (2 + 8 + 2))


def test_guesses_that_ranks_do_not_count_correct_the_tokens_of_every_prompt():
    """Proposals filled the rows of the timed rounds: these emitted 2 tokens where the ranks alone give 1."""
    found = predict_by_ranks(CHAIN, [[9] * 6, [9] * 6, [0] * 6], {0: answer([1, 2, 2, 1], 15), 1: OFF[1]}, OFF)
    correction = (5 + 5) / (3 + 5) / 1.0
    assert found.over_off[2] == pytest.approx(3 * correction / found.price.over_off)


def test_an_arm_without_ranks_has_the_ratios_of_its_runs():
    found = predict_by_runs(GROWN, {0: answer([2, 2, 2], 10), 1: answer([3, 1], 20)}, OFF)
    assert found.over_off == {0: pytest.approx(2), 1: pytest.approx(1)} and not found.by_ranks
    assert predict_by_runs(GROWN, {0: answer([6], 10)}, OFF) is None


def test_the_ceiling_is_the_best_arm_or_off_for_each_prompt_and_a_drafter_that_is_always_right():
    one = predict_by_runs(CHAIN, {0: answer([1, 2, 2], 10), 1: answer([1] * 3, 40)}, OFF)
    other = predict_by_runs(GROWN, {0: answer([1] * 3, 20), 1: answer([1] * 3, 40)}, OFF)
    ceiling = ceiling_of([one, other])
    assert (ceiling.best_by_prompt.low, ceiling.best_by_prompt.high) == (1.0, 2.0)
    assert ceiling.always_right == pytest.approx(3 / 1.5) and ceiling.always_right_arm == "noisy:(1,1)"
    assert ceiling_of([]) is None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


async def test_a_small_run_predicts_every_arm_and_measures_it_on_other_prompts(pair, tmp_path):
    config = Config.load(configured(pair, tmp_path))
    plan, source = plan_of(config, "tiny", None, prompts=2, timed=1, held_out=1, tokens=16, seed=0)
    steps: dict[str, int] = {}

    def begin(title: str, count: int):
        steps[title] = count

        def step() -> None:
            steps[title] -= 1

        return step

    report = await run_predict(config, plan, source, (0.0, 1.0), True, begin)
    assert len(steps) == 6 and not any(steps.values())
    assert report["differences"] == []
    assert report["prompts"] == {
        "source": "of code, prose and edits", "predicted": 2, "timed": 1, "held_out": 1, "tokens": 128,
    }  # fmt: skip
    json.dumps(report)
    for temperature in (0.0, 1.0):
        rows = {row["name"]: row for row in report["rows"] if row["temperature"] == temperature}
        assert {name: row["from"] for name, row in rows.items()} == {
            "(1,1)": "ranks", "(2,1)": "ranks", "beam(2,2)": "runs",
        }  # fmt: skip
        for row in rows.values():
            assert row["measured"]["median"] > 0 and row["prompts"] == 2
            parts = row["round_ms"]
            assert parts["total"] >= parts["first_row"] > 0
    assert len(report["ceilings"]) == 2 and len(report["aims"]) == 2
    for _, columns, cells in cells_of((TABLE,), report):
        assert cells and all(len(each) == len(columns) for each in cells)
    assert any("the ceiling with the best arm" in fact for fact in facts_of(report))


def test_what_cannot_be_predicted_is_refused_before_anything_is_loaded(pair, tmp_path):
    config = Config.load(configured(pair, tmp_path))
    with pytest.raises(BadRequest, match="tokens: 5000; router.max_new_tokens is"):
        plan_of(config, "tiny", None, 1, 1, 0, 5000, 0)
    with pytest.raises(BadRequest, match="prompts: there are .* ask for fewer"):
        plan_of(config, "tiny", None, 10_000, 1, 0, 16, 0)
    alone = config.model_copy(update={"speculation": config.speculation.model_copy(update={"arms": ("off",)})})
    with pytest.raises(BadRequest, match="speculation.arms: none but off for the target tiny"):
        plan_of(alone, "tiny", None, 1, 1, 0, 16, 0)


def test_the_command_prints_and_writes_its_report(pair, tmp_path):
    words = ["predict", str(configured(pair, tmp_path)), "--local", "--quick", "--temperatures", "0", "--prompts", "2"]
    sizes = ["--timed", "1", "--tokens", "8", "--json", str(tmp_path / "p.json"), "--markdown", str(tmp_path / "p.md")]
    done = CliRunner().invoke(cli.app, [*words, *sizes, "--guesses", "3"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert done.output.count("of trees of fixed form and at most 3 guesses of noisy") == 2
    assert (tmp_path / "p.md").read_text().startswith("# dendro predict\n")
    assert json.loads((tmp_path / "p.json").read_text())["bench"] == "predict"


def test_figures_of_the_given_prompts_replace_those_of_the_drafters_training(pair, tmp_path):
    drafter = Path(shutil.copytree(pair[1], tmp_path / "drafter"))
    config = configured((pair[0], drafter), tmp_path)
    words = ["predict", str(config), "--local", "--quick", "--temperatures", "0,1", "--prompts", "2", "--timed", "1"]
    done = CliRunner().invoke(cli.app, [*words, "--tokens", "8", "--figures"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    figures = read_figures(drafter)
    assert figures is not None and figures.target == "tiny"
    assert [each.temperature for each in figures.by_temperature] == [0.0, 1.0]
    assert all(2 <= sum(each.ranks) <= 2 * 8 for each in figures.by_temperature)  # answers may end early


@pytest.mark.parametrize(("arms", "fault"), [("(1,1)", "acceptance.json cannot be written"), ("proposed(3)", "no arm")])
def test_figures_that_cannot_be_written_are_refused_before_anything_is_measured(pair, tmp_path, arms, fault):
    drafter = Path(shutil.copytree(pair[1], tmp_path / "drafter"))
    (drafter / "acceptance.json").unlink(missing_ok=True)
    (drafter / "acceptance.json").mkdir()
    config = Config.load(configured((pair[0], drafter), tmp_path))
    changed = config.speculation.model_copy(update={"arms": ("off", arms), "proposers": ("lookup",)})
    config = config.model_copy(update={"speculation": changed})
    plan, source = plan_of(config, "tiny", None, 1, 1, 0, 8, 0)
    with pytest.raises(BadRequest, match=f"figures: .*{fault}"):
        asyncio.run(run_predict(config, plan, source, (0.0,), True, no_step, figures=True))


def no_step(title: str, count: int):
    pytest.fail(f"{title} began")
