"""Writes a Llama checkpoint as a GGUF file for llama.cpp: the same weights, in the dtype that our verifier runs.

llama.cpp rotates neighbouring pairs of a head's channels, transformers the two halves of a head. The rows of the query
and key projections are therefore permuted; norms are stored in float32, as llama.cpp requires.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from dendro.errors import BadRequest
from tree_layers.gguf_weights import gguf_settings

from cluster.checkpoints import check_library_has
from cluster.training.checkpoints import has_tied_head

GGUF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The GGUF format's names of the dtypes."""
INTERLEAVED = (".self_attn.q_proj.weight", ".self_attn.k_proj.weight")


def check_exportable(checkpoint: Path, dtype: str) -> Any:
    """The checkpoint's configuration. Raises BadRequest, naming the property, for one that is not written as GGUF."""
    from transformers import AutoConfig

    check_library_has(checkpoint)
    config: Any = AutoConfig.from_pretrained(checkpoint)
    required = {
        "model_type": (config.model_type, "llama"),
        "quantization_config": (getattr(config, "quantization_config", None), None),
        "hidden_act": (getattr(config, "hidden_act", None), "silu"),
        "attention_bias": (getattr(config, "attention_bias", False), False),
        "mlp_bias": (getattr(config, "mlp_bias", False), False),
        "rope_parameters.rope_type": ((getattr(config, "rope_parameters", None) or {}).get("rope_type"), "default"),
    }
    for name, (value, only) in required.items():
        if value != only:
            raise BadRequest("target", f"its {name} is {value!r:.100}, and the GGUF export has only {only!r}")
    if dtype not in GGUF_TYPES:
        raise BadRequest("target", f"its dtype is {dtype}, and the GGUF export has only {', '.join(GGUF_TYPES)}")
    return config


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A query or key projection [heads * width, hidden] with each head's two halves of rows interleaved."""
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)


def write_gguf(checkpoint: Path, file: Path, dtype: str) -> None:
    """Write the checkpoint's model, without its tokenizer, to `file`; its matrices are stored in `dtype`.

    Raises BadRequest as `check_exportable`, and ImportError without the library `gguf`.
    """
    config = check_exportable(checkpoint, dtype)
    import gguf
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # progress bars of weights that are unpacked
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **gguf_settings(checkpoint))
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_file_type(getattr(gguf.LlamaFileType, _file_type(dtype)))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")  # prompts and answers are token ids
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = dict(zip(INTERLEAVED, (config.num_attention_heads, config.num_key_value_heads), strict=True))
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and has_tied_head(model):
            continue  # llama.cpp takes the embedding where there is no head
        named = names.get_name(name, try_suffixes=(".weight",))
        if named is None:
            raise BadRequest("target", f"its tensor {name} has no name in a GGUF file of a Llama")
        ending = next((each for each in INTERLEAVED if name.endswith(each)), None)
        _add(gguf, writer, named, interleaved(weight, heads[ending]) if ending else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _file_type(dtype: str) -> str:
    return "ALL_F32" if dtype == "float32" else f"MOSTLY_{GGUF_TYPES[dtype]}"


def _add(gguf: Any, writer: Any, name: str, weight: torch.Tensor) -> None:
    """Add a tensor bit for bit, or in float32 if it is a vector."""
    weight = weight.detach().float() if weight.dim() == 1 else weight.detach()
    kind = getattr(gguf.GGMLQuantizationType, GGUF_TYPES[str(weight.dtype).removeprefix("torch.")])
    if weight.dtype == torch.bfloat16:  # numpy has no such dtype; the writer derives the shape from the bytes
        weight = weight.contiguous().view(torch.uint8)
    writer.add_tensor(name, weight.numpy(), raw_dtype=kind)
