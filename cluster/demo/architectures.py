"""The models of the demo pair: two targets and three drafters of the same vocabulary.

On a CPU each layer costs Python overhead, so all are shallow and wide.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from transformers import LlamaConfig, Mamba2Config, PreTrainedConfig

from cluster.demo.corpus import END_OF_TEXT_ID, VOCABULARY
from drafter_service.training.sizes import SIZES, STUDENT_KINDS, StudentKind, student_config

DrafterName = StudentKind
"""A drafter of the pair is named after its kind."""
DRAFTERS = STUDENT_KINDS

TargetName = Literal["target", "target_mamba2"]
TARGETS: tuple[TargetName, ...] = get_args(TargetName)

# Parameters. The second target has half as many, as the repository has no room for two of the Llama's size.
TARGET_LIMIT: dict[TargetName, int] = {"target": 9_000_000, "target_mamba2": 4_800_000}
DRAFTER_LIMIT = 1_200_000

_TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
    "tie_word_embeddings": True,
}


def target_config(name: TargetName) -> PreTrainedConfig:
    if name == "target_mamba2":
        return Mamba2Config(
            hidden_size=352,  # twice the drafter's, as are heads and layers: `grow` begins with that drafter
            head_dim=32,
            num_heads=22,
            state_size=64,
            n_groups=1,
            num_hidden_layers=4,
            chunk_size=64,
            **_TOKENS,
        )
    return LlamaConfig(
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        **_TOKENS,
    )


def drafter_config(name: DrafterName) -> PreTrainedConfig:
    return student_config(name, SIZES[name]["tiny"], _TOKENS)
