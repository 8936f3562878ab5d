"""Training by several processes together, one per GPU: accelerate joins them, torch's elastic launcher starts and ends
them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from dendro.errors import DendroError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

LONGEST_WAIT = timedelta(days=7)
"""Longest time that a process waits for another: one process tokenizes the data for all, which may take hours."""


DENDRO_ERRORS = ("BadRequest", "NotSaved")
"""Names of errors whose words are a sentence for the user."""


class TrainingFailed(DendroError):
    """A process of a training run has failed; the others were ended."""


def train_together(processes: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(accelerator, arguments ...)` in `processes` new processes of this machine, one per GPU if there are
    GPUs. The `Accelerator` joins them.

    `work` and the arguments are pickled. Raises TrainingFailed with the words of the first process that fails.
    """
    for reporting in ("torch.distributed", "torch.multiprocessing"):  # a page for each process that ends
        logging.getLogger(reporting).setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(settings, _joined)(work, *arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise TrainingFailed(_words(failure.message)) from error


def _joined(work: Callable[..., None], *arguments: Any) -> None:
    waiting = InitProcessGroupKwargs(timeout=LONGEST_WAIT)
    processes = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[waiting])
    work(processes, *arguments)
    processes.end_training()


def _words(message: Any) -> str:
    """Words of a process's failure. The launcher has an exception as `Class: words` beside the traceback, a signal as
    text."""
    if not isinstance(message, dict):
        return str(message)
    kind, _, words = str(message["message"]).partition(": ")
    return words if kind in DENDRO_ERRORS else f"{kind}: {words}"
