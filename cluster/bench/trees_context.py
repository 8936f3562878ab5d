"""Rounds at increasing text lengths: N, tokens per second and memory of both sides.

Measured in real time, on the costly target with its last position raised. Beyond the length that it was trained on its
output is meaningless, and so is N; the costs are valid.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dendro.shapes import TreeShape
from tree_kernels.tree_attention import PAGE

from cluster.bench.context import with_positions
from cluster.bench.live import live_rounds, live_shapes
from cluster.bench.traces import SPARE, TracedAnswer
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.in_process import drafter_of, verifier_of
from cluster.measure.measurement import Begin, Step
from cluster.measure.targets import COSTLY, target_config
from drafter_service.engine import DrafterEngine
from verifier_service.engine import VerifierEngine

TOKENS = 32
"""New tokens of an answer."""
PASSAGE_TOKENS = 256
ROOM = 4 * SPARE + TOKENS
TRANSFORMER = "llama"
"""Folder of a Transformer of the drafters' size; the size of its keys and values is reported for comparison."""


class Peak:
    """Peak memory of both sides, sampled after each round. Create it while no text is open."""

    def __init__(self, drafter: DrafterEngine, verifier: VerifierEngine) -> None:
        self._drafter, self._verifier = drafter, verifier
        self.drafter_bytes = self.pages = 0

    def sample(self) -> None:
        self.drafter_bytes = max(self.drafter_bytes, self._drafter.held_bytes)
        self.pages = max(self.pages, self._verifier.stats()["pages_held"])


def key_bytes(checkpoint: Path) -> int:
    """Bytes of a Transformer's keys and values per token, in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    numbers: int = config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    return 2 * 4 * numbers


async def context_rows(
    drafter: DrafterEngine,
    verifier: VerifierEngine,
    ids: Sequence[int],
    contexts: Sequence[int],
    shapes: Sequence[TreeShape],
    page_bytes: int,
    step: Step,
) -> list[dict[str, Any]]:
    """One row for each length and shape; `off` must be the first shape. page_bytes: of a page of the verifier."""
    rows: list[dict[str, Any]] = []
    for context in contexts:
        answer = TracedAnswer("context", str(context), 0.0, 0, tuple(ids[:context]), context, TOKENS)
        off = 0.0
        for shape in shapes:
            peak = Peak(drafter, verifier)
            emitted, seconds = await live_rounds(drafter, verifier, shape, answer, peak.sample)
            rate = sum(emitted) / seconds
            off = off or rate
            rows.append(
                {
                    "context": context,
                    "arm": str(shape),
                    "rounds": len(emitted),
                    "emitted_per_round": round(sum(emitted) / len(emitted), 4),
                    "tokens_per_second": round(rate, 2),
                    "over_off": round(rate / off, 4),
                    "verifier_peak_bytes": peak.pages * page_bytes,
                    "drafter_peak_bytes": peak.drafter_bytes,
                }
            )
            step()
    return rows


async def measure_contexts(models: Path, contexts: Sequence[int], begin: Begin) -> list[dict[str, Any]]:
    """Load drafter and verifier, and measure at every length."""
    config = target_config(models, COSTLY)
    (target,) = config.targets.values()
    (name,) = config.drafters
    prompts = held_out_prompts(-(-contexts[-1] // PASSAGE_TOKENS), PASSAGE_TOKENS, load_tokenizer(models), models)
    ids = [token for prompt in prompts for token in prompt.token_ids]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        longer = with_positions(target.checkpoint, contexts[-1] + 2 * ROOM, folder)
        verifier = await stack.enter_async_context(verifier_of(COSTLY, target, contexts[-1] + ROOM, checkpoint=longer))
        drafter = await stack.enter_async_context(drafter_of(models / name))
        page_bytes = PAGE * verifier.runner.target.token_bytes
        shapes = live_shapes()
        step = begin("longer texts", len(contexts) * len(shapes))
        rows = await context_rows(drafter, verifier, ids, contexts, shapes, page_bytes, step)
    token_bytes = key_bytes(models / TRANSFORMER)
    return [row | {"transformer_drafter_bytes": token_bytes * row["context"]} for row in rows]
