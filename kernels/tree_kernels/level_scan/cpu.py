"""What a CPU runs: Mamba-2 on the newest level of drafted trees, from the nodes' inputs, as matrix products.

An accelerator runs it where `triton.py` does not serve a drafter. The letters of shapes are those of `inputs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tree_kernels.level_scan.inputs import Lines, NodeInputs


def level_scan(inputs: NodeInputs, lines: Lines, states: Sequence[Tensor], C: Tensor, A: Tensor) -> Tensor:
    """y = S C of every new node along its own path (docs/design/scan.md#levels), without D x.

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
