"""Llama, Qwen2 and Qwen3 drafters, whose memory of a text is the keys and values of every token.

Qwen2 and Qwen2.5 are Llamas with biases of queries, keys and values. Qwen3 norms the queries and keys of each head, and
its configuration sets the heads' width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from dendro.shapes import MAX_ROWS
from dendro.state import Arrays
from torch import Tensor
from tree_layers.checkpoint import MAMBA_CONFIG, whole
from tree_layers.errors import CheckpointError
from tree_layers.states import as_array, as_slots, as_tensor, check_arrays
from tree_layers.weights import Checkpoint

from drafter_service.models.backbone import Ends, draft_ids_of
from drafter_service.plan import NO_NODE, Chains, Level, TextFold

LEAST_ROOM = 64
"""Tokens of the smallest text buffer; buffers grow by doubling."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose angles depend on the position alone."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary embeddings that change as a text grows, so that cached keys would have to be rotated again."""

PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Supported values of configuration keys that change the model's function."""


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """Weights of a layer. d model width, H query heads and K key-value heads of D channels, F hidden width of the
    MLP."""

    attention_norm: Tensor  # [d]
    qkv: Tensor  # [d, (H + 2 K) D]
    qkv_bias: Tensor | None  # [(H + 2 K) D]
    head_norm: Tensor | None  # [H + K, D] norm of each head's queries, then of each head's keys
    out: Tensor  # [H D, d]
    mlp_norm: Tensor  # [d]
    gate_up: Tensor  # [d, 2 F]
    down: Tensor  # [F, d]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a forward that belong to one text, and what they attend to."""

    rows: slice
    text: Tensor  # [layers, tokens, 2, K, D] keys and values of the text
    nodes: Tensor | None  # [n] node slots that the rows attend to, their own included; None: the rows themselves
    mask: Tensor  # [rows, n] float32 mask: minus infinity where a row does not attend to a node, else zero


@dataclass(frozen=True, slots=True, eq=False)
class LlamaModel(Ends):
    """A Llama, Qwen2 or Qwen3 language model."""

    layers: tuple[LlamaLayer, ...]
    heads: int  # H
    kv_heads: int  # K
    width: int  # D
    turns: Tensor  # [positions, 2, D] float32: cosine and sine of the rotary embedding, scaled
    max_length: int

    @property
    def key_layers(self) -> int:
        return len(self.layers)

    @property
    def positions(self) -> int:
        return len(self.turns)

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LlamaModel:
        """Make the model of a checkpoint. Raises CheckpointError for tensors and options that are missing, unsupported
        or of the wrong shape."""
        library = _library_config(checkpoint)
        config, kind = library.to_dict(), checkpoint.facts.model_type
        d, count, vocabulary, hidden, heads, kv_heads, positions = (
            whole(checkpoint.path, config, key)
            for key in (
                "hidden_size",
                "num_hidden_layers",
                "vocab_size",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
            )
        )
        width = config.get("head_dim") or d // heads
        for key, plain in PLAIN.items():
            if config.get(key, plain) != plain:
                raise CheckpointError(f"{checkpoint.path}: {key} {config[key]!r} is not supported in a drafter")
        if (checkpoint.path / MAMBA_CONFIG).is_file():
            raise CheckpointError(
                f"{checkpoint.path}: a Llama with mixers ({MAMBA_CONFIG}) is not supported in a drafter"
            )
        if heads % kv_heads:
            raise CheckpointError(
                f"{checkpoint.path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )

        def take(name: str, *shape: int) -> Tensor:
            return checkpoint.tensor(name, *shape).to(device, dtype)

        def projection(prefix: str, outs: dict[str, int], inner: int) -> Tensor:
            """Joined weights [inner, sum of outs], contiguous, which makes products of few rows faster."""
            parts = [take(f"{prefix}.{name}.weight", out, inner) for name, out in outs.items()]
            return torch.cat(parts).t().contiguous()

        layers = []
        projected = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
        for layer in range(count):
            prefix = f"model.layers.{layer}"
            biases, head_norm = None, None
            if kind == "qwen2":
                biases = torch.cat([take(f"{prefix}.self_attn.{name}.bias", out) for name, out in projected.items()])
            if kind == "qwen3":
                norms = (("q_norm", heads), ("k_norm", kv_heads))
                head_norm = torch.cat(
                    [take(f"{prefix}.self_attn.{name}.weight", width).expand(of, -1) for name, of in norms]
                )
            layers.append(
                LlamaLayer(
                    attention_norm=take(f"{prefix}.input_layernorm.weight", d),
                    qkv=projection(f"{prefix}.self_attn", projected, d),
                    qkv_bias=biases,
                    head_norm=head_norm,
                    out=projection(f"{prefix}.self_attn", {"o_proj": d}, heads * width),
                    mlp_norm=take(f"{prefix}.post_attention_layernorm.weight", d),
                    gate_up=projection(f"{prefix}.mlp", {"gate_proj": hidden, "up_proj": hidden}, d),
                    down=projection(f"{prefix}.mlp", {"down_proj": d}, hidden),
                )
            )
        embedding, head = checkpoint.embedding_and_head(
            "model.embed_tokens.weight", "lm_head.weight", bool(config.get("tie_word_embeddings")), vocabulary, d
        )
        return cls(
            embedding=checkpoint.read_embedding(embedding).to(device, dtype),
            layers=tuple(layers),
            norm=take("model.norm.weight", d),
            head=head[: checkpoint.facts.vocabulary].to(device, dtype).t().contiguous(),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            draft_ids=draft_ids_of(checkpoint),
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            # A tree's nodes may lie past the longest text.
            turns=_turns(checkpoint, library, positions + MAX_ROWS).to(device),
            max_length=positions,
        )

    def memory(self, texts: int, nodes: int) -> KeyMemory:
        return KeyMemory(self, texts, nodes)

    def through(self, tokens: Tensor, positions: Tensor, parts: Sequence[Rows], kept: KeptKeys) -> Tensor:
        """Hidden rows [rows, d] of tokens [rows] at these positions. Stores their keys and values in `kept`."""
        hidden = self.embed(tokens)
        cosine, sine = self.turns.index_select(0, positions)[:, :, None].unbind(1)  # [rows, 1, D] each
        rotary_heads = self.heads + self.kv_heads
        for number, layer in enumerate(self.layers):
            projected = torch.mm(self._norm(hidden, layer.attention_norm), layer.qkv)
            if layer.qkv_bias is not None:
                projected = projected + layer.qkv_bias
            projected = projected.view(len(tokens), -1, self.width)
            rotated, values = projected[:, :rotary_heads], projected[:, rotary_heads:]
            if layer.head_norm is not None:
                rotated = self._norm(rotated, layer.head_norm)
            rotated = rotated.float()
            low, high = rotated.chunk(2, 2)
            rotated = (rotated * cosine).addcmul_(torch.cat((-high, low), 2), sine).to(projected.dtype)
            queries, keys = rotated[:, : self.heads], torch.stack((rotated[:, self.heads :], values), 1)
            kept.take(number, keys)
            attended = [
                attend(
                    queries[part.rows],
                    part.text[number],
                    kept.nodes(number, part, keys),
                    part.mask,
                    self.width**-0.5,
                )
                for part in parts
            ]
            hidden = hidden + torch.mm(torch.cat(attended).flatten(1), layer.out)
            gate, up = torch.mm(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, 1)
            hidden = hidden + torch.mm(F.silu(gate) * up, layer.down)
        return hidden


class KeptKeys:
    """Stores the keys and values of a forward's rows: [rows, 2, K, D] for each layer."""

    def __init__(self, store: Tensor, slots: Any) -> None:
        """store [layers, slots, 2, K, D]   slots: index of the rows among the store's slots"""
        self._store, self._slots = store, slots

    def take(self, layer: int, keys: Tensor) -> None:
        self._store[layer, self._slots] = keys

    def nodes(self, layer: int, part: Rows, keys: Tensor) -> Tensor:
        """Keys and values [n, 2, K, D] that a part of the rows attends to besides its text."""
        return keys[part.rows] if part.nodes is None else self._store[layer].index_select(0, part.nodes)


def attend(queries: Tensor, text: Tensor, nodes: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend to a whole text and some nodes, without a copy of the text.

    queries [rows, H, D]   text [tokens, 2, K, D], nodes [n, 2, K, D] keys and values
    mask [rows, n] float32, added to the scores of the nodes   scale: factor of the scores
    returns [rows, H, D]
    """
    rows, heads, width = queries.shape
    kv_heads = text.shape[2]
    grouped = queries.view(rows, kv_heads, -1, width).transpose(0, 1).reshape(kv_heads, -1, width) * scale
    (text_keys, text_values), (keys, values) = (each.permute(1, 2, 0, 3).unbind(0) for each in (text, nodes))
    near = torch.matmul(grouped, keys.transpose(1, 2)).float().view(kv_heads, rows, -1, keys.shape[1])
    near = near.add_(mask[:, None]).view(kv_heads, -1, keys.shape[1])
    far = torch.matmul(grouped, text_keys.transpose(1, 2)).float()
    far, near = torch.cat((far, near), 2).softmax(2).to(queries.dtype).split((text.shape[0], keys.shape[1]), 2)
    attended = torch.matmul(far, text_values) + torch.matmul(near, values)
    return attended.view(kv_heads, rows, -1, width).transpose(0, 1).reshape(rows, heads, width)


class KeyModel(Protocol):
    """A model with attention layers, all of equal shapes. `KeyMemory` calls `through` once per forward."""

    @property
    def key_layers(self) -> int:
        """Number of attention layers."""
        ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def width(self) -> int:
        """Channels of a head."""
        ...

    @property
    def max_length(self) -> int: ...

    @property
    def positions(self) -> int:
        """Number of positions that rows may have."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def through(self, tokens: Tensor, positions: Tensor, parts: Sequence[Rows], kept: KeptKeys) -> Tensor:
        """Hidden rows [rows, d] of tokens [rows] at these positions. Stores their keys and values in `kept`."""
        ...


class KeyMemory:
    """Memory of attention layers: text slots with the keys and values of all tokens, in buffers that grow by doubling;
    node slots with the keys and values of one token.

    A slot keeps its buffer when it is reused, so memory never shrinks.
    """

    def __init__(self, model: KeyModel, texts: int, nodes: int) -> None:
        self._model = model
        self._layers = model.key_layers
        self._token = (2, model.kv_heads, model.width)
        none = torch.empty(self._layers, 0, *self._token, dtype=model.dtype, device=model.device)
        self._texts = [none] * texts  # [layers, room, 2, K, D] each; slot 0 stays empty
        self._nodes = none.new_empty(self._layers, nodes, *self._token)
        self._nodes[:, NO_NODE] = 0  # padding of trees, which is masked but must be finite

    @property
    def layout(self) -> str:
        kind = str(self._model.dtype).split(".")[-1]
        return f"keys-v1/{self._layers}/{self._model.kv_heads}x{self._model.width}/{kind}"

    def text_bytes(self, longest: int) -> int:
        return _room_of(min(longest, self._model.max_length)) * self.node_bytes

    @property
    def node_bytes(self) -> int:
        numbers = self._layers * 2 * self._model.kv_heads * self._model.width
        return numbers * self._model.dtype.itemsize

    def save(self, text: int, tokens: int) -> Arrays:
        return {"keys": as_array(self._texts[text][:, :tokens])}

    def check(self, arrays: Arrays, tokens: int) -> None:
        check_arrays(arrays, {"keys": ((self._layers, tokens, *self._token), self._model.dtype)})

    def load(self, text: int, arrays: Arrays) -> None:
        keys = as_tensor(arrays["keys"], self._model.dtype)
        self._room(text, text, 0, keys.shape[1])[:, : keys.shape[1]] = keys

    def chain(self, rows: Chains) -> Tensor:
        count, time = rows.tokens.shape
        causal = torch.full((time, time), -torch.inf, device=self._model.device).triu_(1)
        parts = [
            Rows(slice(row * time, (row + 1) * time), self._texts[source][:, :start], None, causal)
            for row, (source, start) in enumerate(zip(rows.source.tolist(), rows.starts.tolist(), strict=True))
        ]
        # Padding of a short row may lie past the last position; its output is not used.
        positions = np.minimum(rows.starts[:, None] + np.arange(time), self._model.positions - 1)
        keys = self._nodes.new_empty(self._layers, count * time, *self._token)
        hidden = self._through(rows.tokens.ravel(), positions.ravel(), parts, KeptKeys(keys, slice(None)))
        for row, (kept, start) in enumerate(zip(rows.kept.tolist(), rows.starts.tolist(), strict=True)):
            room = self._room(int(rows.source[row]), int(rows.target[row]), start, kept)
            room[:, start : start + kept] = keys[:, row * time : row * time + kept]
            if len(rows.roots):
                self._nodes[:, int(rows.roots[row])] = keys[:, row * time + kept]
        return hidden.view(count, time, -1)

    def level(self, rows: Level) -> Tensor:
        parts, end = [], 0
        for tree, count in enumerate(rows.counts):
            nodes, mask = rows.nodes[tree], np.where(rows.lines[tree, -count:], np.float32(0), np.float32(-np.inf))
            text = self._texts[rows.texts[tree]][:, : rows.starts[tree]]
            parts.append(Rows(slice(end, end + count), text, self._tensor(nodes), self._tensor(mask)))
            end += count
        kept = KeptKeys(self._nodes, as_slots(rows.slots, self._model.device))
        return self._through(rows.tokens, rows.positions, parts, kept)

    def fold(self, folds: Sequence[TextFold]) -> None:
        for fold in folds:
            room = self._room(fold.source, fold.target, fold.start, len(fold.path))
            room[:, fold.start : fold.start + len(fold.path)] = self._nodes[:, list(fold.path)]

    def _through(self, tokens: np.ndarray, positions: np.ndarray, parts: Sequence[Rows], kept: KeptKeys) -> Tensor:
        return self._model.through(self._tensor(tokens), self._tensor(positions), parts, kept)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def _room(self, source: int, target: int, start: int, more: int) -> Tensor:
        """The target's buffer, holding the first `start` tokens of the source, with room for `more`."""
        room, before = self._texts[target], self._texts[source]
        if room.shape[1] < start + more:
            room = before.new_empty(len(before), _room_of(start + more), *self._token)
        elif source == target:
            return room
        room[:, :start] = before[:, :start]
        self._texts[target] = room
        return room


def _room_of(tokens: int) -> int:
    """Size, in tokens, of the smallest buffer that holds `tokens`: LEAST_ROOM times a power of two.

    >>> [_room_of(tokens) for tokens in (1, 64, 65, 300)]
    [64, 64, 128, 512]
    """
    room = LEAST_ROOM
    while room < tokens:
        room *= 2
    return room


def _library(kind: str) -> tuple[Any, Any]:
    """Configuration class and rotary embedding class of transformers for a model type."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    return {
        "llama": (LlamaConfig, LlamaRotaryEmbedding),
        "qwen2": (Qwen2Config, Qwen2RotaryEmbedding),
        "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
    }[kind]


def _library_config(checkpoint: Checkpoint) -> Any:
    """Configuration as transformers reads it, with transformers' defaults for missing keys. Raises CheckpointError."""
    try:
        config = _library(checkpoint.facts.model_type)[0](**checkpoint.config)
    except Exception as error:  # transformers validates fields with exceptions of several types
        raise CheckpointError(f"{checkpoint.path}: config.json: {error}") from error
    if checkpoint.config.get("sliding_window") and getattr(config, "use_sliding_window", False):
        raise CheckpointError(f"{checkpoint.path}: use_sliding_window True is not supported in a drafter")
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        raise CheckpointError(f"{checkpoint.path}: layers of type {', '.join(others)} are not supported in a drafter")
    return config


def _turns(checkpoint: Checkpoint, config: Any, positions: int) -> Tensor:
    """Cosine and sine [positions, 2, D], computed by transformers from the configuration's rope parameters."""
    parameters = config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind in LENGTH_DEPENDENT:
        raise CheckpointError(f"{checkpoint.path}: rotary embeddings of type {kind} depend on the text's length")
    if kind not in ROPES or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{checkpoint.path}: rope_parameters {parameters} are not supported in a drafter; types: {', '.join(ROPES)}"
        )
    cosine, sine = _library(checkpoint.facts.model_type)[1](config)(torch.zeros(1), torch.arange(positions)[None])
    return torch.stack((cosine[0], sine[0]), 1).float()
