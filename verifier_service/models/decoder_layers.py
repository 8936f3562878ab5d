"""Gives decoder layers of a target on a CPU a forward of one compiled call (`tree_kernels.decoder_layer`).

A layer qualifies if its norms, attention and MLP have our forwards already, and the call's results for recorded rows
have the bits of the layer's own. Results of its parts are compared at several scales, as a layer may clamp large
numbers.

Where all layers qualify, one call runs them all: the model below the head then is an embedding, a rotary embedding, the
call, and a norm. For this, nothing may be computed between the layers: in a recorded forward each layer must take the
very tensor that the layer before it returned, the first layer the embedding's, and the norm the last layer's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_kernels.decoder_layer import DecoderLayers, LayerWeights, Workspace, why_not_compiled
from tree_kernels.taken_rows import take_rows
from tree_kernels.tree_attention import RowRotation, TreeRows
from tree_kernels.tree_attention.compiled import attend_compiled
from tree_layers.linear import packed_weight

from verifier_service.models.attention_layers import (
    RECORDING,
    ROWS,
    Attends,
    hidden_of,
    projected,
    recorded_step,
    recording,
    rotation_of,
)
from verifier_service.models.families import attending_by
from verifier_service.models.last_layer import are_few
from verifier_service.models.row_functions import has_row_function
from verifier_service.models.scaled_rows import SCALES, same_bits, scaled_results
from verifier_service.models.seats import ATTENTION, ForwardContext


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A module, and the inputs and result of its call."""

    module: nn.Module
    given: tuple[Any, ...]
    named: dict[str, Any]
    made: Any


def attention_of(layer: Any) -> Any:
    return layer.self_attn if hasattr(layer, "self_attn") else layer.attention


@contextmanager
def noted(modules: Iterable[nn.Module]) -> Iterator[list[NotedCall]]:
    """Context that notes every call of these modules, in order."""
    calls: list[NotedCall] = []

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        calls.append(NotedCall(module, given, named, made))

    with ExitStack() as hooks:
        for each in modules:
            hooks.callback(each.register_forward_hook(note, with_kwargs=True).remove)
        yield calls


def use_decoder_layers(model: PreTrainedModel, run: ForwardContext, positions: int) -> CompiledStack | None:
    """Replace the forwards of all qualifying decoder layers. Returns the stack if all layers qualify and run as one
    call.

    positions: number of positions that the model has. Called after `use_attention_layers`.
    """
    layers: list[Any] = [module for module in model.modules() if _has_parts(module)]
    if not layers or why_not_compiled():
        return None
    with (
        noted(module for layer in layers for module in (layer, layer.self_attn)) as found,
        recording(model, positions),
    ):
        pass
    calls = {id(call.module): call for call in found}
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
    if len(weights) < len(layers):
        return None
    own = DecoderLayers(weights, workspace, run.threads)
    return use_decoder_stack(model, layers, positions, partial(CompiledStack, run, layers, own))


def _has_parts(module: Any) -> bool:
    """True if a module has the parts of a Llama's decoder layer: an attention layer with our forward and without norms
    of heads, two norms and an MLP."""
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
    layer: Any, run: ForwardContext, workspace: Workspace, whole: NotedCall, attention: NotedCall
) -> DecoderLayers | None:
    """The call for a layer; None where the layer computes something else, or the call's bits differ from its own."""
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
    if not all(agrees_at(factor, layer, x, whole.named, _after_attention) for factor in SCALES[1:]):
        return None
    weights = _weights(layer)
    if weights is None:
        return None
    try:
        ours = DecoderLayers([weights], workspace, run.threads)
        step, pools = recorded_step(), [weights.layout.pool(1 + ROWS, x.device) for _ in range(2)]
        rows = attend_compiled(
            *projected(layer.self_attn, weights.layout, normed),
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
    except ValueError:  # the sizes of these weights do not fit each other
        return None
    if not torch.equal(found, expected[0]) or not torch.equal(*pools):
        return None
    return ours


def _forward_of(layer: Any, run: ForwardContext, ours: DecoderLayers, whole: NotedCall) -> Callable[..., Any]:
    """A layer's new forward: the compiled call, or the library's forward if the arguments differ in kind from the
    recorded ones."""
    library, keys, number = layer.forward, whole.named.keys(), layer.self_attn.dendro_attends.layer

    def forward(*args: Any, **named: Any) -> Any:
        rotation = rotation_of(named) if len(args) == 1 and named.keys() == keys else None
        if rotation is None or run.pages is None or layer.self_attn.config._attn_implementation != ATTENTION:
            return library(*args, **named)
        if not isinstance(run.step, TreeRows):  # an accelerator's kernels, which transformers calls by its interface
            return library(*args, **named)
        return ours(args[0][0], [run.pages.layers[number]], run.compiled_step, rotation)[None]

    return forward


def agrees_at(
    factor: float, layer: Any, x: Tensor, named: dict[str, Any], after: Callable[[Any, Tensor, Tensor], Tensor]
) -> bool:
    """True if a layer's result equals `after` when the rows x, and the results of the layer's parts, are `factor` times
    as large.

    after: computes the layer's result from the layer, its rows and the result of its attention
    """
    rows, attention = x * factor, attention_of(layer)
    with scaled_results((layer.input_layernorm, attention, layer.post_attention_layernorm, layer.mlp), factor):
        with noted([attention]) as calls:
            made = layer(rows, **named)
        given = hidden_of(calls[0].given, calls[0].named)
        same = given is not None and same_bits(given, layer.input_layernorm(rows))
        return same and same_bits(made, after(layer, rows, calls[0].made[0]))


def _after_attention(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """A layer's result for rows x, given what its attention returns."""
    middle = x + attended
    made: Tensor = middle + layer.mlp(layer.post_attention_layernorm(middle))
    return made


Stack = TypeVar("Stack", bound="DecoderStack")


# All layers as one call
@dataclass(frozen=True, slots=True)
class StackParts:
    """The parts of the model below the head, and how it is called and answers."""

    embed: nn.Module
    rotate: nn.Module
    norm: nn.Module
    given: dict[str, Any]  # the recorded call's named arguments
    answer: type[Any]


TOKENS, PLACES = "input_ids", "position_ids"
"""Arguments of the model below the head that a step sets."""


class DecoderStack(ABC):
    """All layers of a model as one call, between its embeddings and its norm."""

    def __init__(self, run: ForwardContext, layers: Sequence[Any], parts: StackParts) -> None:
        """layers: all layers of the model, in order, with our forwards"""
        self.parts = parts
        self._run, self._layers = run, layers
        self._forwards = [layer.forward for layer in layers]
        self._config = attention_of(layers[0]).config

    @abstractmethod
    def serves(self) -> bool:
        """Called before `normed`. True if the call can run the rows of the current forward."""

    @abstractmethod
    def normed(self, x: Tensor, rotation: RowRotation) -> Tensor:
        """Called in a forward. Runs the layers, then the norm: embeddings x [1, rows, D] -> [1, rows, D]."""

    @property
    def ready(self) -> bool:
        """True if the stack can run the rows of the current forward. It cannot during a trace, which hooks all
        layers."""
        return (
            self._run.pages is not None
            and self._config._attn_implementation == ATTENTION
            and not self._layers[0]._forward_hooks
            and self.serves()
        )

    @property
    def whole(self) -> bool:
        """True if every layer still has the forward with which the stack was made. The last one has another while it
        runs on wanted rows alone."""
        return all(
            layer.forward == forward and not layer._forward_hooks
            for layer, forward in zip(self._layers, self._forwards, strict=True)
        )

    def rotation(self, x: Tensor, positions: Tensor) -> RowRotation:
        """The rotary embedding of positions [1, rows], for hidden rows x [1, rows, D]."""
        found = rotation_of({"position_embeddings": self.parts.rotate(x, positions)})
        assert found is not None
        return found


class CompiledStack(DecoderStack):
    """All layers as one compiled call, on a CPU."""

    def __init__(self, run: ForwardContext, layers: Sequence[Any], own: DecoderLayers, parts: StackParts) -> None:
        super().__init__(run, layers, parts)
        self.own = own
        self._numbers = [attention_of(layer).dendro_attends.layer for layer in layers]

    def serves(self) -> bool:
        return isinstance(self._run.step, TreeRows)

    def normed(self, x: Tensor, rotation: RowRotation, wanted: Tensor | None = None) -> Tensor:
        """The norm's results [1, rows, D] for embeddings x [1, rows, D], or those of the `wanted` rows [k] alone."""
        assert self._run.pages is not None
        pools = [self._run.pages.layers[number] for number in self._numbers]
        made: Tensor = self.parts.norm(self.own(x[0], pools, self._run.compiled_step, rotation, wanted)[None])
        return made

    def normed_rows(self, x: Tensor, rotation: RowRotation, wanted: Tensor) -> Tensor:
        """The norm's results [k, D] of the wanted rows [k], for embeddings x [1, rows, D]. If few rows are wanted, the
        last layer's output projection and MLP run on them alone: only that layer's keys and values of the other rows
        are read later."""
        if are_few(len(wanted), x.shape[1]):
            return self.normed(x, rotation, wanted)[0]
        hidden = self.normed(x, rotation)
        taken = hidden.new_empty(len(wanted), hidden.shape[-1])
        take_rows(wanted, (hidden[0], taken))
        return taken


def use_decoder_stack(
    model: PreTrainedModel, layers: Sequence[Any], positions: int, make: Callable[[StackParts], Stack]
) -> Stack | None:
    """Replace the forward of the model below the head by a stack, if nothing but the stack's parts is computed there.
    Returns the stack; None if something else is.

    layers: all layers, in order, with our forwards   make: makes the stack of these parts of the model
    """
    with noted(model.modules()) as calls, recording(model, positions):
        pass
    inner = next((call for call in reversed(calls) if _is_below(call.module, model)), None)
    parts = inner and _parts_of(inner, calls, layers)
    if not inner or not parts:
        return None
    stack = make(parts)
    module: Any = inner.module
    library = module.forward
    fixed = {name: value for name, value in parts.given.items() if name not in (TOKENS, PLACES)}

    def runs(named: dict[str, Any]) -> bool:
        """True if the arguments are of the recorded kind, and all layers run as one call."""
        return (
            named.keys() == parts.given.keys()
            and all(named[name] is value for name, value in fixed.items())
            and stack.ready
            and stack.whole
        )

    def forward(*args: Any, **named: Any) -> Any:
        if len(args) != len(inner.given) or not runs(named):
            return library(*args, **named)
        x = parts.embed(args[0] if args else named[TOKENS])
        return parts.answer(last_hidden_state=stack.normed(x, stack.rotation(x, named[PLACES])))

    module.forward = forward
    return stack


def _is_below(module: nn.Module, model: nn.Module) -> bool:
    return module is not model and isinstance(module, PreTrainedModel)


def _parts_of(inner: NotedCall, calls: Sequence[NotedCall], layers: Sequence[nn.Module]) -> StackParts | None:
    """The parts of the model below the head; None where it computes anything else."""
    of_layers = [call for call in calls if any(call.module is layer for layer in layers)]
    if len(inner.given) > 1 or [call.module for call in of_layers] != [*layers]:
        return None
    tokens, places = inner.given[0] if inner.given else inner.named.get(TOKENS), inner.named.get(PLACES)
    first, last = of_layers[0], of_layers[-1]
    turned = first.named.get("position_embeddings")
    in_order = all(
        len(after.given) == 1 and after.given[0] is before.made for before, after in pairwise(of_layers)
    ) and all(call.named.get("position_embeddings") is turned for call in of_layers)
    others = [value for name, value in inner.named.items() if name not in (TOKENS, PLACES)]
    answer = getattr(inner.made, "last_hidden_state", None)
    alone = isinstance(answer, Tensor) and len(inner.made) == 1
    if turned is None or not in_order or not alone or any(value not in (None, False, True) for value in others):
        return None
    embed = _made_from(calls, lambda made: made is first.given[0], tokens)
    rotate = _made_from(calls, lambda made: made is turned, first.given[0], places)
    norm = _made_from(calls, lambda made: made is answer, last.made)
    if embed is None or rotate is None or norm is None:
        return None
    # A recorded result may have been changed in place afterwards, so it is computed again. (Layers were compared when
    # they got their forwards.)
    with torch.inference_mode():
        made = [*rotate(first.given[0], places), embed(tokens), norm(last.made)]
    if not all(map(same_bits, made, [*turned, first.given[0], answer])):
        return None
    return StackParts(embed, rotate, norm, inner.named, type(inner.made))


def _made_from(calls: Sequence[NotedCall], is_made: Callable[[Any], bool], *given: Any) -> nn.Module | None:
    """The module whose recorded call had exactly the inputs `given` and made the result; None if there is none."""
    for call in calls:
        values = (*call.given, *call.named.values())
        if is_made(call.made) and len(values) == len(given) and all(a is b for a, b in zip(values, given, strict=True)):
            return call.module
    return None
