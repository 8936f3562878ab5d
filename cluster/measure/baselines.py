"""Answers of the transformers library: `generate`, its prompt lookup, its assisted generation and its batches.

They run in a separate process with our engines' threads and environment, and time themselves there, so that the
communication between the processes is not counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from dendro.errors import BadRequest, EngineFailed
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from tree_layers.gguf_weights import gguf_settings

from cluster.checkpoints import check_library_has
from cluster.engines import engine_environment
from cluster.measure.measurement import ASSISTED, BEST_ASSISTED, BEST_LOOKUP, GENERATE, GRIDS, LOOKUP, TimedAnswer
from cluster.measure.processes import Call, ContenderProcess, Reply, contender_process, serve_calls

LOOKUPS = {LOOKUP: (10, 2)} | {name: (guesses, 3) for name, guesses in GRIDS[BEST_LOOKUP].items()}
"""Guesses of a round and the longest n-gram that is looked up; `LOOKUP` has the defaults of the library's generator."""
ASSISTANTS = {ASSISTED: (20, 0.4)} | {name: (guesses, 0.0) for name, guesses in GRIDS[BEST_ASSISTED].items()}
"""Guesses of a round and the probability below which the assistant stops; `ASSISTED` has the library's defaults."""


class TokenClock:
    """A streamer that records when tokens come, and how many. The first entry is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Baselines:
    """The library's ways to generate, in this process."""

    def __init__(self, target: Path, assistant: Path | None, dtype: str, threads: int) -> None:
        check_library_has(target)
        torch.set_num_threads(threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def load(path: Path) -> Any:
            # The library defaults to fused attention; requesting it fails for models without attention.
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **gguf_settings(path))
            model = model.eval().to(device)
            # All rows must answer with the same number of tokens, so no end id may stop one early.
            model.config.eos_token_id = None
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            return model

        self.device = device
        self.target = load(target)
        self.assistant = load(assistant) if assistant else None

    def answer(self, row: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> TimedAnswer:
        """`tokens` new tokens after a prompt, timed from the call to the last one. No top-k or top-p."""
        clock = TokenClock()
        options: dict[str, object] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if row in LOOKUPS:
            guesses, ngram = LOOKUPS[row]
            options |= {"prompt_lookup_num_tokens": guesses, "max_matching_ngram_size": ngram}
        elif row in ASSISTANTS:
            if self.assistant is None:
                raise BadRequest("row", f"{row} needs an assistant")
            # The library changes the threshold while it answers: every answer begins with the setting's.
            config = self.assistant.generation_config
            config.num_assistant_tokens, config.assistant_confidence_threshold = ASSISTANTS[row]
            config.num_assistant_tokens_schedule = "constant"
            options |= {"assistant_model": self.assistant}
        elif row != GENERATE:
            raise BadRequest("row", f"{row!r} is none of {', '.join((GENERATE, *LOOKUPS, *ASSISTANTS))}")
        torch.manual_seed(seed)
        started = time.perf_counter()
        (answer,), seconds = self._generate(row, [prompt], tokens, streamer=clock, **options)
        return TimedAnswer(tuple(answer), seconds, clock.times[1] - started, clock.counts[1], len(clock.times) - 1)

    def batch(self, row: str, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """The `seconds` that greedy answers of `tokens` tokens to all prompts at once take. Shorter prompts are padded
        on the left."""
        return {"seconds": self._generate(row, prompts, tokens, do_sample=False)[1]}

    def _generate(
        self, row: str, prompts: Sequence[Sequence[int]], tokens: int, **options: object
    ) -> tuple[list[list[int]], float]:
        """The answers to all prompts at once, and the seconds from the call to the last token."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=self.device)
        mask = torch.tensor([[at >= longest - len(prompt) for at in range(longest)] for prompt in prompts]).long()
        started = time.perf_counter()
        with torch.inference_mode():
            found = self.target.generate(ids, attention_mask=mask.to(self.device), max_new_tokens=tokens, **options)
            answers = found[:, longest:].tolist()
        seconds = time.perf_counter() - started
        if any(len(answer) != tokens for answer in answers):
            raise EngineFailed(f"{row}: {len(answers[0])} tokens instead of {tokens}")
        return answers, seconds


def load(target: str, assistant: str | None, dtype: str, threads: int) -> tuple[Reply, Callable[[Call], Reply]]:
    """No facts, and the function that answers a call of `library_process`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    baselines = Baselines(Path(target), Path(assistant) if assistant else None, dtype, threads)
    return {}, lambda call: baselines.batch(**call) if "prompts" in call else asdict(baselines.answer(**call))


def library_process(
    target: Path, assistant: Path | None, dtype: str, threads: int
) -> AbstractAsyncContextManager[ContenderProcess]:
    """The baselines in a separate process, with the environment of an engine of so many threads."""
    arguments = (str(target), assistant and str(assistant), dtype, threads)
    quiet = engine_environment(threads) | {"TQDM_DISABLE": "1"}  # no bars of weights that are unpacked
    return contender_process("transformers", __name__, arguments, os.environ | quiet)


if __name__ == "__main__":
    serve_calls(load)
