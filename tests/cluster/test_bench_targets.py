"""`dendro bench targets`: what is asked at once, what is compared, and the report."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from dendro.answer import SpeculationStats
from typer.testing import CliRunner

from cluster import cli
from cluster.arms import OFF_ARM, Arm
from cluster.bench.many_targets import SHAPES, TARGETS, TargetsPlan, Way, measure_targets, rows_of, targets_config
from cluster.config import DEMO_MODELS

PLAN = TargetsPlan({"one": ("small", "llama"), "two": ("small",)}, ((1, 2), (3, 4)), 12, (0.0,), seed=1)


class CountingClient:
    """Answers with tokens of the target; a round emits 1 token with `off`, else 3. Keeps how many run at once."""

    def __init__(self, lossy: str = "") -> None:
        self.lossy = lossy  # the arm whose answers differ
        self.running: list[tuple[str, str]] = []
        self.most: dict[str, int] = {}

    async def generate_text(self, prompt, **options):
        target, arm, tokens = options["model"], options["speculation"], options["max_new_tokens"]
        self.running.append((target, arm))
        await asyncio.sleep(0)
        self.most[arm] = max(self.most.get(arm, 0), len(self.running))
        await asyncio.sleep(0)
        self.running.remove((target, arm))
        ids = [len(target) + sum(prompt) + (arm == self.lossy)] * tokens
        rounds = tokens if arm == "off" else tokens // 3
        rate = 20.0 if arm == "off" else 30.0
        stats = SpeculationStats(
            rounds=rounds, emitted_tokens=tokens, decode_tokens=int(rate), decode_us=1_000_000, late_drafts=0
        )
        return SimpleNamespace(token_ids=tuple(ids), complete=SimpleNamespace(speculation=stats))


async def measured(lossy: str = ""):
    client, steps = CountingClient(lossy), []
    result = await measure_targets(PLAN, client, lambda: None, lambda: steps.append(1))
    return client, result, len(steps)


async def test_each_target_is_asked_alone_and_both_at_once_with_the_shared_drafter():
    client, result, steps = await measured()
    assert steps == PLAN.answers == 2 * (5 + 3 + 2 * 3)
    shared, own = ({f"{drafter}:{shape}": most for shape in SHAPES} for drafter, most in (("small", 2), ("llama", 1)))
    assert client.most == {"off": 2, **shared, **own}
    assert result.differences == [] and result.compared == steps
    assert PLAN.shared == "small"


async def test_rates_are_compared_with_off_at_the_same_load():
    _, result, _ = await measured()
    rows = rows_of(PLAN, result)
    assert len(rows) == 5 + 3 + 6
    for row in rows:
        off = row["shape"] == "off"
        assert row["emitted_per_round"] == (1.0 if off else 3.0)
        assert row["over_off"]["median"] == pytest.approx(1.0 if off else 1.5)
    way = Way("two", Arm.parse("small:(1,1,1,1,1)"), 0.0, True)
    assert len(result.answers[way]) == 2 and Way("two", OFF_ARM, 0.0, True) in result.answers
    assert len(list(TARGETS.all_tables({"rows": rows, "aims": []}))) == 2


async def test_an_answer_that_speculation_changed_is_named():
    _, result, _ = await measured(lossy="llama:(1,1,1,1,1)")
    assert len(result.differences) == 2 and all("one, llama:(1,1,1,1,1)" in line for line in result.differences)


def test_one_drafter_pool_serves_both_demo_targets_and_the_llama_its_own():
    config = targets_config(DEMO_MODELS, costly=False)
    assert {name: config.drafters_of(name) for name in config.targets} == {
        "target": ("mamba2", "llama"),
        "target_mamba2": ("mamba2",),
    }


def test_help_of_bench_targets_names_every_option():
    output = CliRunner().invoke(cli.app, ["bench", "targets", "--help"], env={"COLUMNS": "200"}).stdout
    for option in (
        "quick",
        "json",
        "markdown",
        "prompts",
        "tokens",
        "temperatures",
        "costly",
        "local",
        "seed",
        "models",
    ):
        assert f"--{option} " in output
