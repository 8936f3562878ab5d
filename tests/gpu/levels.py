"""Times a drafter's levels by kernels, whole trees by kernels, and levels as recorded operations of PyTorch, in one
process."""

from __future__ import annotations

import argparse
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
WAYS = "kernels", "trees", "torch"
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


async def of_sessions(path: Path, way: str, sessions: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """The median wall time of a tree by its widths, and the trees."""
    by_kernels = way != "torch"
    graphs = RunAgain() if DRY else None
    made = partial(DraftRunner, kernels=by_kernels, whole_trees=way == "trees", graphs=graphs)
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
            took, forward_us = list[int](), 0.0
            for number in range(given.times + WARM_UPS):
                if number == WARM_UPS:
                    forward_us = engine.counters.forward_us
                drawn = await asyncio.gather(*(engine.draft(DraftCall(each, LevelShape(widths))) for each in calls))
                took.append(max(tree.draft_us for tree in drawn))
            trees += [(tree.tokens.tolist(), tree.parents.tolist()) for tree in drawn]
            took = took[WARM_UPS:]
            forward_us = (engine.counters.forward_us - forward_us) / given.times
            us = {"median": median(took), "least": min(took), "forwards": round(forward_us)}
            found.append({"sessions": sessions, "way": way, "widths": widths, **us})
    finally:
        await engine.stop()
    for owner in (runner._on_device or runner._recorded, runner._trees):
        for size, (graph, _) in owner.recordings.made.items() if owner is not None else ():
            replays = {"us": round(replay_us(graph), 1), "kernels": kernels_of(graph) if by_kernels else {}}
            found.append({"sessions": sessions, "way": way, "size": str(size), "graph": replays})
        if owner is not None:
            found.append({"failures": {str(size): count for size, count in owner.recordings.failures.items()}})
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
            if given.models and name not in given.models:
                continue
            for sessions in given.sessions:
                trees = {}
                for way in given.ways:
                    times, trees[way] = asyncio.run(of_sessions(path, way, sessions))
                    alike = {
                        "way": way,
                        "equal_trees": equal(trees[given.ways[0]], trees[way]),
                        "trees": len(trees[way]),
                    }
                    for each in (*times, alike):
                        found.append({"model": name, **each})
                        print(found[-1], flush=True)
                write_result("not finished", levels=found)  # this run may be killed
    return found


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--sessions", type=int, nargs="+", default=SESSIONS)
parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
parser.add_argument("--models", nargs="+", help="all by default")
parser.add_argument("--times", type=int, default=TIMES)
parser.add_argument("--dry", action="store_true")
given = parser.parse_args()
require_device()
with torch.inference_mode():
    levels = main()


def us_of(model: str, way: str) -> str:
    wanted = {"model": model, "sessions": 1, "way": way, "widths": (1, 1, 1, 1)}
    return next((str(each["median"]) for each in levels if wanted.items() <= each.items()), "-")


if not DRY:
    us = ", ".join(
        f"{model} {', '.join(us_of(model, way) for way in given.ways)}" for model in ("mamba2-130m", "mamba-130m")
    )
    write_result(f"a tree of four levels, us, by {', '.join(given.ways)}: {us}", levels=levels)
else:
    write_result(f"{sum('equal_trees' in each for each in levels)} runs", levels=levels)
sys.exit(0)
