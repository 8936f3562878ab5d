"""Mamba-2 on the newest level of drafted trees, node by node (docs/design/scan.md#mamba-2).

Every node on a path advances the state of each head, [P, N]; a new node's output reads the state after itself:

    S = exp(dt A) S + dt x B^T        y = S C

All arguments are converted to float64, in which everything is computed. The letters of shapes are those of `inputs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.level_scan.inputs import NodeInputs


def level_scan(
    inputs: NodeInputs, lines: npt.NDArray[np.bool_], states: Sequence[Tensor], C: Tensor, A: Tensor
) -> Tensor:
    """y = S C of every new node along its own path, without D x.

    lines [S, K, K]: whether node k is on the path of node j; true for k == j, parents come before their children
    states: [H, P, N] of each tree's text   C [S, R, G, N] of the new nodes   A [H], negative
    returns [S, R, H, P] float64
    """
    trees, nodes, heads, width = inputs.x.shape
    count = C.shape[1]
    y = torch.zeros(trees, count, heads, width, dtype=torch.float64)
    for tree in range(trees):
        for row in range(count):
            path = np.flatnonzero(lines[tree, nodes - count + row])
            state = advanced(inputs, tree, path, states[tree], A)  # [H, P, N]
            y[tree, row] = (state * per_head(C[tree, row], heads)[:, None]).sum(2)
    return y


def advanced(inputs: NodeInputs, tree: int, path: Iterable[int], state: Tensor, A: Tensor) -> Tensor:
    """The state [H, P, N] after the nodes of a path, in order, float64."""
    state, heads = state.double(), len(A)
    for node in path:
        x, B = inputs.x[tree, node].double(), per_head(inputs.B[tree, node], heads)  # [H, P], [H, N]
        dt = inputs.dt[tree, node].double()  # [H]
        state = torch.exp(dt * A.double())[:, None, None] * state + (dt[:, None] * x)[:, :, None] * B[:, None]
    return state


def per_head(shared: Tensor, heads: int) -> Tensor:
    """Repeat each group's row for its H / G consecutive heads: [G, N] -> [H, N] float64."""
    return shared.double().repeat_interleave(heads // len(shared), 0)
