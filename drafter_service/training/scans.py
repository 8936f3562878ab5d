"""Selective scans over whole sequences, parallel in time, for training.

Both scans cut the sequence into chunks. States at the chunks' borders come from a short loop over chunks; all else is
computed for every chunk at once. `*_by_steps` are the recurrences of docs/design/scan.md#mamba-1, slow references for
the tests.

Letters: R rows, L positions, D channels, H heads, P head width, N state width. All tensors fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAMBA1_CHUNK = 16  # positions; its steps are unrolled, so torch.compile fuses them and the states stay in registers
MAMBA2_CHUNK = 64  # positions; its scores are a matrix product


def mamba1_scan_by_steps(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Run the scan of Mamba-1 one position after another.

    x, dt [R, L, D]   A [D, N] (negative)   B, C [R, L, N]   returns y [R, L, D], without the skip term
    """
    state = x.new_zeros(x.shape[0], x.shape[2], A.shape[1])
    outputs = []
    for t in range(x.shape[1]):
        state = torch.exp(dt[:, t, :, None] * A) * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def mamba1_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int = MAMBA1_CHUNK) -> Tensor:
    """Run `mamba1_scan_by_steps` for all chunks at once, one position of each chunk after another, twice.

    The first pass starts every chunk from zero and keeps its last state; these are carried over the borders; the second
    starts every chunk from the state that enters it. Decays are products of numbers below one, so nothing overflows.
    """
    y = _Mamba1Scan.apply(x, dt, A, B, C, chunk)  # type: ignore[no-untyped-call]  # torch gives it no types
    assert isinstance(y, Tensor)
    return y


class _Mamba1Scan(torch.autograd.Function):
    """Saves only the states at the chunks' borders for its backward, which recomputes those in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int) -> Tensor:
        rows, length, channels = x.shape
        # [R, chunks, chunk, ...]; padding has dt = 0: it neither decays nor adds
        dt_, x_, B_, C_ = (_in_chunks(values, chunk) for values in (dt, x, B, C))
        decay = torch.exp(dt_.sum(2)[..., None] * A)  # [R, chunks, D, N]
        entering = _carry(_mamba1_states(torch.zeros_like(decay), dt_, dt_ * x_, A, B_)[-1], decay)
        states = _mamba1_states(entering, dt_, dt_ * x_, A, B_)
        outputs = [(state * C_[:, :, t, None]).sum(-1) for t, state in enumerate(states)]
        ctx.save_for_backward(x, dt, A, B, C, entering, decay)
        ctx.chunk = chunk
        return torch.stack(outputs, 2).reshape(rows, -1, channels)[:, :length]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the recurrence G_t = C_t dy_t + a_{t+1} G_{t+1}, where G_t is the gradient of the state after t,
        and a_t = exp(dt_t A)."""
        x, dt, A, B, C, entering, decay = ctx.saved_tensors
        dt_, x_, B_, C_, dy = (_in_chunks(values, ctx.chunk) for values in (dt, x, B, C, grads[0]))
        inputs = dt_ * x_

        def decayed(grad: Tensor, t: int) -> Tensor:
            return torch.exp(dt_[:, :, t, :, None] * A) * grad

        def from_output(t: int) -> Tensor:
            return dy[:, :, t, :, None] * C_[:, :, t, None]

        # Forward's passes in reverse: the gradient leaving each chunk at its start, the one entering it, all steps.
        leaving = torch.zeros_like(entering)
        for t in reversed(range(ctx.chunk)):
            leaving = decayed(leaving + from_output(t), t)
        grad = _carry(leaving.flip(1), decay.flip(1)).flip(1)
        states = torch.stack(_mamba1_states(entering, dt_, inputs, A, B_), 2)  # [R, chunks, chunk, D, N]
        state_grads, exponent_grads = [], []  # G_t, and the gradient of the exponent dt_t A
        for t in reversed(range(ctx.chunk)):
            grad = grad + from_output(t)
            state_grads.append(grad)
            grad = decayed(grad, t)
            exponent_grads.append(grad * (entering if t == 0 else states[:, :, t - 1]))
        G, E = torch.stack(state_grads[::-1], 2), torch.stack(exponent_grads[::-1], 2)

        input_grad = (G @ B_[..., None]).squeeze(-1)
        dt_grad = (E * A).sum(-1) + input_grad * x_
        A_grad = (E * dt_[..., None]).sum((0, 1, 2))
        B_grad = (inputs[..., None, :] @ G).squeeze(-2)
        C_grad = (dy[..., None, :] @ states).squeeze(-2)

        def whole(values: Tensor) -> Tensor:
            return values.flatten(1, 2)[:, : x.shape[1]]

        return whole(input_grad * dt_), whole(dt_grad), A_grad, whole(B_grad), whole(C_grad), None


def _mamba1_states(state: Tensor, dt: Tensor, inputs: Tensor, A: Tensor, B: Tensor) -> list[Tensor]:
    """States after every step of all chunks, each [R, chunks, D, N], from the states that enter the chunks.

    state [R, chunks, D, N]   dt, inputs (dt x) [R, chunks, chunk, D]   A [D, N]   B [R, chunks, chunk, N]
    """
    states = []
    for t in range(dt.shape[2]):
        state = torch.exp(dt[:, :, t, :, None] * A) * state + inputs[:, :, t, :, None] * B[:, :, t, None]
        states.append(state)
    return states


def mamba2_scan_by_steps(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Run the scan of Mamba-2 one position after another.

    x [R, L, H, P]   dt [R, L, H]   A [H] (negative)   B, C [R, L, N] (one group)   returns y [R, L, H, P]
    """
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, None, None]
        outputs.append((state * C[:, t, None, None]).sum(-1))
    return torch.stack(outputs, 1)


# Fused with its surroundings, its gradient has NaN or does not compile (torch 2.13).
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def mamba2_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int = MAMBA2_CHUNK) -> Tensor:
    """Run `mamba2_scan_by_steps` by matrix products: inside a chunk it is attention with decaying weights."""
    length, heads = x.shape[1:3]
    inputs = _in_chunks(dt[..., None] * x, chunk)  # [R, chunks, chunk, H, P]
    log_decay = (_in_chunks(dt, chunk) * A).cumsum(2)  # [R, chunks, chunk, H], from the border
    B, C = _in_chunks(B, chunk), _in_chunks(C, chunk)  # [R, chunks, chunk, N]

    # Later positions are masked before exp: their differences are positive and may overflow.
    by_head = log_decay.mT
    between = by_head[..., :, None] - by_head[..., None, :]  # [R, chunks, H, chunk (to), chunk (from)]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    weights = (C @ B.mT)[:, :, None] * torch.exp(between.masked_fill(later, -torch.inf))
    within = (weights @ inputs.transpose(2, 3)).transpose(2, 3)  # [R, chunks, chunk, H, P]

    # All heads share B and C, so what needs only those is one product for all heads.
    to_border = torch.exp(log_decay[:, :, -1:] - log_decay)[..., None]  # [R, chunks, chunk, H, 1]
    last = ((to_border * inputs).flatten(3).mT @ B).unflatten(2, (heads, -1))  # [R, chunks, H, P, N]
    entering = _carry(last, torch.exp(log_decay[:, :, -1])[..., None, None])
    across = (C @ entering.flatten(2, 3).mT).unflatten(3, (heads, -1))  # [R, chunks, chunk, H, P]
    y: Tensor = within + torch.exp(log_decay)[..., None] * across
    return y.flatten(1, 2)[:, :length]


def _in_chunks(values: Tensor, chunk: int) -> Tensor:
    """Reshape [R, L, ...] to [R, chunks, chunk, ...], the last chunk filled up with zeros."""
    missing = -values.shape[1] % chunk
    if missing:
        values = F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing))
    return values.reshape(values.shape[0], -1, chunk, *values.shape[2:])


def _carry(last: Tensor, decay: Tensor) -> Tensor:
    """The state that enters each chunk.

    last [R, chunks, ...]: each chunk's last state when started from zero   decay [R, chunks, ...] (broadcasts): each
    chunk's whole decay   returns [R, chunks, ...]
    """
    state = torch.zeros_like(last[:, 0])
    entering = []
    for index in range(last.shape[1]):
        entering.append(state)
        state = decay[:, index] * state + last[:, index]
    return torch.stack(entering, 1)
