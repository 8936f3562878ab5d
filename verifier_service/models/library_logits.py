"""Logits of a short text by the library's own modules, computed before any of them is replaced: what `check_logits`
compares the finished model with. Only the logits are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from transformers import PreTrainedModel
from tree_layers.errors import CheckpointError
from tree_layers.library_mixers import is_mixer

from verifier_service.models.comparing import in_projections, logits_of_text, short_text
from verifier_service.models.families import FamilyError, Property, attending_by
from verifier_service.models.head import Product
from verifier_service.models.scaled_rows import SCALES, near, scaled_results

HEAD_STEPS = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
"""Largest distance of the library's logits from float32 products of the same rows, as a share of a row's largest."""
CHUNK = 20
"""Tokens of a chunk of the library's scan. Its memory grows with the square of this, and of the number of chunks."""


def library_logits(
    folder: Path, model: PreTrainedModel, product: Product, vocabulary: int, positions: int
) -> Mapping[float, Tensor]:
    """The library's logits [rows, vocabulary] float32 of a short text, by the factor by which the results of the
    mixers' first projections are multiplied; for a model without mixers, by the factor 1 alone. Empty where the library
    cannot run the model, or has no class for it.

    product: computes this project's float32 logits, before the library scales or caps them. Raises FamilyError where
    the library's head differs from it.
    """
    head: Any = model.get_output_embeddings()

    def in_float32(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        exact = product(given[0])
        if not near(made[..., :vocabulary], exact, HEAD_STEPS[model.dtype]):
            raise FamilyError(folder, model.config.model_type, Property.NO_HEAD)
        return exact

    projections = in_projections(model)
    tokens = short_text(vocabulary, positions)
    found: dict[float, Tensor] = {}
    with ExitStack() as undo:
        undo.enter_context(attending_by(model, "eager"))
        undo.enter_context(_in_short_chunks(model))
        undo.enter_context(torch.inference_mode())
        undo.callback(head.register_forward_hook(in_float32).remove)
        try:
            for factor in SCALES if projections else SCALES[:1]:
                with scaled_results(projections, factor):
                    found[factor] = logits_of_text(model, tokens, None)
        except (CheckpointError, DistError, torch.OutOfMemoryError):
            raise
        except Exception:  # a family's forward may raise anything; the probe reports why
            return {}
    return found


@contextmanager
def _in_short_chunks(model: PreTrainedModel) -> Iterator[None]:
    mixers: list[Any] = [module for module in model.modules() if is_mixer(module) and hasattr(module, "chunk_size")]
    before = [mixer.chunk_size for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.chunk_size = CHUNK
        yield
    finally:
        for mixer, size in zip(mixers, before, strict=True):
            mixer.chunk_size = size
