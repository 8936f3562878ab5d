"""Cost by context length: a round of the engine, and the library's decode step.

Only the number of tokens before the round changes. Verdicts are not committed, so that the same round can be repeated.
The engine runs in this process: costs between router and engine do not grow with the context.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dendro.shapes import TreeShape
from dendro.text import Sampling
from tree_kernels.tree_attention import PAGE
from tree_layers.gguf_weights import gguf_settings

from cluster.checkpoints import check_library_has
from cluster.measure.in_process import EngineText, tree_of
from cluster.measure.measurement import Step
from cluster.measure.statistics import median_estimate
from verifier_service.engine import VerifierEngine

OFF, CHAIN, TREE = "off", "(1,1,1,1)", "(3,2,1)"
LIBRARY = "transformers, one token"
WAYS = (OFF, CHAIN, TREE, LIBRARY)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
"""Tokens of the measured texts, by default."""
SPARE = 64
"""Room of a text past its context, in tokens."""
CHUNK = 256
"""Tokens of a prefill chunk of the library; our engine's default."""
READ_BYTES = 512 << 20
"""Read to measure memory bandwidth: far more than caches hold."""


@dataclass(slots=True)
class ContextRow:
    """The measurements at one context length."""

    context: int
    prefill_s: float = 0.0  # of the engine, for the whole context
    session_bytes: int = 0  # of the text's pages
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})


def with_positions(checkpoint: Path, positions: int, folder: Path) -> Path:
    """The same checkpoint with a greater last position, in `folder`. It costs the same as a model trained for such
    texts; its output for them is meaningless."""
    made = folder / checkpoint.name
    made.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            os.symlink(file.resolve(), made / file.name)
    config = json.loads((checkpoint / "config.json").read_text())
    config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
    (made / "config.json").write_text(json.dumps(config))
    return made


class LibrarySteps:
    """transformers' own decoding with its cache and sdpa attention."""

    def __init__(self, checkpoint: Path, dtype: str, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        check_library_has(checkpoint)
        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="sdpa", **gguf_settings(checkpoint)
        )
        self._model = model.eval().to(device)
        self._device = device
        self._cache: Any = None

    def fill(self, ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            for start in range(0, len(ids) - 1, CHUNK):
                chunk = torch.tensor([ids[start : min(start + CHUNK, len(ids) - 1)]], device=self._device)
                self._model(chunk, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def step(self, token: int) -> None:
        with torch.inference_mode():
            given = torch.tensor([[token]], device=self._device)
            self._model(given, past_key_values=self._cache, use_cache=True).logits[0, -1].argmax().item()
        self._cache.crop(-1)


async def measure_context(
    engine: VerifierEngine,
    library: LibrarySteps,
    ids: Sequence[int],
    contexts: Sequence[int],
    repetitions: int,
    step: Step,
) -> list[ContextRow]:
    """All ways at every length, interleaved; the first round of each is warm-up."""
    token_bytes = engine.runner.target.token_bytes
    found = []
    for context in contexts:
        text = list(ids[:context])
        peer, row = EngineText(text, Sampling()), ContextRow(context)
        row.prefill_s = await _timed(peer.open(engine, SPARE))
        library.fill(text)
        for repetition in range(repetitions + 1):
            for way in (OFF, CHAIN, TREE):
                seconds = await _timed(peer.verify(engine, tree_of(TreeShape.parse(way), text[-1]), context))
                if repetition:
                    row.seconds[way].append(seconds)
            started = time.perf_counter()
            library.step(text[-1])
            if repetition:
                row.seconds[LIBRARY].append(time.perf_counter() - started)
            step()
        row.session_bytes = engine.stats()["pages_held"] * PAGE * token_bytes
        await peer.close(engine)
        found.append(row)
    return found


async def _timed(call: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


def read_bandwidth(device: torch.device, times: int = 7) -> float:
    """Bytes per second read by a sum over READ_BYTES; the median of `times` after a warm-up."""
    values = torch.ones(READ_BYTES // 4, device=device)
    rates = []
    for _ in range(times + 1):
        started = time.perf_counter()
        values.sum().item()
        rates.append(READ_BYTES / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    xs, ys = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope


def fit_of(lengths: Sequence[ContextRow], way: str, token_bytes: int) -> dict[str, Any]:
    """The growth of a way's cost: a line's slope by repetition, and the residuals of the medians from their line.

    token_bytes: keys and values of one token, which every round reads.
    """
    repetitions = len(lengths[0].seconds[way])
    slopes = [line([(each.context, each.seconds[way][k]) for each in lengths])[1] for k in range(repetitions)]
    medians = [(each.context, statistics.median(each.seconds[way])) for each in lengths]
    intercept, slope = line(medians)
    residuals = [abs(intercept + slope * context - seconds) / seconds for context, seconds in medians]
    estimate = median_estimate([1e6 * slope for slope in slopes])
    return {
        "way": way,
        "fixed_ms": round(1e3 * intercept, 3),
        "slope_us_per_token": estimate.as_json(),
        "bytes_per_token": token_bytes,
        "read_gb_per_second": round(token_bytes / slope / 1e9, 2) if slope > 0 else None,
        "largest_residual": round(max(residuals), 4),
    }


def rows_of(lengths: Sequence[ContextRow]) -> list[dict[str, Any]]:
    """One object per way and length."""
    return [
        {
            "way": way,
            "context": each.context,
            "round_ms": median_estimate([1e3 * seconds for seconds in each.seconds[way]]).as_json(),
            "session_bytes": each.session_bytes if way != LIBRARY else None,
            "prefill_ms_per_token": round(1e3 * each.prefill_s / each.context, 4) if way != LIBRARY else None,
        }
        for each in lengths
        for way in WAYS
    ]
