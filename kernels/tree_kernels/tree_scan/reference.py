"""The recurrence along paths, one token after another (docs/design/scan.md#paths).

Every token of a path advances the state of each head, [P, N]; a row's output reads the state after its own token:

    S = exp(dt A) S + dt x B^T        y = S C + D x

Both Mamba-2 and Mamba-1: A is [H] for Mamba-2, one decay per head; [H, N] for Mamba-1, one per channel and state. So
`tree_scan` is also the reference of `tree_scan_in_order`, and `fold` of `fold_in_order`. All arguments are converted to
float64, in which everything is computed. The letters of shapes are those of `inputs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tree_kernels.tree_scan.inputs import TokenInputs
from tree_kernels.tree_scan.paths import BlockFold, Paths


def tree_scan(
    inputs: TokenInputs,
    states: Tensor,
    folded: Sequence[Tensor],
    paths: Paths,
    x: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
) -> Tensor:
    """y of every row: its checkpoint, advanced by the tokens in its columns.

    states [slots, H, P, N]   folded: the result of `fold` for the step's folds   x [rows, X, P], C [rows, r G, N]
    A [H] or [H, N]   D [H]; returns y [rows, H, P] float64
    """
    sources = {row: group.source for group in paths.groups for row in group.rows[: group.count].tolist()}
    y = []
    for row, columns in enumerate(paths.columns.tolist()):
        state = checkpoint(sources.get(row, 0), states, folded)
        state = advanced(inputs, state, columns, A)  # [H, P, N]
        heads = state.shape[0]
        state_C = (state * per_head(C[row], heads)[:, None]).sum(2)  # [H, P]
        y.append(state_C + D.double()[:, None] * per_head(x[row], heads))
    return torch.stack(y)


def fold(inputs: TokenInputs, states: Tensor, folds: Sequence[BlockFold], A: Tensor) -> list[Tensor]:
    """The state after each fold's block, [H, P, N] float64. The source of a fold may be an earlier fold."""
    done: list[Tensor] = []
    for each in folds:
        done.append(advanced(inputs, checkpoint(each.source, states, done), each.columns.tolist(), A))
    return done


def advanced(inputs: TokenInputs, state: Tensor, slots: Iterable[int], A: Tensor) -> Tensor:
    """The state [H, P, N] after the tokens in `slots`, in order; slot 0 is no token."""
    heads = state.shape[0]
    for slot in slots:
        if slot != 0:
            x, B = per_head(inputs.x[slot], heads), per_head(inputs.B[slot], heads)  # [H, P], [H, N]
            dt = inputs.dt[slot].double()[:, None, None]  # [H, 1, 1]
            state = torch.exp(dt * A.double().view(heads, 1, -1)) * state + dt * x[:, :, None] * B[:, None, :]
    return state


def checkpoint(source: int, states: Tensor, folded: Sequence[Tensor]) -> Tensor:
    """The state of a `Group.source` or `BlockFold.source`: zero, a slot of the states, or the result of a fold."""
    if source == 0:
        return torch.zeros(states.shape[1:], dtype=torch.float64)
    return states[source].double() if source > 0 else folded[-1 - source].double()


def per_head(shared: Tensor, heads: int) -> Tensor:
    """Repeat each of n entries for H / n consecutive heads: [n, ...] -> [H, ...] float64."""
    return shared.double().repeat_interleave(heads // len(shared), 0)
