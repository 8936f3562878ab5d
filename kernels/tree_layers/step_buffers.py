"""Uploads of a step's arrays to fixed addresses, as a recorded step reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Copied(Protocol):
    """The part of torch.cuda.Event used to wait until the last upload has been read."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class StepBuffers:
    """A step's arrays at fixed addresses: views of one buffer on the host and of one on the device.

    Write the host's arrays after `clear`, which waits until the device has read the last upload.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        copied: Copied | None = None,
        apart: int = 1,
    ) -> None:
        """copied: by default an event on a GPU, and None elsewhere, where a copy is done when it returns
        apart: each array begins at a multiple of this count of numbers, since Triton compiles a kernel for each
        alignment"""
        counts = [int(np.prod(shape)) for shape in shapes.values()]
        sizes = [-(-count // apart) * apart for count in counts]
        self._host = torch.zeros(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=dtype, device=device)
        ends = np.cumsum([0, *sizes]).tolist()
        places = {name: (slice(ends[i], ends[i] + counts[i]), shape) for i, (name, shape) in enumerate(shapes.items())}
        self.flat: npt.NDArray[Any] = self._host.numpy()
        """All of the host's arrays, one after another."""
        self.host: dict[str, npt.NDArray[Any]] = {
            name: self.flat[at].reshape(shape) for name, (at, shape) in places.items()
        }
        self.device = {name: self._device[at].view(shape) for name, (at, shape) in places.items()}
        self._copied = torch.cuda.Event() if copied is None and device.type == "cuda" else copied

    def clear(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self.flat.fill(0)

    def copy(self) -> None:
        """Upload as part of a recorded step. The caller waits for the step before it writes the host's arrays again."""
        self._device.copy_(self._host, non_blocking=True)

    def upload(self) -> None:
        self.copy()
        if self._copied is not None:
            self._copied.record()
