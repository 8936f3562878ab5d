"""The inputs of drafted trees' nodes, and which nodes are on each node's path.

A batch of S trees, each padded in front to K nodes, of which the last R are new; H heads of P channels, G groups of
heads that share B and C, N state width. A padding node has dt = 0 and is on no real node's path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class NodeInputs(NamedTuple):
    """The recurrence's inputs of nodes: `x`, `B` after the convolution, `dt` after softplus and clamp. float32."""

    x: Tensor  # [S, K, H, P]
    B: Tensor  # [S, K, G, N]
    dt: Tensor  # [S, K, H]


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """The nodes on each node's path, as a matrix of sums and as a mask. All layers share it."""

    sums: Tensor  # [S, K, K] float32: one where node k is on the path of node j
    bars: Tensor  # [S, 1, R, K] float32: minus infinity where node k is not on the path of new node r, else zero

    @classmethod
    def of(cls, lines: npt.NDArray[np.bool_], new: int, device: torch.device) -> Lines:
        """Make both tensors. lines [S, K, K]: true at [s, j, k] if node k is on the path of node j, or is j   new: R"""
        bars = np.where(lines[:, None, lines.shape[1] - new :], np.float32(0), np.float32(-np.inf))
        sums = torch.from_numpy(lines.astype(np.float32)).to(device)
        return cls(sums.transpose(1, 2), torch.from_numpy(bars).to(device))
