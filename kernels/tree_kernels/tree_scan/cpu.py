"""What a CPU runs: the recurrence along paths, matrix products for Mamba-2 and token by token for Mamba-1.

An accelerator runs Mamba-1 so, too; for Mamba-2 it has `triton.py`. Slot 0 holds zeros: a column that is 0 has dt = 0,
so it decays nothing and adds nothing. The letters of shapes are those of `inputs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels.products import bmm
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
    """Mamba-2 of every row along its own path (docs/design/scan.md#paths).

    states [slots, H, P, N]   folded: the result of `fold` for the step's folds   x [rows, X, P], C [rows, r G, N]
    A, D [H] float32; returns y [rows, H, P] float32
    """
    rows, own, width = x.shape
    heads, readers, (groups, size) = inputs.dt.shape[1], C.shape[1], inputs.B.shape[1:]
    columns, members = paths.columns.shape[1], heads // readers
    C = C.float()
    slots = paths.slots()
    dt = inputs.dt.index_select(0, slots).view(-1).take(paths.gather(heads))  # [rows * H, K]
    total, since = _decays(dt.view(rows, heads, columns) * A[:, None])
    weight = since.exp_().mul_(dt.view_as(since)).view(rows, groups, readers // groups, members, columns)
    B = inputs.B.index_select(0, slots).view(-1, size).float()
    B = B.index_select(0, paths.gather(groups).view(-1)).view(rows * groups, columns, size)
    alike = bmm(B, C.reshape(rows * groups, readers // groups, size).transpose(1, 2))
    alike = alike.view(rows, groups, columns, -1).transpose(2, 3)[:, :, :, None]
    seen = inputs.x.index_select(0, slots).view(-1, width).float()
    weight = weight.mul_(alike).view(rows * heads, columns)
    # A bag sums its columns one after another in place; a product would need a copy of them for every row.
    bags = paths.gather(own, heads // own)
    y = F.embedding_bag(bags, seen, mode="sum", per_sample_weights=weight).view(rows, heads, width)
    if paths.groups:
        before = torch.zeros_like(y)
        for group in paths.groups:
            state = _source(group.source, states, folded).view(readers, members * width, size)
            queries = C.index_select(0, group.rows).transpose(0, 1)
            read = torch.bmm(queries, state.transpose(1, 2))[:, : group.count]  # [r G, count, members * P]
            before[group.rows[: group.count]] = read.transpose(0, 1).reshape(group.count, heads, width)
        y.addcmul_(before, total.exp())
    y.view(rows, own, -1, width).addcmul_(x.float()[:, :, None], D.view(own, -1, 1))
    return y


def fold(inputs: TokenInputs, states: Tensor, folds: Sequence[BlockFold], A: Tensor) -> list[Tensor]:
    """The state after each fold's block, [H, P, N]. The source of a fold may be an earlier fold."""
    own, width = inputs.x.shape[1:]
    heads, (groups, size) = inputs.dt.shape[1], inputs.B.shape[1:]
    done: list[Tensor] = []
    for each in folds:
        columns = each.columns.flip(0)
        dt = inputs.dt.index_select(0, columns)  # [block, H]
        total, since = _decays((dt * A).t().contiguous())
        weight = since.exp_().t() * dt
        x = inputs.x.index_select(0, columns).float()
        x = (x if own == heads else x.repeat_interleave(heads // own, 1)).mul_(weight[..., None])
        B = inputs.B.index_select(0, columns).float()
        x = x.view(-1, groups, heads // groups * width).permute(1, 2, 0)  # [G, channels, block]
        after = torch.bmm(x, B.transpose(0, 1)).view(heads, width, size)
        if each.source:
            after.addcmul_(_source(each.source, states, done), total.exp()[:, :, None])
        done.append(after)
    return done


def tree_scan_in_order(
    inputs: TokenInputs,
    states: Tensor,
    folded: Sequence[Tensor],
    paths: Paths,
    x: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
) -> Tensor:
    """Mamba-1 of every row along its own path: the recurrence, one token after another (docs/design/scan.md#paths).

    The arguments are those of `tree_scan`, but A is [H, N]. A path that several rows have in common is computed once.
    """
    plan = paths.waves()
    y = torch.zeros(x.shape, device=x.device)
    C = C.float()[:, :, None]  # [rows, 1, 1, N]
    zero = torch.zeros_like(states[0])
    before = [_source(source, states, folded) if source else zero for source in plan.sources]
    state = torch.stack(before)
    for wave in plan.waves:
        state = _step(inputs, state.index_select(0, wave.parents), wave.columns, A)
        if len(wave.rows):
            # No bmm: for a batch of one with one column it has other bits than for a larger batch.
            y[wave.rows] = state.index_select(0, wave.ends).mul_(C.index_select(0, wave.rows)).sum(-1)
    return y.addcmul_(x.float(), D[:, None])


def fold_in_order(inputs: TokenInputs, states: Tensor, folds: Sequence[BlockFold], A: Tensor) -> list[Tensor]:
    """`fold` for Mamba-1; A is [H, N]."""
    done: list[Tensor] = []
    for each in folds:
        state = states.new_zeros(1, *states.shape[1:]) if not each.source else _source(each.source, states, done)[None]
        for column in each.columns.split(1):
            state = _step(inputs, state, column, A)
        done.append(state[0])
    return done


def _decays(a: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay over all tokens [..., 1] and over the tokens after each [..., K].

    a [..., K]: the tokens' log decays, newest first.
    Each sum has terms of one sign. Differences of sums from the beginning would lose digits of recent tokens' decays.
    """
    total = a.cumsum(-1)
    since = torch.zeros_like(total)
    since[..., 1:] = total[..., :-1]
    return total[..., -1:], since


def _source(source: int, states: Tensor, folded: Sequence[Tensor]) -> Tensor:
    return states[source] if source >= 0 else folded[-1 - source]


def _step(inputs: TokenInputs, state: Tensor, columns: Tensor, A: Tensor) -> Tensor:
    """Advance each state [n, H, P, N] by the token at its column."""
    dt = inputs.dt.index_select(0, columns)[..., None]  # [n, H, 1]
    decay = (dt * A).exp_()[:, :, None]
    drive = inputs.x.index_select(0, columns).float().mul_(dt)[..., None] * inputs.B.index_select(0, columns)[:, None]
    return drive.addcmul_(state, decay)
