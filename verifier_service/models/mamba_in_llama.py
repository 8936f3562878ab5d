"""Mamba-in-Llama: a Llama in which mixers of Mamba-2 replace the attention of some layers (arXiv 2408.15237).

The library has no class for it. A checkpoint is Llama's with a `mamba_config.json`, which states the layers with
attention; the others have mixers. As keys and values in an attention, x and B are shared by r consecutive heads; each
head has its own C.

H heads of N channels (their state is N x N), X = H / r heads that have an x and a B of their own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from tree_layers.checkpoint import MAMBA_CONFIG, decoded, read_config
from tree_layers.errors import CheckpointError
from tree_layers.library_mixers import GroupedNorm

GATED_EPS = 1e-5
"""Epsilon of the norm after the gate; no checkpoint sets another."""

PURE_MAMBAS = ("mamba", "mamba2")
"""Families whose checkpoints may have state-spaces' layout."""

KEYS = {"d_model", "ssm_cfg", "rms_norm_eps", "vocab_size", "d_inner", "d_xb", "intermediate_size", "hidden_act"}
KEYS |= {"n_layer", "attn_layers"}
LLAMAS = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
}
"""Keys of `mamba_config.json` that Llama's configuration has too: their names in Llama's configuration."""
DEFAULTS = {
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "repeat_kv_before_conv": False,
    "bias": False,
    "conv_bias": True,
}
"""Keys of `ssm_cfg` that change the function, and their only supported values."""
WITHOUT_EFFECT = {"expand", "headdim", "d_ssm", "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor"}
WITHOUT_EFFECT |= {"chunk_size", "use_mem_eff_path", "sequence_parallel"}
"""Keys of `ssm_cfg` that are for training or the form of a kernel, or follow from d_inner and d_state."""


class MambaInLlamaConfig(LlamaConfig):
    """Llama's configuration, and that of the mixers in layers of type `linear_attention`."""

    model_type = "mamba_in_llama"
    base_model_tp_plan: ClassVar[dict[str, Any]] = {}  # `heads.py` plans attention and MLP

    layer_types: list[str] | None = None
    mixer_inner: int = 0  # H N
    mixer_shared: int = 0  # X N
    mixer_state: int = 0  # N
    mixer_conv: int = 0  # taps
    mixer_dt_low: float = 0.0
    mixer_dt_high: float = math.inf
    mixer_norm_eps: float = 0.0  # epsilon of the norms before mixers and their MLPs


class MambaInLlamaMixer(nn.Module):
    """The weights of a mixer, named as in a checkpoint, with the attributes of the library's mixers. `seat_mixers` sets
    its forward."""

    activation = "silu"

    def __init__(self, config: MambaInLlamaConfig) -> None:
        super().__init__()
        self.intermediate_size = config.mixer_inner
        self.ssm_state_size = config.mixer_state
        self.num_heads = config.mixer_inner // config.mixer_state
        self.n_groups = config.mixer_shared // config.mixer_state
        self.repeats = self.num_heads // self.n_groups
        self.conv_dim = 2 * config.mixer_shared + config.mixer_inner
        self.time_step_limit = (config.mixer_dt_low, config.mixer_dt_high)
        rows = self.intermediate_size + self.conv_dim + self.num_heads  # z, x, B, C, dt
        self.in_proj = nn.Linear(config.hidden_size, rows, bias=False)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, config.mixer_conv, groups=self.conv_dim)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        weight = nn.Parameter(torch.ones(self.intermediate_size))
        self.norm = GroupedNorm(weight, self.ssm_state_size, GATED_EPS)
        self.out_proj = nn.Linear(self.intermediate_size, config.hidden_size, bias=False)


class MambaInLlamaLayer(nn.Module):
    """Llama's layer with a mixer."""

    def __init__(self, config: MambaInLlamaConfig) -> None:
        super().__init__()
        self.mamba = MambaInLlamaMixer(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.mixer_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.mixer_norm_eps)

    def forward(self, hidden_states: Tensor, **ignored: Any) -> Tensor:
        """Run the layer on hidden_states [1, rows, hidden]. Other arguments that Llama's model passes are ignored."""
        hidden_states = hidden_states + self.mamba(self.input_layernorm(hidden_states))
        after: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return after


class MambaInLlamaForCausalLM(LlamaForCausalLM):
    """Llama with mixers in the layers of type `linear_attention`."""

    config: MambaInLlamaConfig
    config_class = MambaInLlamaConfig

    def __init__(self, config: MambaInLlamaConfig) -> None:
        super().__init__(config)
        for place, kind in enumerate(config.layer_types or ()):
            if kind == "linear_attention":
                self.model.layers[place] = MambaInLlamaLayer(config)


AutoModelForCausalLM.register(MambaInLlamaConfig, MambaInLlamaForCausalLM)


def library_config(folder: Path) -> PreTrainedConfig:
    """A checkpoint's configuration as the library's models take it. Raises CheckpointError for an unsupported one of
    Mamba-in-Llama, and what the library raises for others."""
    fields = read_config(folder)
    if fields["model_type"] in PURE_MAMBAS:
        return AutoConfig.for_model(**decoded(fields))
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if quantisation := getattr(config, "quantization_config", None):
        config.quantization_config = {**quantisation, "dequantize": True}  # done on every device
    return _with_mixers(folder, config) if (folder / MAMBA_CONFIG).is_file() else config


def _with_mixers(folder: Path, config: PreTrainedConfig) -> MambaInLlamaConfig:
    fields = _read(folder)
    where = f"{folder}: {MAMBA_CONFIG}"
    if config.model_type != "llama":
        raise CheckpointError(f"{where} beside a {config.model_type}: mixers are supported only in a llama")
    for key, llamas in LLAMAS.items():
        if fields.get(key) is not None and fields[key] != getattr(config, llamas):
            raise CheckpointError(f"{where}: {key} is {fields[key]!r}, but {llamas} is {getattr(config, llamas)!r}")
    ssm = fields["ssm_cfg"]
    layers = config.num_hidden_layers
    attending = fields["attn_layers"]
    if not set(attending) <= set(range(layers)):
        raise CheckpointError(f"{where}: attn_layers {attending} are not all among its {layers} layers")
    state, groups = _whole(where, ssm, "ssm_cfg.d_state", 128), _whole(where, ssm, "ssm_cfg.ngroups")
    inner = _whole(where, fields, "d_inner", groups * state)
    shared = _whole(where, fields, "d_xb")
    if inner != groups * state:
        raise CheckpointError(f"{where}: d_inner {inner} is not ngroups {groups} times d_state {state}")
    if shared % state or inner % shared:
        raise CheckpointError(f"{where}: d_xb {shared} is no multiple of d_state {state} that divides d_inner {inner}")
    low, high = _limits(where, ssm)
    return MambaInLlamaConfig(
        **{key: value for key, value in config.to_dict().items() if key not in ("model_type", "layer_types")},
        layer_types=["full_attention" if layer in attending else "linear_attention" for layer in range(layers)],
        mixer_inner=inner,
        mixer_shared=shared,
        mixer_state=state,
        mixer_conv=_whole(where, ssm, "ssm_cfg.d_conv", 4),
        mixer_dt_low=low,
        mixer_dt_high=high,
        mixer_norm_eps=_epsilon(where, fields),
    )


def _read(folder: Path) -> dict[str, Any]:
    """Read `mamba_config.json`, and check its keys, `ssm_cfg` and the type of `attn_layers`."""
    where = f"{folder}: {MAMBA_CONFIG}"
    try:
        fields = json.loads((folder / MAMBA_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where} is unreadable: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    if unknown := sorted(set(fields) - KEYS):
        raise CheckpointError(f"{where}: unknown keys {unknown}")
    ssm, attending = fields.get("ssm_cfg"), fields.get("attn_layers")
    if not isinstance(ssm, dict):
        raise CheckpointError(f"{where}: ssm_cfg is {ssm!r}, not an object")
    if not isinstance(attending, list) or not all(type(layer) is int for layer in attending):
        raise CheckpointError(f"{where}: attn_layers is {attending!r}, not a list of numbers of layers")
    if "ngroups" not in ssm:
        raise CheckpointError(
            f"{where}: ssm_cfg has no ngroups, so the mixers are Mamba-1's; only Mamba-2's are supported"
        )
    for key, value in ssm.items():
        if key in DEFAULTS and value != DEFAULTS[key]:
            raise CheckpointError(f"{where}: ssm_cfg.{key} {value!r} is not supported, only {DEFAULTS[key]!r}")
    if unknown := sorted(set(ssm) - set(DEFAULTS) - WITHOUT_EFFECT - {"d_state", "ngroups", "d_conv", "dt_limit"}):
        raise CheckpointError(f"{where}: ssm_cfg {unknown} is not supported")
    return fields


def _whole(where: str, fields: dict[str, Any], key: str, default: int | None = None) -> int:
    """A number of 1 or more; `key` may name its object before a dot."""
    value = fields.get(key.rpartition(".")[2])
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{where}: {key} is {value!r}, not a number of 1 or more")
    return value


def _epsilon(where: str, fields: dict[str, Any]) -> float:
    value = fields.get("rms_norm_eps", 1e-5)
    if not isinstance(value, float) or not value > 0:
        raise CheckpointError(f"{where}: rms_norm_eps is {value!r}, not a number above 0")
    return value


def _limits(where: str, ssm: dict[str, Any]) -> tuple[float, float]:
    limit = ssm.get("dt_limit", (0.0, math.inf))
    try:
        low, high = map(float, limit)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: ssm_cfg.dt_limit is {limit!r}, not two numbers") from error
    return low, high


__all__ = ["MambaInLlamaConfig", "MambaInLlamaForCausalLM", "library_config"]
