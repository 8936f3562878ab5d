"""Compares the logits of a finished model with those of the library's modules, on a short text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from transformers import AttentionInterface, PreTrainedModel
from tree_kernels import ROW_MULTIPLE
from tree_kernels.row_slots import Ints
from tree_kernels.tree_attention import TreeRows, near_window
from tree_layers.errors import CheckpointError
from tree_layers.library_mixers import is_mixer
from tree_layers.memory import Pages, pages_for
from tree_layers.tree_mixers import MixerLayout, RecurrentMemory

from verifier_service.models.families import FamilyError, Property, attending_by, beside_attention
from verifier_service.models.head import Head
from verifier_service.models.scaled_rows import noisy_results, scaled_results
from verifier_service.models.seats import ForwardContext, seat_attention
from verifier_service.recurrent import Arrangement, recurrent_rows, recurrent_step
from verifier_service.rows import text_rows

PROBED_ROWS = 40
"""Rows of the short text: more than a page's near window, and a multiple of ROW_MULTIPLE."""

BLOCK = 16
"""Tokens of a block of the mixers' memory, on the short text: it has rows that start from checkpoints."""

TOLERANCE, ROUGH_TOLERANCE = 1e-3, 0.02
"""Largest distance of a row's logits from the library's, as a share of their spread: in float32, and in bfloat16 and
float16, where our attention and the library's round in different places."""
ROUNDING = 2.0**-8
"""The relative noise that is put on each layer's attention to see how sensitive the logits are: bfloat16's rounding."""
SENSITIVITY, FINE_SENSITIVITY = 4.0, 0.02
"""Logits may also differ from the library's by this many times the distance by which noise of ROUNDING moves them: the
first in bfloat16 and float16, the second in float32."""
AGREEING, ROUGHLY_AGREEING = 0.75, 0.25
"""Share of rows whose logits must be within these bounds, in float32, and in bfloat16 and float16. Rounding may choose
another of two experts of nearly equal weight, which changes every row that sees such a row; a missing mask, bias or
position changes nearly all rows."""

NOISY = "dendro_noisy"
"""Our attention with noise of ROUNDING on its results."""


def _noisy_attention(module: nn.Module, *args: Any, **others: Any) -> tuple[Tensor, None]:
    attended, _ = seat_attention(module, *args, **others)
    generator = torch.Generator().manual_seed(attended.shape[-1])
    noise = torch.randn(attended.shape, generator=generator).to(attended)
    return attended * (1 + ROUNDING * noise), None


AttentionInterface.register(NOISY, _noisy_attention)


def short_text(vocabulary: int, positions: int) -> Tensor:
    """Tokens [rows] of the short text on which models are compared.

    vocabulary: number of tokens   positions: number of positions that the model has
    """
    count = min(PROBED_ROWS, positions // ROW_MULTIPLE * ROW_MULTIPLE)
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(0))


def check_logits(
    folder: Path,
    model: PreTrainedModel,
    head: Head,
    run: ForwardContext,
    mixers: Sequence[MixerLayout],
    tokens: Tensor,
    library: Mapping[float, Tensor],
) -> None:
    """Compare the finished model's logits of a short text with the library's. The text's rows are in order in one step
    and shuffled in another. Raises FamilyError.

    library: the library's logits, by the factor on the mixers' first projections (`library_logits`). If it is empty, a
    model without mixers is compared with its own modules around the library's attention, a model with mixers with
    nothing.
    """
    kind, dtype = model.config.model_type, model.dtype
    in_order = torch.arange(len(tokens))
    mixed = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    ours = partial(by_our_seats, model, run, mixers, tokens)

    def apart(tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits in two parts: a forward of the layers alone, then the head."""
        return head.logits(head.take(lambda: logits_of_text(model, tokens, positions)))

    try:
        with torch.inference_mode():
            if mixers:
                _check_mixers(folder, model, ours, library)
                return
            truth = library.get(1.0)
            truth = _by_the_library(model, tokens, None) if truth is None else truth
            ordered = ours(in_order)
            if not (torch.isfinite(ordered).all() and torch.isfinite(truth).all()):
                return  # infinite logits cannot be compared; the engine then refuses the dtype for this model
            shuffled = ours(mixed)
            if not torch.equal(ours(in_order, apart), ordered):
                raise FamilyError(folder, kind, Property.NO_HEAD)
            if not _near_by_noise(model, ordered, truth, lambda: ours(in_order)):
                between, placed = (_by_the_library(model, tokens, each) for each in (None, in_order))
                why = Property.OTHER_LOGITS if _agree(placed, between, dtype) else Property.POSITIONS
                raise FamilyError(folder, kind, why, _difference(ordered, truth))
            if _agree(shuffled, ordered, dtype):
                return
            unmoved, moved = (_by_the_library(model, tokens, each) for each in (None, in_order + 3))
            unread = Property.POSITIONS if torch.equal(moved, unmoved) else Property.ROWS_MIX
            raise FamilyError(folder, kind, beside_attention(model) or unread, _difference(shuffled, ordered))
    except (CheckpointError, DistError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a family's forward may raise anything
        raise FamilyError(folder, kind, Property.UNCALLABLE, f"{type(error).__name__}: {error}") from error


def _check_mixers(
    folder: Path, model: PreTrainedModel, ours: Callable[[Tensor], Tensor], library: Mapping[float, Tensor]
) -> None:
    """Compare the logits of a model with mixers with the library's, for each factor on its mixers' first
    projections."""
    for factor, truth in library.items():
        with scaled_results(in_projections(model), factor):
            run = partial(ours, torch.arange(len(truth)))
            found = run()
            if not (torch.isfinite(found).all() and torch.isfinite(truth).all()):
                continue
            if not _near_by_noise(model, found, truth, run):
                scale = "" if factor == 1 else f" where its mixers' projections are {factor:g} times as large"
                raise FamilyError(
                    folder, model.config.model_type, Property.OTHER_LOGITS, _difference(found, truth) + scale
                )


def in_projections(model: PreTrainedModel) -> list[nn.Module]:
    """The first projection of every mixer. The library's forward calls it, and so does ours."""
    mixers: Iterator[Any] = (module for module in model.modules() if is_mixer(module))
    return [mixer.in_proj for mixer in mixers]


def _near_by_noise(model: PreTrainedModel, found: Tensor, truth: Tensor, run: Callable[[], Tensor]) -> bool:
    """True if logits agree, or differ by no more than the distance by which rounding noise on mixers and attention
    moves them.

    run: computes `found` again
    """
    dtype = model.dtype
    if _agree(found, truth, dtype):
        return True
    mixers = [module for module in model.modules() if is_mixer(module)]
    with attending_by(model, NOISY), noisy_results(mixers, ROUNDING):
        noisy = run()
    most = FINE_SENSITIVITY if dtype == torch.float32 else SENSITIVITY
    return _off(found, truth, dtype) <= most * _off(noisy, found, dtype)


def _by_the_library(model: PreTrainedModel, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Logits [rows, vocabulary] of a text by transformers' eager attention, without a cache. positions: by default
    those that the model makes itself."""
    with attending_by(model, "eager"):
        return logits_of_text(model, tokens, positions)


def by_our_seats(
    model: PreTrainedModel,
    run: ForwardContext,
    mixers: Sequence[MixerLayout],
    tokens: Tensor,
    order: Tensor,
    forward: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Logits [rows, vocabulary] of a text's rows, in the text's order, by our modules in a step that has the rows in
    `order`.

    forward: computes the rows' logits from their tokens and positions; by default the library's
    """
    near = near_window(0)
    layouts = [layer.layout for layer in run.probed]
    pages = Pages(layouts, pages_for(len(tokens)), len(tokens), model.device)
    committed: Ints = order.numpy()
    part = text_rows(tokens.tolist(), committed, None, range(1, 1 + pages_for(len(tokens))), pages.scratch, near)
    run.pages = pages
    if mixers:
        arrangement = Arrangement.of(0, BLOCK, BLOCK, len(tokens))
        run.recurrent = RecurrentMemory(mixers, arrangement.tokens, arrangement.states, model.device)
        rows = recurrent_rows(arrangement.own_place(), committed, len(tokens) - 1, None, arrangement.scratch)
        run.recurrent_step = recurrent_step(rows, len(tokens), arrangement.scratch, model.device)
    try:
        run.begin(
            TreeRows(
                positions=order.to(model.device),
                slots=torch.from_numpy(part.slots).to(model.device),
                near=torch.from_numpy(part.near).to(model.device),
                far=part.far,
                padded=len(tokens),
            )
        )
        found = (forward or partial(logits_of_text, model))(tokens[order], order)
    finally:
        run.pages = run.step = run.recurrent = run.recurrent_step = None
    return found[torch.argsort(order).to(found.device)]


def logits_of_text(model: PreTrainedModel, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Logits [rows, outputs of the head] float32 of tokens [rows]. positions: by default the model's own"""
    on = model.device
    placed = {} if positions is None else {"position_ids": positions[None].to(on)}
    answer = model(input_ids=tokens[None].to(on), use_cache=False, **placed)
    logits: Tensor = answer.logits[0].float()
    return logits


def _errors(found: Tensor, truth: Tensor) -> Tensor:
    """Distance of each row's logits from the truth, [rows], as a share of their spread."""
    spread = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-30)  # a norm that overflows gives 0
    errors: Tensor = (found - truth).norm(dim=-1) / spread
    return errors


def _off(found: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """The largest error among the AGREEING (or ROUGHLY_AGREEING) share of rows with the smallest errors."""
    return float(_errors(found, truth).quantile(AGREEING if dtype == torch.float32 else ROUGHLY_AGREEING))


def _agree(found: Tensor, truth: Tensor, dtype: torch.dtype) -> bool:
    return _off(found, truth, dtype) <= (TOLERANCE if dtype == torch.float32 else ROUGH_TOLERANCE)


def _difference(found: Tensor, truth: Tensor) -> str:
    return f"rows are off by {float(_errors(found, truth).median()):.3g} of their spread"
