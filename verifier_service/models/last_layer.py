"""Runs a target's last layer on the rows whose logits are wanted: only that layer's keys and values of the other rows,
such as a prompt's, are read later.

The layer's attention runs on all rows, what follows it on the wanted rows. A model qualifies if the logits of the
wanted rows have the bits that they have where the layer runs on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from tree_kernels import ROW_MULTIPLE

from verifier_service.models.families import attending_by
from verifier_service.models.seats import ForwardContext

OWN_VALUES = "dendro_own_values"
"""The attention of rows that see only themselves: a row's result is its own value."""

ROWS = 2 * ROW_MULTIPLE
"""Rows of the step that a model is checked with; half of them are wanted."""


def are_few(wanted: int, rows: int) -> bool:
    """True if so few rows of a step are wanted that running the last layer on these alone saves time."""
    return 4 * wanted <= 3 * rows


def _own_values(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **ignored: Any
) -> tuple[Tensor, None]:
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


AttentionInterface.register(OWN_VALUES, _own_values)

Forward = Callable[..., Any]


@contextmanager
def _with_forward(module: Any, forward: Forward) -> Iterator[None]:
    """Context in which a module has this forward."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class LastLayer:
    """Replaces the forwards of a model's last layer, of the layer's attention and of the norm before the attention,
    while only some rows are wanted."""

    def __init__(self, layer: nn.Module, attention: nn.Module, norm: nn.Module | None) -> None:
        """norm: the module whose result is the attention's input; None if the layer's own input is."""
        self._layer, self._attention, self._norm = layer, attention, norm
        self._wanted = torch.zeros(0, dtype=torch.int64)
        self._rows = 0  # rows of the step; 0 until the forward has reached the layer
        self._taken: list[tuple[Tensor, Tensor]] = []  # pairs: the wanted rows of a tensor, and the whole tensor

    @contextmanager
    def of_rows(self, wanted: Tensor) -> Iterator[None]:
        """Context in which the layer returns only these rows [k] of a step."""
        self._wanted = wanted
        # The class's own forward calls the layer's parts; a forward that has replaced it may run them in one call.
        library: Forward = type(self._layer).forward.__get__(self._layer)
        try:
            with ExitStack() as undo:
                undo.enter_context(_with_forward(self._layer, partial(self._run_layer, library)))
                undo.enter_context(_with_forward(self._attention, partial(self._attend, self._attention.forward)))
                if self._norm is not None:
                    undo.enter_context(_with_forward(self._norm, partial(self._run_norm, self._norm.forward)))
                yield
        finally:
            self._rows = 0
            self._taken.clear()

    def _run_layer(self, forward: Forward, *args: Any, **named: Any) -> Any:
        self._rows = (args[0] if args else named["hidden_states"]).shape[1]
        return forward(*map(self._take, args), **{name: self._take(value) for name, value in named.items()})

    def _attend(self, forward: Forward, *args: Any, **named: Any) -> Any:
        made, *others = forward(*map(self._whole, args), **{name: self._whole(value) for name, value in named.items()})
        return made[:, self._wanted], *others

    def _run_norm(self, forward: Forward, hidden: Tensor) -> Any:
        return self._take(forward(self._whole(hidden)))

    def _take(self, given: Any) -> Any:
        """The wanted rows of tensors [1, rows, ...]; anything else as it is."""
        if isinstance(given, tuple):
            return tuple(map(self._take, given))
        if not isinstance(given, Tensor) or given.shape[:2] != (1, self._rows):
            return given
        taken = given[:, self._wanted]
        self._taken.append((taken, given))
        return taken

    def _whole(self, given: Any) -> Any:
        """All rows of what `_take` returned; anything else as it is."""
        if isinstance(given, tuple):
            return tuple(map(self._whole, given))
        return next((whole for taken, whole in self._taken if taken is given), given)


def use_last_layer(model: PreTrainedModel, run: ForwardContext) -> LastLayer | None:
    """The model's last layer, made to run on wanted rows alone; None where logits would have other bits.

    Called after the model's products and attention have got their forms.
    """
    places = torch.arange(ROWS, device=model.device)
    wanted = places.flip(0)[::2]
    tokens = (places * 7 + 1) % model.config.get_text_config().vocab_size

    def logits() -> Tensor:
        found: Tensor = model(input_ids=tokens[None], position_ids=places[None], use_cache=False).logits[0]
        return found

    # A family's forward may raise anything; the last layer then keeps running on all rows.
    with suppress(Exception), attending_by(model, OWN_VALUES), torch.inference_mode():
        parts, whole = _parts(model, run, logits)
        if parts is None:
            return None
        last = LastLayer(*parts)
        with last.of_rows(wanted):
            found = logits()
        if torch.equal(found, whole[wanted]):
            return last
    return None


Parts = tuple[nn.Module, nn.Module, nn.Module | None]
"""A layer, its attention, and the norm before that, as `LastLayer` takes them."""


def _parts(model: PreTrainedModel, run: ForwardContext, forward: Callable[[], Tensor]) -> tuple[Parts | None, Tensor]:
    """Finds the last layer's parts by running `forward`, and returns them with its result. The parts are None where the
    attention's input is neither the result of a part nor the layer's input."""
    named: dict[str, Any] = dict(model.named_modules())
    name = next(name for name, module in named.items() if module.dendro_seat.index == len(run.probed) - 1)
    attention, layer = named[name], named[name.rpartition(".")[0]]
    given: dict[nn.Module, list[object]] = {}
    made: list[tuple[nn.Module, object]] = []

    def note(module: nn.Module, args: tuple[Any, ...], others: dict[str, Any], result: object) -> None:
        given[module] = [*args, *others.values()]
        made.append((module, result))

    with ExitStack() as hooks:
        for module in (layer, *layer.children()):
            hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        whole = forward()
    norm = next((part for part, result in made if any(each is result for each in given[attention])), None)
    if norm is None and not any(each is own for each in given[attention] for own in given[layer] if _has_rows(each)):
        return None, whole
    return (layer, attention, norm), whole


def _has_rows(given: object) -> bool:
    return isinstance(given, Tensor) and given.shape[:2] == (1, ROWS) and given.is_floating_point()
