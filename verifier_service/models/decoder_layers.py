"""Gives decoder layers of a target on a CPU a forward of one compiled call (`tree_kernels.decoder_layer`).

A layer qualifies by what it computes: its norms, its attention and its MLP have our forwards already, and its results
for recorded rows are, bit for bit, those of the call. What its parts return is compared at several sizes, as a layer
may clamp it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_kernels.decoder_layer import DecoderLayers, LayerWeights, Workspace, why_not_compiled
from tree_kernels.tree_attention import TreeRows
from tree_kernels.tree_attention.compiled import attend_compiled
from tree_layers.linear import packed_weight

from verifier_service.models.attention_layers import (
    RECORDING,
    ROWS,
    Attends,
    projected,
    recorded_step,
    recording,
    rotation_of,
)
from verifier_service.models.decoder_stack import use_decoder_stack
from verifier_service.models.families import attending_by
from verifier_service.models.row_functions import has_row_function
from verifier_service.models.scaled_rows import SCALES, same_bits, scaled_results
from verifier_service.models.seats import ATTENTION, ForwardContext


@dataclass(slots=True)
class _Call:
    """Inputs and result of a module's call."""

    given: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    made: Any = None


def use_decoder_layers(model: PreTrainedModel, run: ForwardContext, positions: int) -> int:
    """Replace the forwards of the decoder layers that compute what ours do; returns their number.

    positions: that the model has. Called when the layers' attention has its forward (`use_attention_layers`).
    """
    layers: list[Any] = [module for module in model.modules() if _has_parts(module)]
    if not layers or why_not_compiled():
        return 0
    calls: dict[int, _Call] = {}

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        calls[id(module)] = _Call(given, named, made)

    hooks = [
        module.register_forward_hook(note, with_kwargs=True) for layer in layers for module in (layer, layer.self_attn)
    ]
    try:
        with recording(model, positions):
            pass
    finally:
        for hook in hooks:
            hook.remove()
    workspace, weights = Workspace(), list[LayerWeights]()
    for layer in layers:
        whole, attention = calls.get(id(layer)), calls.get(id(layer.self_attn))
        if whole is None or attention is None:
            continue
        with attending_by(model, RECORDING), torch.inference_mode():
            ours = _agreeing_layer(layer, run, workspace, whole, attention)
        if ours is not None:
            weights += ours.weights
            layer.forward = _forward_of(layer, run, ours, whole)
    if len(weights) == len(layers):
        use_decoder_stack(model, run, layers, DecoderLayers(weights, workspace, run.threads), positions)
    return len(weights)


def _has_parts(module: Any) -> bool:
    """True if a module has the parts of a Llama's decoder layer, whose attention is ours and norms nothing itself."""
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    return (
        isinstance(getattr(attention, "dendro_attends", None), Attends)
        and not hasattr(attention, "q_norm")
        and all(isinstance(getattr(mlp, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
        and has_row_function(mlp)
        and all(
            has_row_function(getattr(module, name, None)) for name in ("input_layernorm", "post_attention_layernorm")
        )
    )


def _weights(layer: Any) -> LayerWeights | None:
    """Packed weights of a layer; None if a product is not this project's own."""
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    parts = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    packed = [packed_weight(part) for part in (*parts, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    products = [each for each in packed if each is not None]
    if len(products) < len(packed):
        return None
    attends: Attends = attention.dendro_attends
    query, key, value, output, gate, up, down = products
    return LayerWeights(
        norms=(norms[0].weight, norms[1].weight),
        eps=(norms[0].variance_epsilon, norms[1].variance_epsilon),
        query=query,
        key=key,
        value=value,
        output=output,
        gate=gate,
        up=up,
        down=down,
        layout=attends.layout,
        scaling=attends.scaling,
        window=attends.window,
        softcap=attends.softcap,
        sinks=attends.sinks,
    )


def _agreeing_layer(
    layer: Any, run: ForwardContext, workspace: Workspace, whole: _Call, attention: _Call
) -> DecoderLayers | None:
    """Our call of a layer; None where the recorded calls are not what ours computes, or its bits are others."""
    match whole.given, attention.made:
        case (Tensor() as x,), (Tensor() as attended, None) if x.shape[:2] == (1, ROWS) and x.dim() == 3:
            pass
        case _:
            return None
    normed = layer.input_layernorm(x)
    rotation, inner = rotation_of(whole.named), attention.named.get("hidden_states")
    if rotation is None or attention.named.get("position_embeddings") is not whole.named["position_embeddings"]:
        return None
    if attention.given or not isinstance(inner, Tensor) or not torch.equal(inner, normed):
        return None
    if not isinstance(whole.made, Tensor) or not torch.equal(whole.made, _after_attention(layer, x, attended)):
        return None
    if not all(_agrees_at(factor, layer, x, whole.named) for factor in SCALES[1:]):
        return None
    weights = _weights(layer)
    if weights is None:
        return None
    try:
        ours = DecoderLayers([weights], workspace, run.threads)
        step, pools = recorded_step(), [weights.layout.pool(1 + ROWS, x.device) for _ in range(2)]
        rows = attend_compiled(
            *projected(layer.self_attn, normed, weights.layout),
            pools[0],
            step,
            weights.layout,
            weights.scaling,
            weights.window,
            weights.softcap,
            weights.sinks,
            rotation,
        )
        expected = _after_attention(layer, x, layer.self_attn.o_proj(rows.view(1, ROWS, -1)))
        found = ours(x[0], pools[1:], step, rotation)
    except ValueError:  # these weights do not fit each other as ours do
        return None
    if not torch.equal(found, expected[0]) or not torch.equal(*pools):
        return None
    return ours


def _forward_of(layer: Any, run: ForwardContext, ours: DecoderLayers, whole: _Call) -> Callable[..., Any]:
    """A layer's forward by our call; any call unlike the recorded one is the library's."""
    library, keys, number = layer.forward, whole.named.keys(), layer.self_attn.dendro_attends.layer

    def forward(*args: Any, **named: Any) -> Any:
        rotation = rotation_of(named) if len(args) == 1 and named.keys() == keys else None
        if rotation is None or run.pages is None or layer.self_attn.config._attn_implementation != ATTENTION:
            return library(*args, **named)
        if not isinstance(run.step, TreeRows):  # an accelerator's kernels run, which attend by the model's interface
            return library(*args, **named)
        return ours(args[0][0], [run.pages.layers[number]], run.compiled_step, rotation)[None]

    return forward


def _agrees_at(factor: float, layer: Any, x: Tensor, named: dict[str, Any]) -> bool:
    """True if a layer and our forward agree on rows, and results of parts, that are `factor` times as large."""
    calls: list[_Call] = []

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        calls.append(_Call(given, named, made))

    rows = x * factor
    with scaled_results((layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp), factor):
        hook = layer.self_attn.register_forward_hook(note, with_kwargs=True)
        try:
            made = layer(rows, **named)
        finally:
            hook.remove()
        same = same_bits(calls[0].named["hidden_states"], layer.input_layernorm(rows))
        return same and same_bits(made, _after_attention(layer, rows, calls[0].made[0]))


def _after_attention(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """A layer's result for rows x, given what its attention returns."""
    middle = x + attended
    made: Tensor = middle + layer.mlp(layer.post_attention_layernorm(middle))
    return made
