"""Launches kernels on the device of their tensors: Triton's, and those of other libraries, go to the current device of
the calling thread, which is the first unless set. torch's own operations need none of this. After a launch that failed,
`device_fault` says whether others can follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class HasDevice(Protocol):
    device: torch.device


Owner = TypeVar("Owner", bound=HasDevice)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a device is the calling thread's current one; no change for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_fault(device: torch.device) -> str:
    """Reason why a device runs nothing more for this process, as after an illegal address; empty while it does.

    Waits for the calling thread's stream alone: waiting for the whole device would spoil another thread's recording.
    """
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        return f"{device} is lost: {str(error).partition(chr(10))[0]}"
    return ""


def on_its_device(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """Decorate a method: during a call its object's `device` is the calling thread's current one (`launching_on`)."""

    @wraps(method)
    def run(self: Owner, /, *args: Given.args, **named: Given.kwargs) -> Result:
        with launching_on(self.device):
            return method(self, *args, **named)

    return run
