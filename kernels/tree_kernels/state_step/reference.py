"""The recurrences of Mamba-1 and Mamba-2 and their causal convolution, one row, token and channel or head at a time.

The formulas of docs/design/scan.md#mamba-1 and of the headings after it. Letters: T tokens, W taps of the convolution,
I channels and N states of Mamba-1; H heads of width P and G groups of Mamba-2. Computes in the dtype of the arguments,
all of which have the same; the tests pass float64. Steps write `target`, as those of `cpu.py` do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels.state_step.slots import Slots


def conv_step(memory: Tensor, source: Tensor, target: Slots, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run a step of the convolution: out = silu(bias + sum_m weight[W - 1 - m] input_{t - m}), m = 0 the current token
    (docs/design/scan.md#mamba-1).

    memory [slots, W - 1, C], written at target   inputs [rows, C]   weight [W, C]   bias [C]; returns [rows, C]
    """
    out = torch.zeros_like(inputs)
    for row, slot in enumerate(_numbers(target, memory)):
        window = torch.cat((memory[source[row]], inputs[row : row + 1]))  # [W, C], oldest first
        total = bias
        for tap in range(len(weight)):
            total = total + weight[tap] * window[tap]
        out[row] = F.silu(total)
        memory[slot] = window[1:]
    return out


def conv_chain(before: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`conv_step` for each token. before [rows, W - 1, C]   inputs [rows, T, C]   weight [W, C]   bias [C]

    returns [rows, T, C] and all raw inputs, `before` included [rows, W - 1 + T, C]
    """
    memory, own, out = before.clone(), torch.arange(len(before)), torch.zeros_like(inputs)
    for t in range(inputs.shape[1]):
        out[:, t] = conv_step(memory, own, own, inputs[:, t], weight, bias)
    return out, torch.cat((before, inputs), 1)


def conv_tail(history: Tensor, lengths: Tensor, taps: int) -> Tensor:
    """The last W - 1 raw inputs after the first `lengths` [rows] tokens of a chain. history [rows, W - 1 + T, C]"""
    return torch.stack([history[row, length : length + taps - 1] for row, length in enumerate(lengths.tolist())])


def mamba1_step(
    states: Tensor, source: Tensor, target: Slots, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """h[i] = exp(dt[i] A[i]) h[i] + dt[i] x[i] B,   y[i] = C . h[i] + D[i] x[i]   (docs/design/scan.md#mamba-1)

    states [slots, I, N], written at target   x, dt [rows, I]   A [I, N]   B, C [rows, N]   D [I]; returns [rows, I]
    """
    y = torch.zeros_like(x)
    for row, slot in enumerate(_numbers(target, states)):
        for i in range(len(D)):
            above = states[source[row], i]  # [N]
            h = torch.exp(dt[row, i] * A[i]) * above + dt[row, i] * x[row, i] * B[row]
            states[slot, i] = h
            y[row, i] = C[row] @ h + D[i] * x[row, i]
    return y


def mamba1_chain(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """`mamba1_step` for each token. state [rows, I, N]   x, dt [rows, T, I]   A [I, N]   B, C [rows, T, N]   D [I]

    returns y [rows, T, I] and the state after every token [rows, T, I, N]
    """
    h, own, y, every = state.clone(), torch.arange(len(state)), torch.zeros_like(x), []
    for t in range(x.shape[1]):
        y[:, t] = mamba1_step(h, own, own, x[:, t], dt[:, t], A, B[:, t], C[:, t], D)
        every.append(h.clone())
    return y, torch.stack(every, 1)


def mamba2_step(
    states: Tensor, source: Tensor, target: Slots, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """S[h] = exp(dt[h] A[h]) S[h] + dt[h] x[h] B[g]^T,   y[h] = S[h] C[g] + D[h] x[h],   g = h // (H / G)
    (docs/design/scan.md#mamba-2)

    states [slots, H, P, N], written at target   x [rows, H, P]   dt [rows, H]   A [H]   B, C [rows, G, N]   D [H]
    returns y [rows, H, P]
    """
    y = torch.zeros_like(x)
    for row, slot in enumerate(_numbers(target, states)):
        for h in range(len(D)):
            g = h // (len(D) // B.shape[1])
            above = states[source[row], h]  # [P, N]
            S = torch.exp(dt[row, h] * A[h]) * above + dt[row, h] * torch.outer(x[row, h], B[row, g])
            states[slot, h] = S
            y[row, h] = S @ C[row, g] + D[h] * x[row, h]
    return y


def mamba2_chain(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """`mamba2_step` for each token. state [rows, H, P, N]   x [rows, T, H, P]   dt [rows, T, H]   A, D [H]

    B, C [rows, T, G, N]; returns y [rows, T, H, P]
    """
    S, own, y = state.clone(), torch.arange(len(state)), torch.zeros_like(x)
    for t in range(x.shape[1]):
        y[:, t] = mamba2_step(S, own, own, x[:, t], dt[:, t], A, B[:, t], C[:, t], D)
    return y


def mamba2_drive(x: Tensor, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """left = exp(c_T),   driven_t = exp(c_T - c_t) dt_t x_t,   c_t = sum_{s<=t} dt_s A   (docs/design/scan.md#folds)

    x [..., T, H, P]   dt [..., T, H]   A broadcasts with dt; returns left [..., H, 1, 1], driven [..., T, H, P]
    """
    a, driven = dt * A, torch.zeros_like(x)
    for t in range(x.shape[-3]):
        kept = torch.exp(a[..., t + 1 :, :].sum(-2))  # [..., H] exp(c_T - c_t), the decay by all later tokens
        driven[..., t, :, :] = (kept * dt[..., t, :])[..., None] * x[..., t, :, :]
    return torch.exp(a.sum(-2))[..., None, None], driven


def mamba2_fold(states: Tensor, source: Tensor, target: Slots, left: Tensor, driven: Tensor, B: Tensor) -> None:
    """S'[h] = left[h] S[h] + sum_t driven_t[h] B_t[g]^T   (docs/design/scan.md#folds)

    states [slots, H, P, N], written at target   left [rows, H, 1, 1]   driven [rows, T, H, P]   B [rows, T, G, N]
    """
    time, heads, groups = *driven.shape[1:3], B.shape[2]
    for row, slot in enumerate(_numbers(target, states)):
        for h in range(heads):
            S = left[row, h] * states[source[row], h]  # [P, N]
            for t in range(time):
                S = S + torch.outer(driven[row, t, h], B[row, t, h // (heads // groups)])
            states[slot, h] = S


def _numbers(target: Slots, states: Tensor) -> list[int]:
    """The slots, one by one."""
    return torch.arange(len(states))[target].tolist()
