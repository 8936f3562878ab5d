"""Gives attention layers of a target a forward of few calls: the products for queries, keys and values, an attention
that also rotates them, and the output's product.

A layer qualifies if this forward has the bits of its own. Two things are compared for recorded rows: the arguments that
the layer passes to the attention with our rotation of the layer's products, and the layer's result with its output
layer's product of what the attention returns. Both are compared at several scales, as a layer may clamp large numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from tree_kernels.tree_attention import Layout, RowRotation, TreeRows
from tree_kernels.tree_attention.compiled import CompiledStep, attend_compiled, compiled_step, layout_for

from verifier_service.models.families import attending_by
from verifier_service.models.scaled_rows import SCALES, same_bits, scaled_results
from verifier_service.models.seats import ATTENTION, ForwardContext, ProbedLayer, Seat

RECORDING = "dendro_recording"
"""The attention that records its arguments and returns random rows."""
PROJECTIONS, OUTPUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
"""Names of a layer's products."""
TOGETHER, ITS_OUTPUT = "query_key_value", "dense"
"""Names of the products of a layer with a single one for queries, keys and values, which lie beside each other for each
head."""
NORMS = ("q_norm", "k_norm")
"""Names of the norms of heads, which a layer need not have."""
ROWS = 8
"""Rows of the recorded forward."""
FARTHEST = 1 << 20
"""Recorded positions are below this, also where a model has more positions or no last one."""


@dataclass(frozen=True, slots=True)
class Attends:
    """Parameters of the attention of a layer that has our forward."""

    layer: int  # the layer's number among the attention layers
    layout: Layout
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values [heads, rows, dim], before their rotation."""


class AttentionForm(Protocol):
    """An attention of this project that rotates queries and keys and writes keys and values to pages."""

    def layout_of(self, layer: ProbedLayer) -> Layout | None:
        """Called once a layer when a model is loaded. Returns the layout of the layer's pages; None if this form does
        not attend the layer."""
        ...

    def projections(self, layer: Any, layout: Layout) -> Callable[[Tensor], Heads]:
        """Called once for each layer that gets the new forward. Returns a function from the layer's rows [1, rows, D]
        to their queries, keys and values."""
        ...

    def serves(self, run: ForwardContext, attends: Attends) -> bool:
        """Called at each call of a layer. True if this form can attend the current forward's rows and pages."""
        ...

    def attend(self, heads: Heads, run: ForwardContext, attends: Attends, rotation: RowRotation) -> Tensor:
        """Called where this form serves. Returns the attention [rows, heads, dim] of the current forward's rows."""
        ...

    def passes(self, heads: Heads, given: Heads, layout: Layout, scaling: float, rotation: RowRotation) -> bool:
        """Called when a model is loaded. True if this form's rotation of `heads` has the bits of `given`, the heads
        that the layer passed to its attention."""
        ...


class CompiledAttention:
    """Attention by the compiled kernel, on a CPU."""

    def layout_of(self, layer: ProbedLayer) -> Layout:
        return layout_for(layer.layout, layer.dtypes)

    def projections(self, layer: Any, layout: Layout) -> Callable[[Tensor], Heads]:
        return partial(projected, layer, layout)

    def serves(self, run: ForwardContext, attends: Attends) -> bool:
        # Rows of other types belong to an accelerator's kernels, which transformers calls by its attention interface.
        return isinstance(run.step, TreeRows)

    def attend(self, heads: Heads, run: ForwardContext, attends: Attends, rotation: RowRotation) -> Tensor:
        assert run.pages is not None
        pool, how = run.pages.layers[attends.layer], (attends.window, attends.softcap, attends.sinks)
        return attend_compiled(*heads, pool, run.compiled_step, attends.layout, attends.scaling, *how, rotation)

    def passes(self, heads: Heads, given: Heads, layout: Layout, scaling: float, rotation: RowRotation) -> bool:
        step, pools = recorded_step(), [layout.pool(1 + ROWS, rotation.cos.device) for _ in range(2)]
        ours = attend_compiled(*heads, pools[0], step, layout, scaling, rotation=rotation)
        theirs = attend_compiled(*given, pools[1], step, layout, scaling)
        return ours.dtype == theirs.dtype and same_bits(*pools) and same_bits(ours, theirs)


@dataclass(slots=True)
class _Recorded:
    """Inputs and result of a layer, and the arguments that it passed to the attention."""

    scale: float = 1.0  # factor on the attention's results
    args: tuple[Any, ...] = ()
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
    found.attended = rows.to(query) * found.scale
    return found.attended, None


AttentionInterface.register(RECORDING, _recording_attention)


def use_attention_layers(model: PreTrainedModel, run: ForwardContext, positions: int, form: AttentionForm) -> int:
    """Replace the forwards of all qualifying attention layers. Returns how many qualify.

    positions: number of positions that the model has; rows are recorded up to the last one, as some layers scale far
    queries. Called after the layers' products have got their forms.
    """
    layers = [module for module in model.modules() if _has_parts(module, form)]
    with_hooks = []
    try:
        for layer in layers:
            with_hooks.append(layer.register_forward_hook(_note, with_kwargs=True))
        with recording(model, positions), attending_by(model, RECORDING):
            count = 0
            for layer in layers:
                found = _recorded.get(id(layer))
                if found is not None and (forward := _agreeing_forward(layer, run, found, form)) is not None:
                    layer.forward = forward
                    count += 1
            return count
    finally:
        for hook in with_hooks:
            hook.remove()


@contextmanager
def recording(model: PreTrainedModel, positions: int) -> Iterator[None]:
    """Run one forward of ROWS rows, whose attention returns random rows. Inputs and results of the attention layers are
    recorded until the context ends. positions: number of positions that the model has; the rows are spread over the
    first FARTHEST of them"""
    rows = torch.arange(ROWS, device=model.device)
    tokens = rows * 7 % model.config.get_text_config().vocab_size
    places = rows * (min(positions, FARTHEST) - 1) // (ROWS - 1)
    try:
        # A family's forward may raise anything; layers that are not recorded keep their own forwards.
        with suppress(Exception), attending_by(model, RECORDING), torch.inference_mode():
            model(input_ids=tokens[None], position_ids=places[None], use_cache=False)
        yield
    finally:
        _recorded.clear()


def _note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
    found = _recorded.setdefault(id(module), _Recorded())
    found.args, found.given = given, named
    found.made = made[0] if isinstance(made, tuple) and len(made) == 2 and made[1] is None else None


def _has_parts(module: Any, form: AttentionForm) -> bool:
    def has(*names: str) -> bool:
        return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)

    return has(*PROJECTIONS, OUTPUT) or (has(TOGETHER, ITS_OUTPUT) and not isinstance(form, CompiledAttention))


def _output(layer: Any) -> nn.Module:
    made: nn.Module = layer.o_proj if hasattr(layer, OUTPUT) else layer.dense
    return made


def hidden_of(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """The hidden rows [1, rows, D] among a layer's arguments; None if there are none."""
    found = args[0] if len(args) == 1 else None if args else named.get("hidden_states")
    return found if isinstance(found, Tensor) else None


def rotation_of(given: dict[str, Any]) -> RowRotation | None:
    """The cosines and sines among a layer's arguments; None if there are none of the expected shape."""
    match given.get("position_embeddings"):
        case (Tensor() as cos, Tensor() as sin) if cos.shape == sin.shape and cos.dim() == 3 and len(cos) == 1:
            return RowRotation(cos[0], sin[0])
    return None


def projected(layer: Any, layout: Layout, hidden: Tensor) -> Heads:
    """Queries, keys and values of hidden rows [1, rows, D]."""
    if hasattr(layer, TOGETHER):
        heads = layer.query_key_value(hidden).view(hidden.shape[1], layout.kv_heads, -1).transpose(0, 1)
        query, key, value = heads.split([layout.key_dim, layout.key_dim, layout.value_dim], 2)
        return query, key, value
    return in_heads(layer, layout, *(getattr(layer, name)(hidden) for name in PROJECTIONS))


def in_heads(layer: Any, layout: Layout, query: Tensor, key: Tensor, value: Tensor) -> Heads:
    """Divide the results [1, rows, heads * dim] of a layer's products into heads, with the layer's norms, if any."""
    query, key = (each[0].unflatten(1, (-1, layout.key_dim)) for each in (query, key))
    value = value[0].unflatten(1, (-1, layout.value_dim))
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def recorded_step() -> CompiledStep:
    """A step of ROWS rows of one text, in slots from 1 on."""
    rows = torch.arange(ROWS)
    slots = rows + 1
    near = torch.cat([torch.zeros(ROWS, ROWS, dtype=torch.int64), slots.expand(ROWS, -1).tril()], 1)
    return compiled_step(TreeRows(rows, slots, near, [], ROWS))


def _agrees(layer: Any, layout: Layout, scale: float, found: _Recorded, form: AttentionForm) -> bool:
    """True if the new forward gives, for the recorded rows, the recorded arguments of the attention and the recorded
    result of the layer."""
    rotation, hidden = rotation_of(found.given), hidden_of(found.args, found.given)
    if rotation is None or hidden is None or rotation.cos.dtype != hidden.dtype or found.made is None:
        return False
    if found.query is None or found.key is None or found.value is None or found.attended is None:
        return False
    given = found.query[0], found.key[0], found.value[0]
    if not form.passes(projected(layer, layout, hidden), given, layout, scale, rotation):
        return False
    return same_bits(_output(layer)(found.attended.reshape(1, ROWS, -1)), found.made)


def _agreeing_forward(
    layer: Any, run: ForwardContext, found: _Recorded, form: AttentionForm
) -> Callable[..., Any] | None:
    """The new forward of a layer; None where its results differ from the layer's own, at any of the scales."""
    seat: Seat = layer.dendro_seat
    layout, library = form.layout_of(run.probed[seat.index]), layer.forward
    if layout is None:
        return None
    scale = layout.key_dim**-0.5 if found.scaling is None else found.scaling
    names = (*PROJECTIONS, OUTPUT, TOGETHER, ITS_OUTPUT, *NORMS)
    parts = [getattr(layer, name) for name in names if isinstance(getattr(layer, name, None), nn.Module)]
    try:
        with torch.inference_mode():
            if not _agrees(layer, layout, scale, found, form):
                return None
            for factor in SCALES[1:]:
                with scaled_results(parts, factor):
                    again = _recorded[id(layer)] = _Recorded(factor)
                    layer(*found.args, **found.given)
                    if not _agrees(layer, layout, scale, again, form):
                        return None
    except Exception:  # a layer with parts of these names may use them in any way
        return None
    attends = Attends(seat.index, layout, scale, found.window, found.softcap, found.sinks)
    expected, output, projections = (
        (len(found.args), found.given.keys()),
        _output(layer),
        form.projections(layer, layout),
    )

    def ours(hidden: Tensor, rotation: RowRotation) -> Tensor:
        rows = form.attend(projections(hidden), run, attends, rotation)
        made: Tensor = output(rows.view(1, len(rows), -1))
        return made

    layer.dendro_attends, layer.dendro_attention = attends, ours

    def forward(*args: Any, **named: Any) -> Any:
        rotation = rotation_of(named) if (len(args), named.keys()) == expected else None
        if rotation is None or run.pages is None or layer.config._attn_implementation != ATTENTION:
            return library(*args, **named)
        if not form.serves(run, attends):
            return library(*args, **named)
        hidden = hidden_of(args, named)
        assert hidden is not None
        return ours(hidden, rotation), None

    return forward
