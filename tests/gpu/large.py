"""Targets of published sizes with random weights: the exactness they announce, thousands of tokens with trees against
those without, and the time of rounds. The models are served at once until their answers are compared, then timed one
after another."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from dendro.text import Sampling
from dendro.tree import DraftTree
from torch.profiler import ProfilerActivity, profile
from transformers import (
    BambaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
)

from tests.gpu.random_weights import write_random
from tests.gpu.step import DEVICE, DRY, require_device, write_result
from tests.support.routers import RoundByRound, guessing
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

TEXTS = 2 if DRY else 16
"""Answers that are compared, at each temperature."""
TIMES = 2 if DRY else 15
TREE_ROWS = 32
MANY = 2 if DRY else 8
"""Texts of a step with several."""
IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() and not DRY else None
"""Where checkpoints are written, if there is such a folder."""
KERNELS = 14
"""Kernels of a round that are reported."""
MOST = 8 * TIMES + 48
"""Tokens of an answer whose rounds are timed."""


def _llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=16384,
        rope_theta=500000.0,
    )


def _neox() -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=50432,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=16384,
    )


def _mamba2() -> Mamba2Config:
    return Mamba2Config(
        vocab_size=50288,
        hidden_size=2560,
        num_hidden_layers=64,
        num_heads=80,
        head_dim=64,
        state_size=128,
        n_groups=1,
        tie_word_embeddings=True,
    )


def _bamba() -> BambaConfig:
    return BambaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        attn_layer_indices=[5, 11],
        num_attention_heads=16,
        num_key_value_heads=4,
        mamba_n_heads=64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
    )


@dataclass(frozen=True, slots=True)
class Model:
    """A published size, and what is asked of it."""

    config: Callable[[], PreTrainedConfig]
    words: int  # the tokenizer's tokens
    tokens: int = 320  # of each answer that is compared
    alone: tuple[int, ...] = (1024, 4096)  # lengths of one text whose rounds are timed
    several: tuple[int, ...] = (1024, 4096)  # lengths of several

    @property
    def longest(self) -> int:
        """Tokens of the longest text, prompt and answer."""
        return max(*self.alone, *self.several, compared_prompt(TEXTS) + self.tokens) + MOST

    @property
    def pool_tokens(self) -> int:
        """Tokens of all texts that are open at once, and some for pages that are not full."""
        return max(MANY * (max(self.several) + MOST), TEXTS * (compared_prompt(TEXTS) + self.tokens)) + 2000


def compared_prompt(number: int) -> int:
    """Tokens of the prompt of an answer that is compared; each has another length."""
    return 20 + 9 * number


MODELS: Mapping[str, Model] = {
    "llama-8b": Model(_llama, 128256, alone=(1024, 4096, 8192)),
    "neox-6.9b": Model(_neox, 50254, several=(1024,)),
    "mamba2-2.7b": Model(_mamba2, 50277, tokens=96, alone=(1024,), several=(1024,)),
    "bamba-1b": Model(_bamba, 128256, tokens=96, alone=(1024,), several=(1024,)),
}
if DRY:
    MODELS = {name: Model(model.config, 120, 6, (40,), (40,)) for name, model in MODELS.items()}


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same family with small sizes, for a dry run."""
    small = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_heads": 4, "head_dim": 16, "state_size": 8}
    small |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "chunk_size": 16, "mamba_chunk_size": 16}
    settings = config.to_dict() | {key: value for key, value in small.items() if key in config.to_dict()}
    if config.model_type in ("llama", "gpt_neox"):
        settings.pop("head_dim", None)
    if "attn_layer_indices" in settings:
        settings["attn_layer_indices"] = [1]
    for each in ("layer_types", "layers_block_type"):
        settings.pop(each, None)
    return type(config)(**settings)


def write_checkpoint(folder: Path, name: str) -> int:
    """Returns the number of parameters."""
    model = MODELS[name]
    config = shrunk(model.config()) if DRY else model.config()
    return write_random(folder, config, model.words)


def prompt_of(length: int, vocabulary: int, seed: int) -> list[int]:
    """Random tokens."""
    found: list[int] = np.random.default_rng(seed).integers(3, vocabulary, length).tolist()
    return found


async def identity(engine: VerifierEngine, vocabulary: int, tokens: int) -> list[dict[str, Any]]:
    """Answers with trees against those without, several texts at once."""
    found = []
    for temperature in (0.0, 1.0):
        laws = [Sampling(temperature=temperature, seed=number) for number in range(TEXTS)]
        prompts = [prompt_of(compared_prompt(number), vocabulary, number) for number in range(TEXTS)]
        asked = list(zip(prompts, laws, strict=True))
        began = time.perf_counter()
        plain = await asyncio.gather(*(RoundByRound(engine, *each, tokens).finish() for each in asked))
        between = time.perf_counter()
        rng, routers = np.random.default_rng(0), [RoundByRound(engine, *each, tokens) for each in asked]
        trees = [guessing(rng, truth, vocabulary) for truth in plain]
        treed = await asyncio.gather(*map(RoundByRound.finish, routers, trees))
        same = sum(ours == truth for ours, truth in zip(treed, plain, strict=True))
        first = [
            next((at for at, (a, b) in enumerate(zip(ours, truth, strict=True)) if a != b), None)
            for ours, truth in zip(treed, plain, strict=True)
        ]
        found.append(
            {
                "temperature": temperature,
                "answers": TEXTS,
                "tokens": TEXTS * tokens,
                "equal": same,
                "first_differences": [at for at in first if at is not None],
                "plain_s": round(between - began, 2),
                "trees_s": round(time.perf_counter() - between, 2),
            }
        )
        print(found[-1], flush=True)
    return found


def tree_of(router: RoundByRound, vocabulary: int) -> DraftTree:
    """TREE_ROWS rows, four children to a row, of tokens that are hardly ever right."""
    generator = np.random.default_rng(len(router.text))
    guesses = (3 + generator.choice(vocabulary - 3, TREE_ROWS - 1, replace=False)).tolist()
    return DraftTree.of([router.text.ids[-1], *guesses], [-1, *(row // 4 for row in range(TREE_ROWS - 1))])


async def rounds(engine: VerifierEngine, vocabulary: int, model: Model) -> list[dict[str, Any]]:
    """The median wall time of a round by texts, length and rows, and of an opening."""
    found = []
    for texts, length in [*((1, length) for length in model.alone), *((MANY, length) for length in model.several)]:
        laws = [Sampling(temperature=1.0, seed=number) for number in range(texts)]
        routers = [
            RoundByRound(engine, prompt_of(length, vocabulary, number), law, MOST) for number, law in enumerate(laws)
        ]
        began = time.perf_counter()
        for each in routers:
            await each.open()
        opened_s = time.perf_counter() - began
        for rows in (1, TREE_ROWS):
            took = [await _round_ms(routers, vocabulary, rows) for _ in range(TIMES)]
            found.append(
                {
                    "texts": texts,
                    "length": length,
                    "rows": rows,
                    "ms": round(median(took), 3),
                    "least_ms": round(min(took), 3),
                    "opened_s": round(opened_s, 2),
                    "kernels_us": await _kernels_us(routers, vocabulary, rows),
                }
            )
            print(found[-1], flush=True)
        for each in routers:
            await each.close()
    return found


async def _round_ms(routers: Sequence[RoundByRound], vocabulary: int, rows: int) -> float:
    trees = [None if rows == 1 else tree_of(each, vocabulary) for each in routers]
    began = time.perf_counter()
    await asyncio.gather(*(each.round(tree) for each, tree in zip(routers, trees, strict=True)))
    return 1e3 * (time.perf_counter() - began)


async def _kernels_us(routers: Sequence[RoundByRound], vocabulary: int, rows: int) -> dict[str, tuple[int, float]]:
    """Of one round, by name: how often a kernel ran and the microseconds of all its runs; those with the most time, and
    all together."""
    if DEVICE.type == "cpu":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        await _round_ms(routers, vocabulary, rows)
    kernels = [(each.key, each.count, each.self_device_time_total) for each in found.key_averages()]
    kernels.sort(key=lambda each: -each[2])
    whole = sum(count for _, count, _ in kernels), round(sum(took for *_, took in kernels), 1)
    return {"all": whole} | {name[:70]: (count, round(took, 1)) for name, count, took in kernels[:KERNELS]}


async def of_model(name: str, out: Path) -> None:
    """One model, in this process. Its rounds are timed after a line has come on the standard input."""
    found: dict[str, Any] = {"model": name}

    def note(**more: Any) -> None:
        found.update(more)
        out.write_text(json.dumps(found))

    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        began = time.perf_counter()
        parameters = write_checkpoint(Path(folder), name)
        made = time.perf_counter()
        engine = VerifierEngine.load(
            Path(folder),
            VerifierOptions(
                name=name,
                dtype=torch.bfloat16,
                device=DEVICE,
                max_length=MODELS[name].longest,
                max_sessions=TEXTS,
                max_rows=TREE_ROWS,
                pool_tokens=MODELS[name].pool_tokens,
            ),
        )
    vocabulary = engine.runner.target.vocabulary
    note(
        parameters=parameters,
        made_s=round(made - began, 1),
        loaded_s=round(time.perf_counter() - made, 1),
        exactness=(await engine.hello()).exactness,
        differ=list(engine.dependent),
        linear=str(engine.runner.target.linear),
        attention=engine.runner.target.attention,
        token_bytes=engine.runner.pages.token_bytes,
    )
    print(found, flush=True)
    await engine.start()
    try:
        note(identity=await identity(engine, vocabulary, MODELS[name].tokens))
        print("ready", flush=True)
        sys.stdin.readline()
        note(rounds=await rounds(engine, vocabulary, MODELS[name]))
    finally:
        await engine.stop()


def main(chosen: list[str]) -> None:
    require_device()
    with tempfile.TemporaryDirectory() as folder:
        outs = {name: Path(folder) / f"{name}.json" for name in chosen}
        running = {}
        for name, out in outs.items():
            command = [sys.executable, __file__, "--model", name, "--out", str(out), *(["--dry"] if DRY else [])]
            running[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, process in running.items():
            for line in process.stdout or ():
                print(name, line, end="", flush=True)
                if line == "ready\n":
                    break
        for name, process in running.items():
            rest, _ = process.communicate("go\n")
            print(rest, end="", flush=True)
            print(f"{name}: exit status {process.returncode}", flush=True)
        found = [json.loads(out.read_text()) for out in outs.values() if out.is_file()]
    for each in found:
        print(json.dumps(each))

    def counted(models: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Answers that are equal, and all."""
        compared = [of for each in models for of in each.get("identity", ())]
        return sum(of["equal"] for of in compared), sum(of["answers"] for of in compared)

    equal, answers = counted(found)
    promised, of_promised = counted([each for each in found if each.get("exactness") == "bitwise"])
    exact = ", ".join(f"{each['model']} {each.get('exactness')}" for each in found)
    write_result(f"{equal} of {answers} answers equal; {exact}", models=found)
    sys.exit(any(process.returncode for process in running.values()) or promised < of_promised)


parser = argparse.ArgumentParser()
parser.add_argument("--dry", action="store_true")
parser.add_argument("--model", choices=MODELS, help="this one alone, in this process")
parser.add_argument("--only", action="append", choices=MODELS, help="may be repeated")
parser.add_argument("--out", type=Path, help="where its findings are written")
given = parser.parse_args()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if given.model:
    asyncio.run(of_model(given.model, given.out))
else:
    main(given.only or list(MODELS))
