"""Rows of several texts, made one text at a time, in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verifier_service.rows import RecurrentRows, StepPlan


def joined(parts: Sequence[StepPlan]) -> StepPlan:
    """The rows of these plans, without recurrent parts, in this order."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
    far = [
        replace(each, start=start + each.start, stop=start + each.stop)
        for part, start in zip(parts, starts, strict=False)
        for each in part.far
    ]
    return StepPlan(**arrays, far=tuple(far))


ARRAYS = ("tokens", "positions", "slots", "homes", "near")


def joined_recurrent(parts: Sequence[RecurrentRows]) -> RecurrentRows:
    """Recurrent rows, in this order; the folds keep their numbers, so one part alone may have some."""
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ("columns", "own", "homes", "sources")
    }
    return RecurrentRows(**arrays, folds=tuple(each for part in parts for each in part.folds))
