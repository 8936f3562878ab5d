"""The rows of a new drafter's tokens, which come of its target's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster.training.models import principal_rows, set_rows
from drafter_service.training.sizes import StudentSize, new_model, student_config

CPU = torch.device("cpu")


def head(tokens: int = 200, hidden: int = 24) -> Tensor:
    """Rows with components of unequal size, away from the origin."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, hidden, generator=generator) @ torch.diag(torch.logspace(0, -2, hidden)) + 3


def inner(rows: Tensor) -> Tensor:
    return rows @ rows.T


@pytest.mark.parametrize("width", [24, 40])
def test_with_room_for_all_components_the_inner_products_of_tokens_are_the_targets(width: int) -> None:
    rows = head()
    found = principal_rows(rows, width)
    assert found.shape == (200, 24)
    torch.testing.assert_close(inner(found), inner(rows - rows.mean(0)), rtol=0, atol=1e-4)


def test_with_less_room_no_other_rows_of_that_width_are_nearer() -> None:
    rows = head()
    centred = (rows - rows.mean(0)).double()
    values = torch.linalg.svdvals(centred)
    found = inner(principal_rows(rows, 6).double())
    assert found.shape == (200, 200) and torch.linalg.matrix_rank(found, rtol=1e-5) == 6
    lost = torch.linalg.matrix_norm(inner(centred) - found)
    torch.testing.assert_close(lost, values[6:].pow(4).sum().sqrt(), rtol=1e-2, atol=0)  # Eckart and Young


def test_every_coordinate_has_a_share_of_the_large_components() -> None:
    spread = principal_rows(head(), 16).std(0)
    assert spread.min() > 0.1 * spread.max()


def student(width: int, tokens: int) -> PreTrainedModel:
    ids = {"vocab_size": tokens, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return new_model(student_config("mamba2", StudentSize(width, 1), ids), 0, CPU)


@pytest.mark.parametrize(("width", "tokens"), [(16, 200), (32, 200), (32, 230), (32, 150)])
def test_a_new_drafter_has_the_rows_with_its_own_spread_in_embedding_and_head(width: int, tokens: int) -> None:
    model, rows = student(width, tokens), principal_rows(head(), width)
    random = model.lm_head.weight.detach().clone()
    set_rows(model, rows)
    weight, known, coordinates = model.lm_head.weight.detach(), min(tokens, 200), rows.shape[1]
    assert model.get_input_embeddings().weight is model.lm_head.weight
    torch.testing.assert_close(weight[:known, :coordinates], rows[:known] * (random.std() / rows.std()))
    assert torch.equal(weight[known:], random[known:])
    assert torch.equal(weight[:, coordinates:], random[:, coordinates:])
