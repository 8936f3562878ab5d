"""What a CPU runs: the recurrences of Mamba-1 and Mamba-2 and their causal convolution, out of place.

PyTorch alone, so an accelerator runs it too. Tested against `reference.py`.

A *step* consumes one token per row: it reads slot `source[row]` and writes slot `target[row]`, so that siblings can
start from one parent. No slot may be written by one row of a call and read by another. A *chain* consumes several
tokens per row; its argument is the memory itself. A *target* may be a slice if its slots are consecutive; it is then
written without an index. All states, dt, A, B, C and D are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels.state_step.slots import Slots


def conv_step(memory: Tensor, source: Tensor, target: Slots, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The depthwise causal convolution and SiLU for one token per row.

    memory [slots, W - 1, C] the last raw inputs, oldest first; written at target
    inputs [rows, C]   weight [W, C], the current token's tap last   bias [C]; returns [rows, C]
    """
    window = torch.cat((memory.index_select(0, source), inputs[:, None]), 1)  # [rows, W, C]
    memory[target] = window[:, 1:]
    return F.silu((window * weight).sum(1).add_(bias))


def conv_chain(before: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution for several tokens per row.

    before [rows, W - 1, C]   inputs [rows, T, C]   weight [W, C]   bias [C]
    returns the outputs [rows, T, C] and all raw inputs, `before` included [rows, W - 1 + T, C]
    """
    history = torch.cat((before, inputs), 1)
    time, taps = inputs.shape[1], weight.shape[0]
    out = history[:, :time] * weight[0] + bias
    for tap in range(1, taps):
        out.addcmul_(history[:, tap : tap + time], weight[tap])
    return F.silu(out), history


def conv_tail(history: Tensor, lengths: Tensor, taps: int) -> Tensor:
    """The last W - 1 raw inputs after the first `lengths` [rows] tokens of a chain. history [rows, W - 1 + T, C]"""
    last = lengths[:, None] + torch.arange(taps - 1, device=lengths.device)  # [rows, W - 1]
    return history.gather(1, last[..., None].expand(-1, -1, history.shape[2]))


def mamba1_step(
    states: Tensor, source: Tensor, target: Slots, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """Run one token per row of Mamba-1: h = exp(dt A) h + dt B x, y = C h + D x.

    states [slots, I, N], written at target   x [rows, I]   dt [rows, I] after softplus   A [I, N] negative
    B, C [rows, N]   D [I]; returns y [rows, I]
    """
    before = states.index_select(0, source).mul_((dt[..., None] * A).exp_())  # [rows, I, N]
    state = _drive(states, target, before, (dt * x)[..., None], B[:, None])
    return _read(state, C).addcmul_(x, D)


def mamba1_chain(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """Run several tokens per row of Mamba-1, one after another, with the same arithmetic as single steps.

    state [rows, I, N]   x [rows, T, I]   dt [rows, T, I]   A [I, N]   B, C [rows, T, N]   D [I]
    returns y [rows, T, I] and the state after every token [rows, T, I, N]
    """
    decay = torch.exp(dt[..., None] * A)  # [rows, T, I, N]
    every = (dt * x)[..., None] * B[:, :, None]  # dt B x of each token; the loop replaces it by the token's state
    for time in range(x.shape[1]):
        state = torch.addcmul(every[:, time], state, decay[:, time], out=every[:, time])
    return torch.matmul(every, C[..., None])[..., 0].addcmul_(x, D), every


def mamba2_step(
    states: Tensor, source: Tensor, target: Slots, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """Run one token per row of Mamba-2: a scalar decay per head, B and C shared by the heads of a group.

    states [slots, H, P, N], written at target   x [rows, H, P]   dt [rows, H] after softplus and clamp
    A [H] negative   B, C [rows, G, N]   D [H]; returns y [rows, H, P]
    """
    rows, heads, width = x.shape
    groups, size = B.shape[1:]
    members = heads // groups * width  # channels of a group
    # Two dimensions, since a CPU multiplies them several times faster than four.
    before = states.index_select(0, source)
    before.view(rows * heads, width * size).mul_((dt * A).exp_().view(rows * heads, 1))
    driven = (dt[..., None] * x).view(rows, groups, members, 1)
    state = _drive(
        states.view(-1, groups, members, size), target, before.view(rows, groups, members, size), driven, B[:, :, None]
    )
    y = _read(state.view(rows * groups, members, size), C.reshape(rows * groups, size))
    return y.view(rows, heads, width).addcmul_(x, D[:, None])


def mamba2_chain(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Several tokens per row of Mamba-2 as matrix products.

    state [rows, H, P, N]   x [rows, T, H, P]   dt [rows, T, H]   A [H]   B, C [rows, T, G, N]   D [H]
    returns y [rows, T, H, P]; `mamba2_fold` computes the state
    """
    heads, groups, time = x.shape[2], B.shape[2], x.shape[1]
    total = (dt * A).cumsum(1).transpose(1, 2)  # [rows, H, T] log of the decay from the start through each token
    later = torch.ones(time, time, dtype=torch.bool, device=x.device).triu_(1)
    decay = (total[..., None] - total[:, :, None]).masked_fill_(later, -torch.inf).exp_()  # [rows, H, to, from]
    alike = torch.einsum("rtgn,rsgn->rgts", C, B).repeat_interleave(heads // groups, 1)  # [rows, H, to, from]
    driven = (x * dt[..., None]).transpose(1, 2)  # [rows, H, T, P]
    heads_C = C.repeat_interleave(heads // groups, 2).transpose(1, 2)
    y = torch.matmul(alike.mul_(decay), driven)
    y.addcmul_(torch.matmul(heads_C, state.transpose(2, 3)), total.exp()[..., None])
    return y.transpose(1, 2) + x * D[:, None]


def mamba2_drive(x: Tensor, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The effect of several tokens on a state: the new state is `left` times the state, plus `driven` B^T.

    x [..., T, H, P]   dt [..., T, H], zero for padding tokens   A broadcasts with dt
    returns left [..., H, 1, 1] and driven [..., T, H, P]
    """
    total = (dt * A).cumsum(-2)
    end = total[..., -1:, :]
    return end.movedim(-2, -1).exp()[..., None], x * torch.exp(end - total).mul_(dt)[..., None]


def mamba2_fold(states: Tensor, source: Tensor, target: Slots, left: Tensor, driven: Tensor, B: Tensor) -> None:
    """Advance states by several tokens per row, out of place.

    states [slots, H, P, N], written at target   left [rows, H, 1, 1], driven [rows, T, H, P] from `mamba2_drive`
    B [rows, T, G, N]
    """
    rows, time, heads, width = driven.shape
    groups = B.shape[2]
    after = torch.matmul(driven.view(rows, time, groups, -1).permute(0, 2, 3, 1), B.transpose(1, 2))
    after = after.view(rows, heads, width, -1)
    states[target] = after.addcmul_(states.index_select(0, source), left)


def _drive(states: Tensor, target: Slots, before: Tensor, x: Tensor, B: Tensor) -> Tensor:
    """Write before + x B to states[target], and return it. May overwrite `before`."""
    if isinstance(target, slice):
        return torch.addcmul(before, x, B, out=states[target])
    states[target] = before.addcmul_(x, B)
    return before


def _read(state: Tensor, C: Tensor) -> Tensor:
    """state C: [rows, channels, N] times [rows, N] -> [rows, channels]. A row times a matrix is fast on a CPU."""
    return torch.bmm(C[:, None], state.transpose(1, 2))[:, 0]
