"""Times a drafter's levels by kernels, and as recorded operations of PyTorch, in one process."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from dendro.calls import DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.shapes import LevelShape
from dendro.state import NoStates
from dendro.text import Limits, Sampling, Tokens
from torch.profiler import ProfilerActivity, profile
from transformers import Mamba2Config, MambaConfig

from cluster.config import DEMO_MODELS
from drafter_service import engine as engines
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from drafter_service.runner import DraftRunner
from tests.gpu.random_weights import write_random
from tests.gpu.step import DEVICE, DRY, require_device, write_result
from tests.support.recordings import RunAgain

TIMES, WARM_UPS = (1, 0) if DRY else (30, 3)
REPLAYS = 20
KERNELS = 12
SHAPES: tuple[tuple[int, ...], ...] = ((2,),) if DRY else ((4,), (4, 4), (1, 1, 1, 1))
SESSIONS = (1,) if DRY else (1, 8)
IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() and not DRY else None


def configurations() -> Iterator[tuple[str, MambaConfig | Mamba2Config]]:
    if DRY:
        return
    yield (
        "mamba2-130m",
        Mamba2Config(
            vocab_size=50288,
            hidden_size=768,
            num_hidden_layers=24,
            num_heads=24,
            head_dim=64,
            state_size=128,
            n_groups=1,
            tie_word_embeddings=True,
        ),
    )
    yield "mamba-130m", MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16)


@contextmanager
def checkpoints() -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        found = {}
        for name, config in configurations():
            found[name] = Path(folder) / name
            found[name].mkdir()
            write_random(found[name], config, 50277)
        yield found | {f"demo {name}": DEMO_MODELS / name for name in ("mamba2", "mamba")}


async def of_sessions(path: Path, by_kernels: bool, sessions: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """The median wall time of a tree by its widths, and the trees."""
    made = partial(DraftRunner, kernels=by_kernels, graphs=RunAgain() if DRY else None)
    setattr(engines, "DraftRunner", made)  # noqa: B010 - which the engine makes
    kind = torch.float32 if DRY else torch.bfloat16  # Triton's interpreter multiplies no bfloat16
    options = DrafterOptions(name="d", device=DEVICE, dtype=kind, max_sessions=16, form="eager")
    engine = DrafterEngine.load(path, options, states=NoStates())
    runner = engine._runner
    assert (runner._on_device is not None) == by_kernels
    await engine.start()
    found: list[dict[str, Any]] = []
    trees = []
    try:
        calls = []
        for number in range(sessions):
            text = Tokens()
            text.extend([3 + (7 * number + at * (number + 3)) % 200 for at in range(30 + 5 * number)])
            opening, limits = new_opening(), Limits(len(text.ids) + 64, ignore_end=True)
            law = Sampling(temperature=1.0 if number % 2 else 0.0, seed=1 + number)
            update = TextUpdate.of(opening, text, 0)
            await engine.open(OpenCall(update, RequestParameters(law, limits, "", ())))
            calls.append(TextUpdate.of(opening, text, len(text)))
        for widths in SHAPES:
            took = []
            for _ in range(TIMES + WARM_UPS):
                drawn = await asyncio.gather(*(engine.draft(DraftCall(each, LevelShape(widths))) for each in calls))
                took.append(max(tree.draft_us for tree in drawn))
            trees += [(tree.tokens.tolist(), tree.parents.tolist()) for tree in drawn]
            took = took[WARM_UPS:]
            us = {"median": median(took), "least": min(took)}
            found.append({"sessions": sessions, "kernels": by_kernels, "widths": widths, **us})
    finally:
        await engine.stop()
    recorded = runner._on_device or runner._recorded
    assert recorded is not None
    for size, (graph, _) in recorded._recordings.made.items():
        replays = {"us": round(replay_us(graph), 1), "kernels": kernels_of(graph) if by_kernels else {}}
        found.append({"sessions": sessions, "kernels": by_kernels, "size": str(size), "graph": replays})
    found.append({"failures": {str(size): count for size, count in recorded._recordings.failures.items()}})
    return found, trees


def replay_us(graph: Any) -> float:
    """The time of one replay of a graph, of several in a row."""
    if DEVICE.type == "cpu":
        return 0.0
    took = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        took.append(1e3 * begin.elapsed_time(end) / REPLAYS)
    return median(took)


def kernels_of(graph: Any) -> dict[str, tuple[int, float]]:
    """Kernels of a replay by name: how often each ran, and the microseconds of all its runs."""
    if DEVICE.type == "cpu":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    ran = sorted(found.key_averages(), key=lambda each: -each.self_device_time_total)
    return {each.key[:60]: (each.count, round(each.self_device_time_total, 1)) for each in ran[:KERNELS]}


def equal(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def main() -> list[dict[str, Any]]:
    found = []
    with checkpoints() as paths:
        for name, path in paths.items():
            for sessions in SESSIONS:
                ours, our_trees = asyncio.run(of_sessions(path, True, sessions))
                theirs, their_trees = asyncio.run(of_sessions(path, False, sessions))
                alike = {"equal_trees": equal(our_trees, their_trees), "trees": len(our_trees)}
                for each in (*ours, *theirs, alike):
                    found.append({"model": name, **each})
                    print(found[-1], flush=True)
                write_result("not finished", levels=found)  # this run may be killed
    return found


require_device()
with torch.inference_mode():
    levels = main()


def us_of(model: str, sessions: int, kernels: bool) -> str:
    wanted = {"model": model, "sessions": sessions, "kernels": kernels, "widths": (4,)}
    return next((str(each["median"]) for each in levels if wanted.items() <= each.items()), "-")


if not DRY:
    us = ", ".join(
        f"{model} {us_of(model, 1, True)} ({us_of(model, 1, False)})" for model in ("mamba2-130m", "mamba-130m")
    )
    write_result(f"a level by kernels (recorded operations), us: {us}", levels=levels)
else:
    write_result(f"{sum('equal_trees' in each for each in levels)} runs", levels=levels)
sys.exit(0)
