"""Steps of few rows, in families whose widths allow them: most tiny models of these tests are too narrow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dendro.tree import DraftTree
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM
from tree_kernels import FEW_ROWS, ROW_MULTIPLE
from tree_kernels.matmul import why_not_packed
from tree_layers.linear import why_not_compiled

from tests.support import tiny_mamba, tiny_models
from tests.support.made_once import made_once
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_attention_heads": 4}
COMMON = {
    "vocab_size": tiny_models.PADDED,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": tiny_models.END,
    "eos_token_id": tiny_models.END,
    "pad_token_id": tiny_models.END,
}


def mixtral(folder):
    """One kv head, and a router of four numbers."""
    experts = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**COMMON | WIDE | experts))


def qwen3(folder):
    return Qwen3ForCausalLM(Qwen3Config(**COMMON | WIDE | {"num_key_value_heads": 2}))


def written(make):
    def write(folder):
        model = make(folder)
        tiny_models.randomise(model, 0)
        model.save_pretrained(folder)
        tiny_models.write_tokenizer(folder)

    return write


def mamba2(groups):
    def write(folder):
        # in_proj has 2 * 256 + 2 * 32 + 64 outputs
        sizes = {"num_heads": 64, "head_dim": 4, "n_groups": groups, "state_size": 32 // groups}
        tiny_mamba.make_checkpoint(folder, "mamba2", config=tiny_mamba.tiny_config("mamba2", hidden_size=128, **sizes))

    return write


MAKERS = {
    "llama": lambda folder: tiny_models.make_checkpoint(folder, "llama", **WIDE),
    "mistral": lambda folder: tiny_models.make_checkpoint(folder, "mistral", **WIDE),
    "neox": lambda folder: tiny_models.make_checkpoint(folder, "neox", hidden_size=128, intermediate_size=192),
    "mixtral": written(mixtral),
    "qwen3": written(qwen3),
    "mamba2": mamba2(2),
    "mamba2 of one group": mamba2(1),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folders = made_once(tmp_path_factory, lambda folder, family: MAKERS[family](folder))

    def engine_of(family, dtype):
        options = VerifierOptions(
            name="tiny", max_length=256, max_sessions=2, prefill_chunk=128, dtype=dtype, threads=2
        )
        return VerifierEngine.load(folders(family)[0], options)

    return engine_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MAKERS)
def test_steps_of_few_rows_and_trees_have_the_bits_of_a_whole_text(engines, family, dtype):
    if why_not_compiled(torch.zeros(2, 2, dtype=dtype)):
        pytest.skip("the products of this dtype are the library's here")
    engine = engines(family, dtype)
    runner = engine.runner
    assert set(FEW_ROWS) < set(runner.buckets) and engine.dependent == ()
    ids = np.random.default_rng(1).integers(0, runner.target.vocabulary, 90).tolist()
    for rows in (*FEW_ROWS, ROW_MULTIPLE):
        parents = [-1, *(max(0, row - 2) for row in range(1, rows))]
        tree = DraftTree.of([ids[-1], *range(1, rows)], parents)
        logits = runner.tree_logits(ids, tree)
        for row in range(rows):
            path = [row]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            text = [*ids[:-1], *(int(tree.tokens[each]) for each in path)]
            alone = runner.tree_logits(text, DraftTree.of([text[-1]], [-1]))
            assert torch.equal(alone[0], logits[row]), (rows, row)
