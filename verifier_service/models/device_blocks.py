"""Runs the blocks of a target whose layers all have states on an accelerator, with each residual added by the norm that
follows it.

The model qualifies if, whatever its mixers return, the rows that it passes to them and its result have the bits of this
project's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_kernels.norm import RowNorm
from tree_layers.library_mixers import is_mamba1, is_mixer

from verifier_service.models.decoder_layers import NotedCall, noted
from verifier_service.models.device_norms import norm_of
from verifier_service.models.scaled_rows import SCALES, same_bits
from verifier_service.models.seats import ForwardContext

ROWS = 8
"""Rows of the text with which a model is compared."""
TOKENS = "input_ids"


@dataclass(frozen=True, slots=True)
class _Block:
    norm: RowNorm
    row_type: torch.dtype  # type that rows are rounded to before the norm
    mixer: nn.Module


@dataclass(frozen=True, slots=True)
class _Blocks:
    embed: nn.Module
    blocks: list[_Block]
    last: RowNorm
    sum_type: torch.dtype  # type of the residuals' sums

    def __call__(self, tokens: Tensor) -> Tensor:
        """The normed rows [1, rows, D] of tokens [1, rows]."""
        from tree_kernels.norm.triton import add_and_norm_rows  # a CPU may have no triton

        x, added = self.embed(tokens), list[Tensor]()  # added: the mixer's result, not yet added to the residual x
        for block in self.blocks:
            x, normed = add_and_norm_rows(x, added, block.norm, self.sum_type, block.row_type)
            added = [block.mixer(normed)]
        made: Tensor = add_and_norm_rows(x, added, self.last, self.sum_type)[1]
        return made


def use_device_blocks(model: PreTrainedModel, run: ForwardContext, vocabulary: int) -> bool:
    """Replace the forward of the model below the head, if the model qualifies. Returns True if it does.

    Called when norms and mixers have their forwards, before the target has memory for states.
    """
    layers: list[Any] = [module for module in model.modules() if _is_block(module)]
    inner: Any = next((each for each in model.modules() if [*_layers_of(each)] == layers), None)
    if not layers or inner is None:
        return False
    tokens = torch.arange(ROWS, device=model.device)[None] % vocabulary
    mixers = [layer.mixer for layer in layers]
    whole: list[NotedCall] = []
    for factor in SCALES:
        with noted([inner]) as calls, _answering(mixers, factor), torch.inference_mode():
            model(input_ids=tokens, position_ids=torch.arange(ROWS, device=model.device)[None], use_cache=False)
        whole += calls
    ours = _blocks_of(inner, layers, whole[0]) if len(whole) == len(SCALES) else None
    if ours is None:
        return False
    for call, factor in zip(whole, SCALES, strict=True):
        with _answering(mixers, factor), torch.inference_mode():
            if not same_bits(ours(tokens), call.made.last_hidden_state):
                return False
    library, first, answer = inner.forward, whole[0], type(whole[0].made)
    fixed = {name: value for name, value in first.named.items() if not isinstance(value, Tensor)}
    forwards = [layer.forward for layer in layers]

    def runs(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """True if the arguments are of the compared kind, and no block is traced or has another forward."""
        return (
            run.recurrent is not None
            and len(args) == len(first.given)
            and named.keys() == first.named.keys()
            and all(named[name] is value for name, value in fixed.items())
            and all(
                layer.forward == forward and not layer._forward_hooks and not layer.mixer._forward_hooks
                for layer, forward in zip(layers, forwards, strict=True)
            )
        )

    def forward(*args: Any, **named: Any) -> Any:
        if not runs(args, named):
            return library(*args, **named)
        return answer(last_hidden_state=ours(args[0] if args else named[TOKENS]))

    inner.forward = forward
    return True


def _layers_of(module: Any) -> Sequence[nn.Module]:
    layers = getattr(module, "layers", None)
    return [*layers] if isinstance(layers, nn.ModuleList) else ()


def _is_block(module: Any) -> bool:
    """True if a module has a norm of our kernel and a Mamba-2 mixer, and nothing else."""
    if {name for name, _ in module.named_children()} != {"norm", "mixer"} or norm_of(module.norm) is None:
        return False
    return is_mixer(module.mixer) and not is_mamba1(module.mixer)


def _blocks_of(inner: Any, layers: Sequence[Any], call: NotedCall) -> _Blocks | None:
    """The parts of a model; None where it has other parts, arguments or kinds of result."""
    embed, last = inner.get_input_embeddings(), norm_of(getattr(inner, "norm_f", None))
    answer = getattr(call.made, "last_hidden_state", None)
    if not isinstance(embed, nn.Embedding) or last is None or not isinstance(answer, Tensor) or len(call.made) != 1:
        return None
    if len(call.given) > 1 or not (call.given or TOKENS in call.named):
        return None
    blocks = [
        _Block(norm, layer.norm.weight.dtype, layer.mixer)
        for layer in layers
        if (norm := norm_of(layer.norm)) is not None
    ]
    in_float32 = getattr(layers[0], "residual_in_fp32", False)
    return _Blocks(embed, blocks, last, torch.float32 if in_float32 else embed.weight.dtype)


@contextmanager
def _answering(mixers: Sequence[Any], factor: float) -> Iterator[None]:
    """Context in which each mixer returns, in place of its own results, a function of the rows that it is given, with
    other noise for each mixer, `factor` times as large."""

    def forward_of(number: int) -> Callable[..., Tensor]:
        generator = torch.Generator().manual_seed(number)

        def forward(hidden_states: Tensor, *_: Any, **ignored: Any) -> Tensor:
            noise = torch.randn(hidden_states.shape, generator=generator.manual_seed(number)).to(hidden_states)
            return (hidden_states.roll(1, -1) + noise) * factor

        return forward

    kept = [mixer.forward for mixer in mixers]
    for number, mixer in enumerate(mixers):
        mixer.forward = forward_of(number)
    try:
        yield
    finally:
        for mixer, forward in zip(mixers, kept, strict=True):
            mixer.forward = forward
