"""Limits, scales and biases of every served family, those of its configuration's that act on few tokens included."""

from __future__ import annotations

import pytest

from tests.families import read
from tests.support.rare_limits import assert_has_the_librarys_logits, rare_engine, write_rare_checkpoint

QUICK = {"gemma2": "attn_logit_softcapping", "gpt_oss": "swiglu_limit", "mamba2": "time_step_limit", "olmo": "clip_qkv"}
"""Families that are always tried, and the limit that each must have."""
SERVED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in read()["served"]]


@pytest.mark.parametrize("family", SERVED)
def test_a_family_whose_limits_act_on_few_tokens_has_the_librarys_logits_and_greedy_tokens(family, tmp_path):
    library, changes = write_rare_checkpoint(tmp_path, family)
    assert family not in QUICK or QUICK[family] in changes
    assert_has_the_librarys_logits(rare_engine(tmp_path), library)
