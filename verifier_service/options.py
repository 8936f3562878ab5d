"""Options of a verifier's engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from dendro.engine import LONGEST_STEP_S
from dendro.errors import BadRequest
from dendro.shapes import DEFAULT_DEPTH, MAX_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierOptions:
    """Settings of an engine that are not read from its checkpoint. Raises BadRequest, naming the field.

    The KV cache has pages for `pool_tokens` tokens of all open texts, or as many as fit into a share of the device's
    memory that is free once the weights are loaded (`memory_fraction`); by default for `max_sessions` texts of
    `max_length`.
    """

    name: str  # name under which the target is served
    tokenizer: Path | None = None  # the tokenizer's folder, if not the checkpoint's
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"
    threads: int = 1  # threads of large products on a CPU
    max_length: int = 2048  # most tokens of a text, prompt and answer
    max_sessions: int = 16  # most texts that hold memory at once
    max_waiting: int = 64  # most texts that wait for memory
    max_rows: int = MAX_ROWS  # most rows of a tree, the root included
    max_depth: int = DEFAULT_DEPTH  # most levels of a tree below the root
    pool_tokens: int | None = None  # tokens in the KV cache
    memory_fraction: float | None = None  # share of the free memory for the KV cache
    share_prefixes: bool = True  # share pages among texts of one tenant; never for a target with states
    prefill_chunk: int = 256  # rows of a step, and so of a chunk of a prompt
    tensor_parallel: int = 1  # workers with a shard of the target each, the engine's process included
    longest_step_s: float = LONGEST_STEP_S  # a longer step counts as hung

    def __post_init__(self) -> None:
        if not 1 <= self.max_rows <= MAX_ROWS or not 0 <= self.max_depth < MAX_ROWS:
            most = f"at most {MAX_ROWS}, {MAX_ROWS - 1}"
            raise BadRequest("max_rows, max_depth", f"are {self.max_rows} and {self.max_depth}; {most}")
        if self.prefill_chunk < 2 * MAX_ROWS:
            raise BadRequest("prefill_chunk", f"is {self.prefill_chunk}; must be at least {2 * MAX_ROWS}")
        if self.pool_tokens is not None and self.memory_fraction is not None:
            raise BadRequest("memory_fraction", "and pool_tokens both set the size of the pool: set only one")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise BadRequest("memory_fraction", f"is {self.memory_fraction}; must be above 0 and at most 1")
        if self.tensor_parallel < 1:
            raise BadRequest("tensor_parallel", f"is {self.tensor_parallel}; must be at least 1")
