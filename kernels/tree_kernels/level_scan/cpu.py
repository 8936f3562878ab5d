"""Mamba-2 on the newest level of drafted trees, from the nodes' inputs, in PyTorch: matrix products.

A batch of S trees, each padded in front to K nodes, of which the last R are new; H heads of P channels, G groups of
heads that share B and C, N state width. A padding node has dt = 0 and is on no real node's path.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Which nodes are on each node's path, as a matrix of sums and as a mask. The same for all layers."""

    sums: Tensor  # [S, K, K] float32: one where node k is on the path of node j
    bars: Tensor  # [S, 1, R, K] float32: minus infinity where node k is not on the path of new node r, else zero

    @classmethod
    def of(cls, lines: npt.NDArray[np.bool_], new: int, device: torch.device) -> Lines:
        """lines [S, K, K]: whether node k is on the path of node j; true for k == j   new: R, the last of the K"""
        bars = np.where(lines[:, None, lines.shape[1] - new :], np.float32(0), np.float32(-np.inf))
        sums = torch.from_numpy(lines.astype(np.float32)).to(device)
        return cls(sums.transpose(1, 2), torch.from_numpy(bars).to(device))


def level_scan(inputs: NodeInputs, lines: Lines, states: Sequence[Tensor], C: Tensor, A: Tensor) -> Tensor:
    """y = S C of every new node along its own path (ALGORITHMS 1.5, 6.1), without D x.

    states: [H, P, N] float32 of each tree's text, read once   C [S, R, G, N] of the new nodes   A [H] float32, negative
    returns [S, R, H, P] float32
    """
    trees, count, groups, size = C.shape
    nodes, heads, width = inputs.x.shape[1:]
    members = heads // groups
    dt = inputs.dt.transpose(1, 2)
    # [S, H, 1, K] logarithm of the decay of a text's state up to each node: sums over its path.
    left = torch.bmm(dt * A[:, None], lines.sums).view(trees, heads, 1, nodes)
    here = left[..., nodes - count :].transpose(2, 3)
    # Masked before the exponential: off the path a difference may be large enough to overflow it.
    weight = (here - left).add_(lines.bars).exp_().mul_(dt.unsqueeze(2))
    queries = C.transpose(1, 2).reshape(trees * groups, count, size)
    alike = torch.bmm(queries, inputs.B.permute(0, 2, 3, 1).reshape(trees * groups, size, nodes))
    weight.view(trees * groups, members, count, nodes).mul_(alike.unsqueeze(1))
    x = inputs.x.transpose(1, 2).reshape(trees * heads, nodes, width)
    y = torch.bmm(weight.view(trees * heads, count, nodes), x).view(trees * groups, members, count, width)
    read = [
        torch.bmm(each, state.view(groups, members * width, size).transpose(1, 2))
        for each, state in zip(queries.split(groups), states, strict=True)
    ]
    before = read[0] if trees == 1 else torch.cat(read)  # [S * G, R, members * P]
    y.addcmul_(before.view(trees * groups, count, members, width).transpose(1, 2), here.exp().view(*y.shape[:3], 1))
    return y.view(trees, heads, count, width).transpose(1, 2)
