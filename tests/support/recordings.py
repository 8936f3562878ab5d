"""Recordings without a device: a replay runs the step again and writes its results into the first ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from torch import Tensor


class RunAgain:
    """Records steps that return a tensor or a dataclass of tensors. The attempts whose numbers are in `fails` raise."""

    def __init__(self, fails=()) -> None:
        self.fails, self.attempts, self.recordings, self.replays = set(fails), 0, 0, 0
        self.steps: list[Callable[[], object]] = []

    def record(self, step):
        self.attempts += 1
        if self.attempts - 1 in self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.recordings += 1
        self.steps.append(step)
        return _Recording(self, step, made := step()), made


class _Recording:
    def __init__(self, owner, step, made) -> None:
        self.owner, self.step, self.made = owner, step, made

    def replay(self):
        self.owner.replays += 1
        for mine, again in zip(_tensors_of(self.made), _tensors_of(self.step()), strict=True):
            mine.copy_(again)


def _tensors_of(result) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [value for each in fields(result) if isinstance(value := getattr(result, each.name), Tensor)]
