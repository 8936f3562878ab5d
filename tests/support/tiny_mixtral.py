"""A tiny Mixtral with random weights, a Mamba of the same tokenizer as its drafter, and a configuration of both.

python -m tests.support.tiny_mixtral FOLDER     then: dendro certify FOLDER/cluster.yaml --quick
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import MambaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.support import tiny_mamba, tiny_models

CLUSTER = """\
targets:
  mixtral: {checkpoint: target, dtype: float32, max_length: 512, resources: {cpu: 0.5}}
drafters:
  mamba: {checkpoint: drafter, resources: {cpu: 0.5}}
"""


def make_target(folder: Path, seed: int = 0) -> MixtralForCausalLM:
    """Write a float32 checkpoint into `folder`: three layers of eight experts, of which each token takes two."""
    config = MixtralConfig(
        vocab_size=tiny_models.PADDED,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        bos_token_id=tiny_models.END,
        eos_token_id=tiny_models.END,
        pad_token_id=tiny_models.END,
    )
    model = MixtralForCausalLM(config)
    tiny_models.randomise(model, seed)
    with torch.no_grad():  # so that transformers' generate never emits a token of the padding
        model.lm_head.weight[tiny_models.VOCABULARY :] = 0
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return model.eval()


def make_drafter(folder: Path, seed: int = 1) -> None:
    """Write a Mamba with random weights and the target's tokenizer into `folder`."""
    model = MambaForCausalLM(tiny_mamba.tiny_config("mamba", tiny_models.PADDED))
    tiny_mamba.randomise(model, seed)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, make in (("target", make_target), ("drafter", make_drafter)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        make(folder / name)
    (folder / "cluster.yaml").write_text(CLUSTER)


if __name__ == "__main__":
    main()
