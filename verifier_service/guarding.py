"""Keeps one text's fault from the other texts of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from dendro.errors import DendroError, EngineFailed
from dendro.failures import described, log_failure

log = logging.getLogger("dendro.verifier")

Found = TypeVar("Found")


def guarded(work: Callable[[], Found]) -> Found | DendroError:
    """Run one text's part of a step. Returns its result, or the error that ends this text alone."""
    try:
        return work()
    except DendroError as error:
        return error
    except BaseException as error:  # a panic of a native library is no Exception
        log_failure(log, error, "verifier: a text's part of a step failed; the others go on")
        return EngineFailed(f"verifier: {described(error)}")
