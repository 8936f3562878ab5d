"""Answers of llama.cpp: plain and with its prompt lookup from the weights of ours, and plain from a GGUF file as it is.

It runs in a process of its own: its threads do not disturb ours, and what ends it, such as an instruction that the
processor lacks, ends no measurement of the others. It answers on the processor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from dendro.errors import BadRequest, EngineFailed

from cluster.measure.measurement import (
    GREEDY_ROWS,
    LLAMA_CPP_FILE,
    LLAMA_CPP_LOOKUP,
    LLAMA_CPP_ROWS,
    TimedAnswer,
)
from cluster.measure.processes import Call, ContenderProcess, Reply, serve_calls

LOOKUP_TOKENS = 5
LOOKUP_NGRAM = 3
"""Tokens of a lookup and of a matched n-gram, as in the row of transformers' prompt lookup."""
NOT_INSTALLED = "{} is not installed; the extra `llama` has it"
OURS_ALONE = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR")
"""Variables that our engines need. llama.cpp runs without them: waiting passively makes it slower."""


def imported(library: str) -> Any:
    """The module of an optional library. Raises EngineFailed with the reason for which there is none."""
    from importlib import import_module

    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name == library:
            raise EngineFailed(NOT_INSTALLED.format(library)) from error
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
                    verbose=True,  # else it hides why a file cannot be loaded
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
        model = self.models[row]
        model.reset()
        model.set_seed(seed)
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


def load(file: Path, threads: int, positions: int, rows: Sequence[str]) -> tuple[Reply, Callable[[Call], Reply]]:
    """Facts of the build, and the function that answers a call of `LlamaCppProcess`."""
    models = LlamaCppModels(file, threads, positions, rows)
    return models.facts, lambda call: asdict(models.answer(**call))


class LlamaCppProcess:
    """llama.cpp's rows for the model of a checkpoint. Use as an asynchronous context, which writes the model as GGUF,
    starts the process and waits until it has loaded; raises EngineFailed, in a sentence, if any of this fails."""

    def __init__(self, checkpoint: Path, dtype: str, threads: int, positions: int, file: Path | None = None) -> None:
        """file: a GGUF file, for the row of the file as it is, in place of those of the checkpoint"""
        self.facts: Reply = {}
        self.rows = LLAMA_CPP_ROWS if file is None else (LLAMA_CPP_FILE,)
        self._own_file = file
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._numbers = [str(threads), str(positions + LOOKUP_TOKENS)]
        self._process: ContenderProcess | None = None

    async def __aenter__(self) -> LlamaCppProcess:
        with tempfile.TemporaryDirectory() as folder:  # the process has mapped the file when it is ready
            file = self._own_file or Path(folder) / "model.gguf"
            if self._own_file is None:
                await asyncio.to_thread(self._export, file)
            environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
            arguments = [str(file), *self._numbers, *self.rows]
            self._process = ContenderProcess("llama.cpp", __name__, arguments, environment, True)
            try:
                self.facts = await self._process.ready()
            except BaseException:
                self._process.stop()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.stop()

    def _export(self, file: Path) -> None:
        from cluster.measure.gguf_file import check_exportable, write_gguf

        try:
            check_exportable(self._checkpoint, self._dtype)
            imported("gguf")
            write_gguf(self._checkpoint, file, self._dtype)
        except BadRequest as error:
            raise EngineFailed(f"not exported: {error.reason}") from error

    async def answer(self, row: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> TimedAnswer:
        """Raises EngineFailed with the other process's error."""
        if row not in self.rows or (row in GREEDY_ROWS and temperature > 0):
            raise BadRequest("row", f"{row!r} does not answer at temperature {temperature:g}")
        assert self._process is not None
        fields = {"prompt": list(prompt), "temperature": temperature, "seed": seed & 0xFFFFFFFF, "tokens": tokens}
        return TimedAnswer.of(await self._process.call(row, **fields))


if __name__ == "__main__":
    _file, _threads, _positions, *_rows = sys.argv[1:]
    serve_calls(lambda: load(Path(_file), int(_threads), int(_positions), _rows))
