"""`dendro bench context`: cost by context length, of a round of the engine and of the library's decode step.

Only the number of tokens before the round changes. Verdicts are not committed, so that the same round can be repeated.
The engine runs in this process: costs between router and engine do not grow with the context.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dendro.errors import BadRequest
from dendro.shapes import TreeShape
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE
from tree_layers.gguf_weights import gguf_settings

from cluster.checkpoints import check_library_has
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.bench import Bench, Plot, ReportTable, models, option
from cluster.measure.in_process import EngineText, tree_of, verifier_of
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.measure.targets import Which, parameter_count, target_config
from cluster.measure.turns import by_turns, estimate, estimates
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
PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ContextOptions:
    target: Which = option("The demo target, or the costly one made from it: demo or costly.", Which.COSTLY)
    contexts: tuple[int, ...] = option("Tokens, separated by commas.", CONTEXTS, (256, 1024, 2048), least=2, count=2)
    repetitions: int = option("Repetitions of each round.", 15, 5, least=1)
    models: Path = models()

    def __post_init__(self) -> None:
        if self.target not in (Which.DEMO, Which.COSTLY):
            raise BadRequest("target", "one at a time: demo or costly")


@dataclass(slots=True)
class ContextRow:
    """The measurements at one context length."""

    context: int
    prefill_s: float = 0.0  # the engine's time for the whole context
    session_bytes: int = 0  # size of the text's pages
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})


def with_positions(checkpoint: Path, positions: int, folder: Path) -> Path:
    """Copy a checkpoint to `folder` with a greater last position. It costs the same as a model trained for such
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
        trees = {way: tree_of(TreeShape.parse(way), text[-1]) for way in (OFF, CHAIN, TREE)}

        async def once(way: str, peer: EngineText = peer, trees: Mapping[str, DraftTree] = trees) -> None:
            if way == LIBRARY:
                library.step(ids[len(peer.text) - 1])
            else:
                await peer.verify(engine, trees[way], len(peer.text))

        started = time.perf_counter()
        await peer.open(engine, SPARE)
        row.prefill_s = time.perf_counter() - started
        library.fill(text)
        row.seconds = await by_turns(WAYS, once, repetitions, step)
        row.session_bytes = engine.stats()["pages_held"] * PAGE * token_bytes
        await peer.close(engine)
        found.append(row)
    return found


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


def fit_of(lengths: Sequence[ContextRow], way: str, token_bytes: int) -> Row:
    """The growth of a way's cost: a line's slope by repetition, and the residuals of the medians from their line.

    token_bytes: keys and values of one token, which every round reads.
    """
    repetitions = len(lengths[0].seconds[way])
    slopes = [line([(each.context, each.seconds[way][k]) for each in lengths])[1] for k in range(repetitions)]
    medians = [(each.context, statistics.median(each.seconds[way])) for each in lengths]
    intercept, slope = line(medians)
    residuals = [abs(intercept + slope * context - seconds) / seconds for context, seconds in medians]
    return {
        "way": way,
        "fixed_ms": round(1e3 * intercept, 3),
        "slope_us_per_token": estimate([1e6 * slope for slope in slopes]),
        "bytes_per_token": token_bytes,
        "read_gb_per_second": round(token_bytes / slope / 1e9, 2) if slope > 0 else None,
        "largest_residual": round(max(residuals), 4),
    }


def rows_of(lengths: Sequence[ContextRow]) -> list[Row]:
    return [
        {
            "context": each.context,
            "ms": estimates(each.seconds),
            "session_mib": round(each.session_bytes / 2**20, 2),
            "prefill_ms_per_token": round(1e3 * each.prefill_s / each.context, 4),
        }
        for each in lengths
    ]


async def measure(options: ContextOptions, begin: Begin) -> dict[str, Any]:
    name, contexts = options.target.value, options.contexts
    config = target_config(options.models, name)
    (target,) = config.targets.values()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = -(-contexts[-1] // PROMPT_TOKENS)
    prompts = held_out_prompts(count, PROMPT_TOKENS, load_tokenizer(options.models), options.models)
    ids = [token for prompt in prompts for token in prompt.token_ids]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = with_positions(target.checkpoint, contexts[-1] + 2 * SPARE, Path(folder))
        library = LibrarySteps(checkpoint, target.dtype, device)
        length = contexts[-1] + SPARE
        async with verifier_of(name, target, length, checkpoint=checkpoint, device=device) as engine:
            step = begin(f"{name} target", len(contexts) * (options.repetitions + 1))
            lengths = await measure_context(engine, library, ids, contexts, options.repetitions, step)
    layouts = engine.runner.target.layouts
    library_bytes = sum(each.kv_heads * (each.key_dim + each.value_dim) for each in layouts) * 2
    ours = engine.runner.target.token_bytes
    return {
        "plan": {
            "parameters": parameter_count(target.checkpoint),
            "read_gb_per_second": round(read_bandwidth(device) / 1e9, 2),
        },
        "rows": rows_of(lengths),
        "fits": [fit_of(lengths, way, library_bytes if way == LIBRARY else ours) for way in WAYS],
    }


CONTEXT = Bench(
    "context",
    "Measure a round by context length: time, memory and the bytes that must be read, without speculation, with a "
    "chain and with a tree, beside transformers' own decoding step. The engine runs in this process.",
    "Under a minute: three lengths, five repetitions.",
    ContextOptions,
    measure,
    facts=(
        "The target has {parameters:,} parameters in bfloat16. Its last position is raised to the longest context: its "
        "output there is meaningless, its costs are valid",
        f"A sum over {READ_BYTES >> 20} MiB reads {{read_gb_per_second:.1f}} GB/s here. Ours keeps keys and values in "
        "float32, the library in the weights' type",
    ),
    tables=(
        ReportTable(
            "A round, median and 90 %",
            "rows",
            "context = context:,; * ms = ms/*:.2f; memory of a text MiB = session_mib:.1f; "
            "prefill ms per token = prefill_ms_per_token:.3f",
        ),
        ReportTable(
            "Fitted lines",
            "fits",
            "way; fixed ms = fixed_ms:.2f; us per token = slope_us_per_token:.3f; bytes per token = bytes_per_token:,; "
            "GB/s = read_gb_per_second:.2f; largest residual = largest_residual:.1%",
        ),
    ),
    plots=(Plot("rows", "tokens before the round = context", "time of a round * (ms) = ms/*"),),
    code=("verifier_service", "kernels/tree_kernels/tree_attention"),
)
bench_context = CONTEXT.command()
