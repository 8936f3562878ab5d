"""Gives attention layers of a target on a CPU a forward of few calls: products, one compiled call, a product.

A layer qualifies by what it computes: what it passes to the attention must be, bit for bit, what the compiled call's
rotary embedding makes of the layer's products, and what it returns must be its output layer's product of the results.
Products of several sizes are compared: a layer may clamp large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from tree_kernels.tree_attention import Layout, TreeRows
from tree_kernels.tree_attention.compiled import CompiledStep, RowRotation, attend_compiled, compiled_step

from verifier_service.models.families import attending_by
from verifier_service.models.scaled_rows import SCALES, same_bits, scaled_results
from verifier_service.models.seats import ATTENTION, ForwardContext, Seat

RECORDING = "dendro_recording"
"""The attention that records its arguments and returns random rows."""
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
"""A layer's modules that our forward calls; the norms may be absent."""
ROWS = 8
"""Rows of the recorded forward."""
FARTHEST = 1 << 20
"""The last recorded position of a model that names no last one is below this."""


@dataclass(frozen=True, slots=True)
class Attends:
    """Parameters of the attention of a layer that has our forward."""

    layer: int  # the layer's number among the attention layers
    layout: Layout
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(slots=True)
class _Recorded:
    """Inputs and result of a layer, and the arguments that it passed to the attention."""

    scale: float = 1.0  # factor on the attention's results
    given: dict[str, Any] = field(default_factory=dict)
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    attended: Tensor | None = None
    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    made: Tensor | None = None


_recorded: dict[int, _Recorded] = {}  # key: id of the layer; filled while a forward is recorded


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    found = _recorded.setdefault(id(module), _Recorded())
    found.query, found.key, found.value = query, key, value
    found.scaling, found.window, found.softcap, found.sinks = scaling, sliding_window, softcap, s_aux
    shape = 1, query.shape[2], query.shape[1], value.shape[3]
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(query.shape[1]))
    found.attended = rows.to(query.dtype) * found.scale
    return found.attended, None


AttentionInterface.register(RECORDING, _recording_attention)


def use_attention_layers(model: PreTrainedModel, run: ForwardContext, positions: int) -> int:
    """Replace the forwards of the attention layers that compute what ours do; returns their number.

    positions: that the model has. Rows are recorded at positions up to the last, as some layers scale far queries.
    Called when the layers' attention is compiled, and their products have their forms.
    """
    layers = [module for module in model.modules() if _has_parts(module)]
    with_hooks = []
    try:
        for layer in layers:
            with_hooks.append(layer.register_forward_hook(_note, with_kwargs=True))
        with recording(model, positions), attending_by(model, RECORDING):
            count = 0
            for layer in layers:
                found = _recorded.get(id(layer))
                if found is not None and (forward := _agreeing_forward(layer, run, found)) is not None:
                    layer.forward = forward
                    count += 1
            return count
    finally:
        for hook in with_hooks:
            hook.remove()


@contextmanager
def recording(model: PreTrainedModel, positions: int) -> Iterator[None]:
    """Context after a forward of ROWS rows, at positions up to the last, whose attention returned random rows."""
    rows = torch.arange(ROWS)
    tokens = rows * 7 % model.config.get_text_config().vocab_size
    places = rows * (min(positions, FARTHEST) - 1) // (ROWS - 1)
    try:
        # A family's forward may raise anything; layers that are not recorded keep theirs.
        with suppress(Exception), attending_by(model, RECORDING), torch.inference_mode():
            model(input_ids=tokens[None], position_ids=places[None], use_cache=False)
        yield
    finally:
        _recorded.clear()


def _note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
    found = _recorded.setdefault(id(module), _Recorded())
    found.given = {} if given else named
    found.made = made[0] if isinstance(made, tuple) and len(made) == 2 and made[1] is None else None


def _has_parts(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in PARTS[:4])


def rotation_of(given: dict[str, Any]) -> RowRotation | None:
    """Cosines and sines with which a layer is called; None if it has none of the expected shape."""
    match given.get("position_embeddings"):
        case (Tensor() as cos, Tensor() as sin) if cos.shape == sin.shape and cos.dim() == 3 and len(cos) == 1:
            return RowRotation(cos[0], sin[0])
    return None


def projected(layer: Any, hidden: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [heads, rows, dim] of hidden rows [1, rows, D], before their rotation."""
    query = layer.q_proj(hidden).view(hidden.shape[1], -1, layout.key_dim)
    key = layer.k_proj(hidden).view(hidden.shape[1], -1, layout.key_dim)
    value = layer.v_proj(hidden).view(hidden.shape[1], -1, layout.value_dim)
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def recorded_step() -> CompiledStep:
    """ROWS rows of one text, in slots from 1 on."""
    rows = torch.arange(ROWS)
    slots = rows + 1
    near = torch.cat([torch.zeros(ROWS, ROWS, dtype=torch.int64), slots.expand(ROWS, -1).tril()], 1)
    return compiled_step(TreeRows(rows, slots, near, [], ROWS))


def _agrees(layer: Any, layout: Layout, scale: float, found: _Recorded) -> bool:
    """True if our forward gives the recorded arguments of the attention, and the recorded result, for the same rows."""
    rotation, hidden = rotation_of(found.given), found.given.get("hidden_states")
    if rotation is None or not isinstance(hidden, Tensor) or rotation.cos.dtype != hidden.dtype or found.made is None:
        return False
    if found.query is None or found.key is None or found.value is None or found.attended is None:
        return False
    step, pools = recorded_step(), [layout.pool(1 + ROWS, hidden.device) for _ in range(2)]
    parts = projected(layer, hidden, layout)
    ours = attend_compiled(*parts, pools[0], step, layout, scale, rotation=rotation)
    theirs = attend_compiled(found.query[0], found.key[0], found.value[0], pools[1], step, layout, scale)
    if ours.dtype != theirs.dtype or not same_bits(*pools) or not same_bits(ours, theirs):
        return False
    return same_bits(layer.o_proj(found.attended.reshape(1, ROWS, -1)), found.made)


def _agreeing_forward(layer: Any, run: ForwardContext, found: _Recorded) -> Callable[..., Any] | None:
    """Our forward of a layer; None where its results are not the recorded, or others at another scale."""
    seat: Seat = layer.dendro_seat
    layout, library = run.probed[seat.index].layout, layer.forward
    scale = layout.key_dim**-0.5 if found.scaling is None else found.scaling
    parts = [getattr(layer, name) for name in PARTS if isinstance(getattr(layer, name, None), nn.Module)]
    try:
        with torch.inference_mode():
            if not _agrees(layer, layout, scale, found):
                return None
            for factor in SCALES[1:]:
                with scaled_results(parts, factor):
                    again = _recorded[id(layer)] = _Recorded(factor)
                    layer(**found.given)
                    if not _agrees(layer, layout, scale, again):
                        return None
    except Exception:  # a layer of these parts may use them in any way
        return None
    window, softcap, sinks = found.window, found.softcap, found.sinks
    layer.dendro_attends = Attends(seat.index, layout, scale, window, softcap, sinks)
    expected = found.given.keys()

    def forward(*args: Any, **named: Any) -> Any:
        rotation = None if args or named.keys() != expected else rotation_of(named)
        if rotation is None or run.pages is None or layer.config._attn_implementation != ATTENTION:
            return library(*args, **named)
        if not isinstance(run.step, TreeRows):  # an accelerator's kernels run, which attend by the model's interface
            return library(*args, **named)
        hidden = named["hidden_states"]
        query, key, value = projected(layer, hidden, layout)
        pool, step = run.pages.layers[seat.index], run.compiled_step
        made = attend_compiled(query, key, value, pool, step, layout, scale, window, softcap, sinks, rotation)
        return layer.o_proj(made.view(1, len(made), -1)), None

    return forward
