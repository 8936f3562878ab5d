"""The recurrences against the reference in float64, from the same numbers; and chains against steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.state_step import reference
from tree_kernels.state_step.cpu import (
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


def conv_inputs(*lead: int) -> dict[str, Tensor]:
    return {
        "inputs": torch.randn(*lead, CHANNELS),
        "weight": torch.randn(TAPS, CHANNELS),
        "bias": torch.randn(CHANNELS),
    }


def untouched(before: Tensor, after: Tensor, target: Tensor | slice) -> bool:
    written = torch.zeros(SLOTS, dtype=torch.bool)
    written[target] = True
    return torch.equal(before[~written], after[~written])


def check(ours: Tensor, truth: Tensor, bound: float | None = None) -> None:
    """The measure of docs/design/numbers.md#oracles: the norm of the difference, relative to the reference's."""
    assert ours.shape == truth.shape
    limit = bound or {torch.float32: 2e-6, torch.float64: 1e-12}[ours.dtype]
    assert (ours.double() - truth).norm() <= limit * truth.norm()


def cast(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Copies, so that a call cannot write its argument."""
    return [each.to(dtype, copy=True) for each in tensors]


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32-2e-6", "fp64-1e-12"])
STEPS: dict[str, tuple[Any, ...]] = {
    "conv": (conv_step, reference.conv_step, (TAPS - 1, CHANNELS), conv_inputs),
    "mamba1": (mamba1_step, reference.mamba1_step, (CHANNELS, SIZE), mamba1_inputs),
    "mamba2": (mamba2_step, reference.mamba2_step, (HEADS, WIDTH, SIZE), mamba2_inputs),
}


@BOTH
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("target", TARGETS, ids=["scattered", "run"])
def test_a_step_equals_the_reference_and_writes_only_its_targets(target, kind, dtype):
    step, plain, shape, made = STEPS[kind]
    before, inputs = torch.randn(SLOTS, *shape), made(ROWS).values()
    (states,), (truth,) = cast(dtype, before), cast(torch.float64, before)
    out = step(states, SOURCE, target, *cast(dtype, *inputs))
    check(out, plain(truth, SOURCE, target, *cast(torch.float64, *inputs)))
    check(states[target], truth[target])
    assert untouched(before.to(dtype), states, target) and untouched(before.double(), truth, target)


@BOTH
@pytest.mark.parametrize("time", [1, 2, 40])
def test_a_chain_equals_the_reference(time, dtype):
    before, conv = torch.randn(ROWS, TAPS - 1, CHANNELS), conv_inputs(ROWS, time).values()
    ours = conv_chain(*cast(dtype, before, *conv))
    truth = reference.conv_chain(*cast(torch.float64, before, *conv))
    check(ours[0], truth[0])
    assert torch.equal(ours[1], truth[1].to(dtype))
    lengths = torch.randint(time + 1, [ROWS])
    assert torch.equal(conv_tail(ours[1], lengths, TAPS), reference.conv_tail(ours[1], lengths, TAPS))

    state, inputs = torch.randn(ROWS, CHANNELS, SIZE), mamba1_inputs(ROWS, time).values()
    both = mamba1_chain(*cast(dtype, state, *inputs)), reference.mamba1_chain(*cast(torch.float64, state, *inputs))
    for got, wanted in zip(*both, strict=True):
        check(got, wanted)

    state, inputs = torch.randn(ROWS, HEADS, WIDTH, SIZE), mamba2_inputs(ROWS, time).values()
    check(mamba2_chain(*cast(dtype, state, *inputs)), reference.mamba2_chain(*cast(torch.float64, state, *inputs)))


@BOTH
@pytest.mark.parametrize("target", TARGETS, ids=["scattered", "run"])
def test_the_effect_of_several_tokens_on_a_state_equals_the_reference(target, dtype):
    before, given = torch.randn(SLOTS, HEADS, WIDTH, SIZE), mamba2_inputs(ROWS, 7)
    given["dt"] *= torch.arange(7)[:, None] < torch.tensor([7, 3, 1, 0])[:, None, None]  # padding: dt = 0
    B = given["B"]
    drive = [given[name] for name in ("x", "dt", "A")]
    (states,), (truth,) = cast(dtype, before), cast(torch.float64, before)
    ours, plain = mamba2_drive(*cast(dtype, *drive)), reference.mamba2_drive(*cast(torch.float64, *drive))
    for got, wanted in zip(ours, plain, strict=True):
        check(got, wanted)
    mamba2_fold(states, SOURCE, target, *ours, *cast(dtype, B))
    reference.mamba2_fold(truth, SOURCE, target, *plain, *cast(torch.float64, B))
    check(states[target], truth[target])
    assert untouched(before.to(dtype), states, target)


def test_chains_of_2000_tokens_equal_the_reference_within_1e_4():
    """Slow decay, so that the state holds hundreds of tokens."""
    one, two = mamba1_inputs(1, 2000), mamba2_inputs(1, 2000)
    one["A"], two["A"] = one["A"] / 400, two["A"] / 400
    state = torch.randn(1, CHANNELS, SIZE)
    ours, truth = mamba1_chain(state, **one), reference.mamba1_chain(*cast(torch.float64, state, *one.values()))
    for got, wanted in zip(ours, truth, strict=True):
        check(got, wanted, 1e-4)
    state = torch.randn(1, HEADS, WIDTH, SIZE)
    check(mamba2_chain(state, **two), reference.mamba2_chain(*cast(torch.float64, state, *two.values())), 1e-4)


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
