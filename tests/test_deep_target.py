"""The large target and drafter of `make gpu` compute the functions of the small ones that they are made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.config import demo_models
from tests.gpu.deep_target import write_deep, write_deep_drafter
from tests.support.tiny_models import make_checkpoint


def check_function(folder: Path, small: PreTrainedModel, written: int) -> None:
    """Compare a large checkpoint with the small model. written: parameters of the large one"""
    large = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert written > 2 * sum(each.numel() for each in small.parameters())
    tokens = torch.arange(3, 27)[None]
    with torch.no_grad():
        expected, found = small(tokens).logits, large(tokens).logits
    # Weights are rounded to bfloat16, those of norms after another factor.
    assert (found - expected).norm() / expected.norm() < 0.02
    assert (found - expected.roll(1, 1)).norm() / expected.norm() > 0.2


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2)])
def test_a_larger_target_has_the_smaller_ones_logits(heads, tmp_path):
    queries, keys = heads
    small = make_checkpoint(
        tmp_path / "small",
        hidden_size=16 * queries,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        head_dim=16,
        tie_word_embeddings=True,
    )
    written = write_deep(tmp_path / "small", tmp_path / "large", hidden=192, intermediate=160, layers=8, key_heads=4)
    check_function(tmp_path / "large", small, written)


def test_a_larger_drafter_has_the_smaller_ones_logits(tmp_path):
    source = demo_models() / "mamba2"
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    check_function(tmp_path, small, write_deep_drafter(source, tmp_path, times=4, layers=4))
