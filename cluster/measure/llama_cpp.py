"""Answers of llama.cpp: plain and with its prompt lookup from the weights of ours, and plain from a GGUF file as it is.

It runs in a process of its own: its threads do not disturb ours, and what ends it, such as an instruction that the
processor lacks, ends no measurement of the others. It answers on the processor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest, EngineFailed

from cluster.measure.measurement import GREEDY_ROWS, LLAMA_CPP_FILE, LLAMA_CPP_LOOKUP, LLAMA_CPP_ROWS, TimedAnswer
from cluster.measure.processes import Call, ContenderProcess, Reply, contender_process, serve_calls

LOOKUP_TOKENS = 5
LOOKUP_NGRAM = 3
"""Tokens of a lookup and of a matched n-gram, as in the row of transformers' prompt lookup."""
OURS_ALONE = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR")
"""Variables that our engines need. llama.cpp runs without them: waiting passively makes it slower."""


def imported(library: str) -> Any:
    """The module of an optional library. Raises EngineFailed with the reason for which there is none."""
    from importlib import import_module

    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name == library:
            raise EngineFailed(f"{library} is not installed; the extra `llama` has it") from error
        raise EngineFailed(f"{library} cannot be imported: {error}") from error
    except Exception as error:  # the loader's errors are of many types
        raise EngineFailed(f"{library} cannot be imported: {type(error).__name__}: {error}") from error


class LlamaCppModels:
    """The model of a GGUF file in this process, once for each row: a draft model changes which logits are computed."""

    def __init__(self, file: Path, threads: int, positions: int, rows: Sequence[str]) -> None:
        """positions: of the longest text, prompt, answer and guesses"""
        library = imported("llama_cpp")
        speculative = imported("llama_cpp.llama_speculative")

        class CountingLlama(library.Llama):  # type: ignore[misc, name-defined]
            evaluations = 0

            def eval(self, tokens: Sequence[int]) -> None:
                self.evaluations += 1
                super().eval(tokens)

        def load(draft_model: Any) -> Any:
            try:
                return CountingLlama(
                    str(file),
                    n_ctx=positions,
                    n_batch=positions,
                    n_threads=threads,
                    n_threads_batch=threads,
                    draft_model=draft_model,
                    verbose=True,  # llama.cpp otherwise hides why a file cannot be loaded
                )
            except Exception as error:
                raise EngineFailed(f"the model cannot be loaded: {type(error).__name__}: {error}") from error

        lookup = speculative.LlamaPromptLookupDecoding(LOOKUP_NGRAM, LOOKUP_TOKENS)
        self.models = {row: load(lookup if row == LLAMA_CPP_LOOKUP else None) for row in rows}
        for model in self.models.values():
            model.verbose = False
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # a log of every step costs time
        self.facts = {
            "version": library.__version__,
            "instructions": _enabled(library.llama_print_system_info().decode()),
        }

    def answer(self, row: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> TimedAnswer:
        """`tokens` tokens after a prompt, timed from the call to the last one. No top-k or top-p. Nothing of earlier
        answers is used again."""
        if row in GREEDY_ROWS and temperature > 0:
            raise EngineFailed(f"{row!r} does not answer at temperature {temperature:g}")
        model = self.models[row]
        model.reset()
        model.set_seed(seed & 0xFFFFFFFF)
        model.evaluations = 0
        answer: list[int] = []
        first = 0.0
        started = time.perf_counter()
        for token in model.generate(list(prompt), temp=temperature, top_k=0, top_p=1.0, min_p=0.0):
            if not answer:
                first = time.perf_counter() - started
            answer.append(token)
            if len(answer) == tokens:
                break
        seconds = time.perf_counter() - started
        if len(answer) != tokens:
            raise EngineFailed(f"{len(answer)} tokens instead of {tokens}")
        return TimedAnswer(tuple(answer), seconds, first, 1, model.evaluations)


def _enabled(system_info: str) -> list[str]:
    """The instruction sets and features that llama.cpp's build and this processor have: `AVX2 = 1 | AVX_VNNI = 0`."""
    pairs = [part.rpartition(":")[2].split("=") for part in system_info.split("|")]
    return [pair[0].strip() for pair in pairs if len(pair) == 2 and pair[1].strip() == "1"]


def load(file: str, threads: int, positions: int, rows: Sequence[str]) -> tuple[Reply, Callable[[Call], Reply]]:
    """Facts of the build, and the function that answers a call of `llama_cpp_process`."""
    models = LlamaCppModels(Path(file), threads, positions, rows)
    return models.facts, lambda call: asdict(models.answer(**call))


@asynccontextmanager
async def llama_cpp_process(
    checkpoint: Path, dtype: str, threads: int, positions: int, file: Path | None = None
) -> AsyncIterator[ContenderProcess]:
    """llama.cpp's rows for the model of a checkpoint, which is written as GGUF. file: a GGUF file, for the row of the
    file as it is, in place of these. Raises EngineFailed, in a sentence, if it cannot be started."""
    rows = LLAMA_CPP_ROWS if file is None else (LLAMA_CPP_FILE,)
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    with tempfile.TemporaryDirectory() as folder:
        if file is None:
            file = Path(folder) / "model.gguf"
            await asyncio.to_thread(_export, checkpoint, file, dtype)
        arguments = (str(file), threads, positions + LOOKUP_TOKENS, rows)
        async with contender_process("llama.cpp", __name__, arguments, environment, keep_log=True) as process:
            yield process


def _export(checkpoint: Path, file: Path, dtype: str) -> None:
    from cluster.measure.gguf_file import check_exportable, write_gguf

    try:
        check_exportable(checkpoint, dtype)
        imported("gguf")
        write_gguf(checkpoint, file, dtype)
    except BadRequest as error:
        raise EngineFailed(f"not exported: {error.reason}") from error


if __name__ == "__main__":
    serve_calls(load)
