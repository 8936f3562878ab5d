"""Gives the layers of a target on a CPU one compiled call: the model below the head then is an embedding, a rotary
embedding, the call, and a norm.

A model qualifies by what it computes: in a recorded forward each layer takes the very tensor that the one before
returned, the first the embedding's and the norm the last one's, so that nothing is computed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_kernels.decoder_layer import DecoderLayers
from tree_kernels.tree_attention import TreeRows

from verifier_service.models.attention_layers import recording, rotation_of
from verifier_service.models.scaled_rows import same_bits
from verifier_service.models.seats import ATTENTION, ForwardContext


@dataclass(frozen=True, slots=True)
class _ModuleCall:
    """A module, and the inputs and result of its call."""

    module: nn.Module
    given: tuple[Any, ...]
    named: dict[str, Any]
    made: Any


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of the model below the head, and how it is called and answers."""

    embed: nn.Module
    rotate: nn.Module
    norm: nn.Module
    given: dict[str, Any]  # the recorded call's named arguments
    answer: type[Any]


TOKENS, PLACES = "input_ids", "position_ids"
"""Arguments of the model below the head that a step sets."""


def use_decoder_stack(
    model: PreTrainedModel,
    run: ForwardContext,
    layers: Sequence[Any],
    own: DecoderLayers,
    positions: int,
) -> bool:
    """Replace the forward of the model below the head, if it computes what ours does. Returns whether it was replaced.

    layers: all that have our forward (`use_decoder_layers`), in order   own: one call of all of them
    """
    calls: list[_ModuleCall] = []

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        calls.append(_ModuleCall(module, given, named, made))

    with ExitStack() as hooks:
        for each in model.modules():
            hooks.callback(each.register_forward_hook(note, with_kwargs=True).remove)
        with recording(model, positions):
            pass
    inner = next((call for call in reversed(calls) if _is_below(call.module, model)), None)
    parts = inner and _parts_of(inner, calls, layers)
    if not inner or not parts:
        return False
    forwards, numbers = (
        [layer.forward for layer in layers],
        [layer.self_attn.dendro_attends.layer for layer in layers],
    )
    module: Any = inner.module
    library, config = module.forward, layers[0].self_attn.config
    fixed = {name: value for name, value in parts.given.items() if name not in (TOKENS, PLACES)}

    def runs(named: dict[str, Any]) -> bool:
        """True if the call is as the recorded one, and the layers are to run as a whole: a trace has hooks on them, and
        the last one's forward is another while it runs on some rows only."""
        return (
            named.keys() == parts.given.keys()
            and all(named[name] is value for name, value in fixed.items())
            and run.pages is not None
            and config._attn_implementation == ATTENTION
            and isinstance(run.step, TreeRows)
            and all(
                layer.forward is forward and not layer._forward_hooks
                for layer, forward in zip(layers, forwards, strict=True)
            )
        )

    def forward(*args: Any, **named: Any) -> Any:
        if args or not runs(named):
            return library(*args, **named)
        assert run.pages is not None
        x = parts.embed(named[TOKENS])
        rotation = rotation_of({"position_embeddings": parts.rotate(x, named[PLACES])})
        assert rotation is not None
        pools = run.pages.layers
        made = own(x[0], [pools[number] for number in numbers], run.compiled_step, rotation)
        return parts.answer(last_hidden_state=parts.norm(made[None]))

    module.forward = forward
    return True


def _is_below(module: nn.Module, model: nn.Module) -> bool:
    return module is not model and isinstance(module, PreTrainedModel)


def _parts_of(inner: _ModuleCall, calls: Sequence[_ModuleCall], layers: Sequence[nn.Module]) -> _Parts | None:
    """The parts of the model below the head; None where it computes anything else."""
    of_layers = [call for call in calls if any(call.module is layer for layer in layers)]
    if inner.given or [call.module for call in of_layers] != [*layers]:
        return None
    tokens, places = inner.named.get(TOKENS), inner.named.get(PLACES)
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
    # A result may have been changed where it is. (Those of layers were compared when they got their forwards.)
    with torch.inference_mode():
        made = [*rotate(first.given[0], places), embed(tokens), norm(last.made)]
    if not all(map(same_bits, made, [*turned, first.given[0], answer])):
        return None
    return _Parts(embed, rotate, norm, inner.named, type(inner.made))


def _made_from(calls: Sequence[_ModuleCall], is_made: Callable[[Any], bool], *given: Any) -> nn.Module | None:
    """The module that made a result from these very inputs; None where there is none."""
    for call in calls:
        values = (*call.given, *call.named.values())
        if is_made(call.made) and len(values) == len(given) and all(a is b for a, b in zip(values, given, strict=True)):
            return call.module
    return None
