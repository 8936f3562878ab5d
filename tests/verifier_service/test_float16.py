"""A target in float16: close logits, the exactness that it reports, and a refusal of models with larger numbers."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from safetensors.torch import load_file, save_file

from tests.support import tiny_hybrids, tiny_models
from tests.support.engines import engine_of
from tests.support.exactness import announces_what_it_must
from tests.support.routers import LAWS, RoundByRound, alone, guessing
from tests.support.tiny_hybrids import paths_below, tree_below


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family, make in (("llama", tiny_models.make_checkpoint), ("mamba2", tiny_hybrids.make_checkpoint)):
        folder = tmp_path_factory.mktemp(family)
        made[family] = folder, make(folder, family)
    return made


@pytest.mark.parametrize("family", ["llama", "mamba2"])
async def test_trees_change_no_token_of_a_target_in_float16(folders, family):
    folder, model = folders[family]
    engine = engine_of(folder, torch.float16)
    assert (await engine.hello()).dtype == "float16"
    ids = [5, 9, 2, 40, 7, 7, 31]
    with torch.no_grad():
        truth = torch.stack([model(torch.tensor([path])).logits[0, -1] for path in paths_below(ids)])
    found = engine.logits_of(ids, tree_below(ids[-1]))
    assert (found - truth[:, : found.shape[1]]).abs().max() < 0.05
    if announces_what_it_must(engine):
        await engine.start()
        try:
            rng = np.random.default_rng(0)
            truths = await alone(engine, [ids], LAWS[:1], 16)
            router = RoundByRound(engine, ids, LAWS[0], 16)
            assert await router.finish(guessing(rng, truths[0], 90)) == truths[0]
        finally:
            await engine.stop()


def test_a_model_whose_numbers_are_too_large_for_float16_is_refused_by_its_dtype(folders, tmp_path):
    shutil.copytree(folders["llama"][0], tmp_path / "large")
    tensors = load_file(tmp_path / "large" / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e5
    save_file(tensors, tmp_path / "large" / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadRequest, match="dtype: float16: the model's logits are not finite.*take bfloat16"):
        engine_of(tmp_path / "large", torch.float16)
