"""The recurrences against the formulas, computed one number at a time, and chains against steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.state_step import (
    conv_chain,
    conv_step,
    conv_tail,
    mamba1_chain,
    mamba1_step,
    mamba2_chain,
    mamba2_drive,
    mamba2_fold,
    mamba2_step,
)

SLOTS, ROWS, TAPS, CHANNELS, SIZE = 9, 4, 4, 6, 5
HEADS, WIDTH, GROUPS = 4, 3, 2
SOURCE = torch.tensor([1, 1, 0, 2])  # siblings share a parent; one row starts from the empty memory
TARGETS = [torch.tensor([8, 3, 6, 4]), slice(3, 7)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def mamba1_inputs(*lead: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(*lead, CHANNELS),
        "dt": F.softplus(torch.randn(*lead, CHANNELS)),
        "A": -torch.rand(CHANNELS, SIZE) * 4,
        "B": torch.randn(*lead, SIZE),
        "C": torch.randn(*lead, SIZE),
        "D": torch.randn(CHANNELS),
    }


def mamba2_inputs(*lead: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(*lead, HEADS, WIDTH),
        "dt": F.softplus(torch.randn(*lead, HEADS)),
        "A": -torch.rand(HEADS) * 4,
        "B": torch.randn(*lead, GROUPS, SIZE),
        "C": torch.randn(*lead, GROUPS, SIZE),
        "D": torch.randn(HEADS),
    }


def untouched(before: Tensor, after: Tensor, target: Tensor | slice) -> bool:
    written = torch.zeros(SLOTS, dtype=torch.bool)
    written[target] = True
    return torch.equal(before[~written], after[~written])


@pytest.mark.parametrize("target", TARGETS, ids=["scattered", "run"])
def test_mamba1_step_equals_the_formula_and_writes_only_its_targets(target):
    states, given = torch.randn(SLOTS, CHANNELS, SIZE), mamba1_inputs(ROWS)
    before = states.clone()
    y = mamba1_step(states, SOURCE, target, **given)
    after = states[target]
    x, dt, A, B, C, D = given.values()
    for row in range(ROWS):
        for i in range(CHANNELS):
            total = D[i] * x[row, i]
            for n in range(SIZE):
                decay = torch.exp(dt[row, i] * A[i, n])
                h = decay * before[SOURCE[row], i, n] + dt[row, i] * B[row, n] * x[row, i]
                torch.testing.assert_close(after[row, i, n], h)
                total = total + C[row, n] * h
            torch.testing.assert_close(y[row, i], total, atol=1e-5, rtol=1e-5)
    assert untouched(before, states, target)


@pytest.mark.parametrize("target", TARGETS, ids=["scattered", "run"])
def test_mamba2_step_equals_the_formula_and_writes_only_its_targets(target):
    states, given = torch.randn(SLOTS, HEADS, WIDTH, SIZE), mamba2_inputs(ROWS)
    before = states.clone()
    y = mamba2_step(states, SOURCE, target, **given)
    after = states[target]
    x, dt, A, B, C, D = given.values()
    for row in range(ROWS):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            decay = torch.exp(dt[row, head] * A[head])
            driven = dt[row, head] * torch.outer(x[row, head], B[row, group])
            S = decay * before[SOURCE[row], head] + driven
            torch.testing.assert_close(after[row, head], S)
            wanted = S @ C[row, group] + D[head] * x[row, head]
            torch.testing.assert_close(y[row, head], wanted, atol=1e-5, rtol=1e-5)
    assert untouched(before, states, target)


@pytest.mark.parametrize("target", TARGETS, ids=["scattered", "run"])
def test_conv_step_equals_a_convolution_over_history_and_token(target):
    memory, weight, bias = torch.randn(SLOTS, TAPS - 1, CHANNELS), torch.randn(TAPS, CHANNELS), torch.randn(CHANNELS)
    inputs, before = torch.randn(ROWS, CHANNELS), memory.clone()
    out = conv_step(memory, SOURCE, target, inputs, weight, bias)
    window = torch.cat((before[SOURCE], inputs[:, None]), 1)
    wanted = F.conv1d(window.transpose(1, 2), weight.t()[:, None], bias, groups=CHANNELS)[..., 0]
    torch.testing.assert_close(out, F.silu(wanted))
    assert torch.equal(memory[target], window[:, 1:])
    assert untouched(before, memory, target)


def chained1(start, inputs, counts):
    y, every = mamba1_chain(start, **inputs)
    return y, every[torch.arange(len(start)), counts.sum(1) - 1]


def chained2(start, inputs, counts):
    drive, states = mamba2_drive(inputs["x"], inputs["dt"] * counts[..., None], inputs["A"]), torch.cat([start, start])
    mamba2_fold(states, torch.arange(len(start)), slice(len(start), None), *drive, inputs["B"])
    return mamba2_chain(start, **inputs), states[len(start) :]


@pytest.mark.parametrize("lengths", [[7, 7], [7, 3], [1, 2]], ids=str)
def test_a_chain_of_either_kind_equals_its_steps_and_padding_changes_nothing(lengths):
    time, rows = 7, len(lengths)
    counts = torch.arange(time) < torch.tensor(lengths)[:, None]
    for inputs, chain, step, shape in (
        (mamba1_inputs(rows, time), chained1, mamba1_step, (CHANNELS, SIZE)),
        (mamba2_inputs(rows, time), chained2, mamba2_step, (HEADS, WIDTH, SIZE)),
    ):
        start = torch.randn(rows, *shape)
        y, after = chain(start, inputs, counts)
        for row, length in enumerate(lengths):
            states = start[row : row + 1].clone()
            for t in range(length):
                one = {k: v if k in "AD" else v[row : row + 1, t] for k, v in inputs.items()}
                got = step(states, torch.tensor([0]), slice(0, 1), **one)
                torch.testing.assert_close(y[row, t], got[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(after[row], states[0], atol=1e-5, rtol=1e-5)


def test_a_convolution_chain_equals_its_steps_and_keeps_the_last_inputs_before_padding():
    lengths, time = [5, 1, 3], 5
    before, inputs = torch.randn(3, TAPS - 1, CHANNELS), torch.randn(3, time, CHANNELS)
    weight, bias = torch.randn(TAPS, CHANNELS), torch.randn(CHANNELS)
    out, history = conv_chain(before, inputs, weight, bias)
    after = conv_tail(history, torch.tensor(lengths), TAPS)
    for row, length in enumerate(lengths):
        memory = before[row : row + 1].clone()
        for t in range(length):
            got = conv_step(memory, torch.tensor([0]), slice(0, 1), inputs[row : row + 1, t], weight, bias)
            torch.testing.assert_close(out[row, t], got[0])
        assert torch.equal(after[row], memory[0])


def test_a_mamba2_chain_of_strong_decay_is_finite():
    """Without the mask, exp of the decays above the diagonal overflows."""
    given = mamba2_inputs(1, 64)
    given["dt"], given["A"] = torch.full((1, 64, HEADS), 20.0), torch.full((HEADS,), -10.0)
    left, driven = mamba2_drive(given["x"], given["dt"], given["A"])
    y = mamba2_chain(torch.randn(1, HEADS, WIDTH, SIZE), **given)
    assert y.isfinite().all() and left.isfinite().all() and driven.isfinite().all()
