"""Runs the decoder layers of a target on an accelerator with each residual added by the norm that follows it.

The model qualifies as on a CPU (`decoder_layers.py`): the results of its layers for recorded rows must have the bits of
this project's forward. In a layer the MLP may follow the attention, as in Llama, or read the same rows, as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_kernels.norm import RowNorm
from tree_kernels.tree_attention import RowRotation
from tree_layers.linear import RowForms

from verifier_service.models.attention_layers import RECORDING, Attends, hidden_of, recording, use_attention_layers
from verifier_service.models.decoder_layers import (
    DecoderStack,
    NotedCall,
    StackParts,
    agrees_at,
    attention_of,
    noted,
    use_decoder_stack,
)
from verifier_service.models.device_attention import PagedAttention
from verifier_service.models.device_mlps import use_gated_mlps
from verifier_service.models.device_norms import norm_of
from verifier_service.models.families import attending_by
from verifier_service.models.scaled_rows import SCALES, same_bits
from verifier_service.models.seats import ForwardContext


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: RowNorm  # the norm before the attention
    attention: Callable[[Tensor, RowRotation], Tensor]
    mlp_norm: RowNorm
    mlp: nn.Module
    beside: bool  # True if the MLP reads the layer's input, as the attention does, and not the attention's result


def use_device_layers(model: PreTrainedModel, run: ForwardContext, positions: int, forms: RowForms) -> None:
    """Replace the forwards of the model's MLPs, attention layers and decoder layers, where they qualify.

    positions: number of positions that the model has. Called after norms and products have got their forms.
    """
    use_gated_mlps(model, forms)
    attention = PagedAttention(forms)
    if not use_attention_layers(model, run, positions, attention):
        return
    layers = [module for module in model.modules() if _has_parts(module)]
    with noted(each for layer in layers for each in (layer, attention_of(layer))) as found, recording(model, positions):
        pass
    calls = {id(call.module): call for call in found}
    own = []
    for layer in layers:
        whole, within = calls.get(id(layer)), calls.get(id(attention_of(layer)))
        if whole is None or within is None:
            return
        with attending_by(model, RECORDING), torch.inference_mode():
            beside = next((each for each in (False, True) if _agrees(layer, whole, within, each)), None)
        if beside is None:
            return
        norms = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        assert norms[0] is not None and norms[1] is not None
        own.append(_Layer(norms[0], attention_of(layer).dendro_attention, norms[1], layer.mlp, beside))
    if own:
        use_decoder_stack(model, layers, positions, partial(_DeviceStack, run, layers, own, attention))


class _DeviceStack(DecoderStack):
    def __init__(
        self,
        run: ForwardContext,
        layers: Sequence[Any],
        own: list[_Layer],
        attention: PagedAttention,
        parts: StackParts,
    ) -> None:
        super().__init__(run, layers, parts)
        self._own, self._attention = own, attention
        self._attends = [attention_of(layer).dendro_attends for layer in layers]

    def serves(self) -> bool:
        return all(self._attention.serves(self._run, each) for each in self._attends)

    def normed(self, x: Tensor, rotation: RowRotation) -> Tensor:
        return _run(self._own, x, rotation, self.parts.norm)


def _has_parts(module: Any) -> bool:
    attention = getattr(module, "self_attn", getattr(module, "attention", None))
    norms = (norm_of(getattr(module, name, None)) for name in ("input_layernorm", "post_attention_layernorm"))
    return (
        isinstance(getattr(attention, "dendro_attends", None), Attends)
        and isinstance(getattr(module, "mlp", None), nn.Module)
        and all(norm is not None for norm in norms)
    )


def _agrees(layer: Any, whole: NotedCall, attention: NotedCall, beside: bool) -> bool:
    """True if this project's forward gives the recorded result of a layer, and agrees with it at larger scales."""
    after = _after_both if beside else _after_attention
    match whole.given, attention.made:
        case (Tensor() as x,), (Tensor() as attended, None):
            inner = hidden_of(attention.given, attention.named)
        case _:
            return False
    given = attention.named.get("position_embeddings")
    if given is None or given is not whole.named.get("position_embeddings") or inner is None:
        return False
    if not same_bits(inner, layer.input_layernorm(x)) or not isinstance(whole.made, Tensor):
        return False
    if not same_bits(whole.made, after(layer, x, attended)):
        return False
    return all(agrees_at(factor, layer, x, whole.named, after) for factor in SCALES[1:])


def _after_attention(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    middle = x + attended
    made: Tensor = middle + layer.mlp(layer.post_attention_layernorm(middle))
    return made


def _after_both(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    made: Tensor = layer.mlp(layer.post_attention_layernorm(x)) + attended + x
    return made


def _run(layers: list[_Layer], x: Tensor, rotation: RowRotation, norm: nn.Module) -> Tensor:
    """The layers' result for rows x [1, rows, D], normed by `norm`."""
    from tree_kernels.norm.triton import add_and_norm_rows  # a CPU may have no triton

    added: tuple[Tensor, ...] = ()  # results of attention and MLP that are not yet added to the residual x
    for layer in layers:
        x, normed = add_and_norm_rows(x, added, layer.norm)
        attended = layer.attention(normed, rotation)
        if layer.beside:
            _, normed = add_and_norm_rows(x, (), layer.mlp_norm)
            added = layer.mlp(normed), attended
        else:
            x, normed = add_and_norm_rows(x, (attended,), layer.mlp_norm)
            added = (layer.mlp(normed),)
    last = norm_of(norm)
    if last is not None:
        return add_and_norm_rows(x, added, last)[1]
    for each in added[::-1]:
        x = x + each
    made: Tensor = norm(x)
    return made
