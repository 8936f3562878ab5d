"""Muon in float32 against torch's, which whitens in bfloat16, and against a singular value decomposition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from drafter_service.training.muon import Float32Muon, whitened

SHAPES = [(48, 48), (32, 160), (160, 32), (1, 7)]


def matrix(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whitened_matrix_keeps_its_singular_vectors_and_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    given = matrix(shape)
    left, values, right = torch.linalg.svd(given.double(), full_matrices=False)
    inner = left.T @ whitened(given).double() @ right.T  # diagonal where the singular vectors are the same
    torch.testing.assert_close(inner, torch.diag(inner.diagonal()), rtol=0, atol=1e-4)
    large = values > 0.02 * values.square().sum().sqrt()
    assert large.any()
    assert ((inner.diagonal()[large] > 0.6) & (inner.diagonal()[large] < 1.3)).all()


def test_a_gradient_of_zeros_gives_a_step_of_zeros() -> None:
    assert whitened(torch.zeros(4, 6)).abs().max() == 0


def settings() -> dict[str, float]:
    return {"lr": 3e-3, "momentum": 0.95, "weight_decay": 0.05}


def step(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], number: int) -> None:
    for place, weight in enumerate(weights):
        weight.grad = matrix((weight.shape[0], weight.shape[1]), seed=100 * number + place)
    optimizer.step()


@pytest.mark.parametrize("changed_after", [0, 3, 6])
def test_steps_are_those_of_torchs_muon_up_to_its_bfloat16_and_states_are_interchangeable(changed_after: int) -> None:
    def weights() -> list[nn.Parameter]:
        return [nn.Parameter(matrix(shape, seed)) for seed, shape in enumerate(SHAPES)]

    expected, found = weights(), weights()
    torchs = torch.optim.Muon(expected, **settings(), adjust_lr_fn="match_rms_adamw")
    first = torch.optim.Muon(found, **settings(), adjust_lr_fn="match_rms_adamw")
    ours = Float32Muon(found, **settings(), adjust_lr_fn="match_rms_adamw")
    for number in range(6):
        step(torchs, expected, number)
        if number == changed_after:
            ours.load_state_dict(first.state_dict())
        step(first if number < changed_after else ours, found, number)
    for shape, before, theirs, mine in zip(SHAPES, weights(), expected, found, strict=True):
        moved = (theirs - before).norm()
        assert (mine - theirs).norm() < 0.02 * moved, shape


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="closure"):
        Float32Muon([nn.Parameter(matrix((4, 4)))]).step(lambda: 0.0)
