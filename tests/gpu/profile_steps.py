"""Times a verifier's steps and a drafter's levels, and profiles a step's operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dendro.calls import DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.shapes import LevelShape
from dendro.state import NoStates
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from torch.profiler import ProfilerActivity, profile
from tree_kernels.warp import Warp

from cluster.config import DEMO_MODELS
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.gpu.random_target import runner_of
from tests.gpu.step import DEVICE, DRY, require_device, seconds, write_result
from tests.support.lone_rounds import lone_round
from verifier_service.device import DeviceRunner
from verifier_service.rows import StepPlan

TIMES = 1 if DRY else 50
OPERATIONS = 25


def plan_of(runner: DeviceRunner, rows: int, warp: Warp) -> StepPlan:
    """A round with a tree of so many rows, four children to a row, after a text of 17 tokens."""
    ids = list(range(3, 20))
    tree = DraftTree.of([ids[-1], *range(20, 19 + rows)], [-1, *(row // 4 for row in range(rows - 1))])
    return lone_round(runner, ids, tree, warp, Sampling(seed=7))


def profiled(call: Callable[[], object]) -> str:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        call()
    by = "self_cuda_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    return found.key_averages().table(sort_by=by, row_limit=OPERATIONS, max_name_column_width=60)


def verifier_steps() -> list[dict[str, object]]:
    found = []
    runner = runner_of(width=2048, layers=16)
    runner.warm_up()
    for name, warp in (("greedy", Warp()), ("sampled", Warp(1.0)), ("filtered", Warp(1.0, 50, 0.9))):
        for rows in (4,) if DRY else (1, 8, 16, 32, 64):
            plan = plan_of(runner, rows, warp)
            took_s = seconds(lambda plan=plan: runner.run(plan), TIMES)
            found.append({"drawing": name, "rows": rows, "us": round(1e6 * took_s, 1)})
            print(found[-1], flush=True)
    print(profiled(lambda: runner.run(plan_of(runner, 4 if DRY else 64, Warp(1.0)))))
    return found


async def drafting_levels() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    engine = DrafterEngine.load(DEMO_MODELS / "mamba2", DrafterOptions(name="mamba2", device=DEVICE), states=NoStates())
    await engine.start()
    text = Tokens()
    text.extend(list(range(3, 40)))
    opening, limits = new_opening(), Limits(len(text.ids) + 64, ignore_end=True)
    update = TextUpdate.of(opening, text, 0)
    try:
        await engine.open(OpenCall(update, RequestParameters(Sampling(temperature=1.0, seed=1), limits, "", ())))
        again = TextUpdate.of(opening, text, len(text))
        for widths in ((1,), (1, 1, 1, 1), (4,), (4, 4)):
            took = []
            for _ in range(TIMES + 1):
                tree = await engine.draft(DraftCall(again, LevelShape(widths)))
                took.append(tree.draft_us)
            found.append({"widths": widths, "draft_us": min(took[1:]), "levels": len(widths)})
            print(found[-1], flush=True)
    finally:
        await engine.stop()
    return found


require_device()
steps = verifier_steps()
levels = asyncio.run(drafting_levels())
largest, chain = steps[-1], levels[1]
line = f"step of {largest['rows']} rows, {largest['drawing']}: {largest['us']} us"
write_result(f"{line}; a level: {chain['draft_us'] // chain['levels']} us", steps=steps, levels=levels)
