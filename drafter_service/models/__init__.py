"""Drafter models, registered under the `model_type` of their configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from dendro.errors import BadRequest
from torch import Tensor
from tree_kernels import tree_levels
from tree_kernels.mamba_level.cpu import why_not_compiled
from tree_layers.checkpoint import read_facts, refuse_quantised
from tree_layers.errors import CheckpointError
from tree_layers.weights import Checkpoint, read_checkpoint

from drafter_service.draft_ids import DraftIds
from drafter_service.models.fused import FUSED
from drafter_service.models.llama import LlamaModel
from drafter_service.models.mamba import Mamba1Model, Mamba2Model
from drafter_service.models.memory import DrafterMemory
from drafter_service.options import FORMS

log = logging.getLogger("dendro.drafter")


class DrafterModel(Protocol):
    """A drafter model. Its memories turn tokens into hidden rows, of which the model computes logits."""

    @property
    def form(self) -> str:
        """Form of the model's forwards: `eager` or `fused`."""
        ...

    @property
    def vocabulary(self) -> int:
        """V, the number of tokens that can be guessed."""
        ...

    @property
    def draft_ids(self) -> DraftIds | None:
        """Conversion of token ids, for a model that guesses only some of the target's tokens; else None."""
        ...

    @property
    def hidden_size(self) -> int:
        """d, the width of a hidden row."""
        ...

    @property
    def max_length(self) -> int:
        """Most tokens of a text."""
        ...

    def memory(self, texts: int, nodes: int) -> DrafterMemory:
        """Called once per runner. Returns a memory with this many text slots and node slots, slot 0 of either kind
        included."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Called with the scored rows of a forward. hidden [rows, d]. Returns logits [rows, V] float32."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Called for an acceptance head. hidden [rows, d]. Returns the head's input [rows, d] float32, after the final
        norm."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Called for an acceptance head. tokens [...], any ids >= 0. Returns rows of the embedding [..., d]."""
        ...


def _of_the_library(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> DrafterModel:
    from drafter_service.models.library import LibraryDrafter  # transformers takes seconds to import

    return LibraryDrafter.of(checkpoint, dtype, device)


HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba2")
"""Model types with attention layers and layers with mixers."""
MODELS: dict[str, Callable[[Checkpoint, torch.dtype, torch.device], DrafterModel]] = {
    "llama": LlamaModel.of,
    "mamba": Mamba1Model.of,
    "mamba2": Mamba2Model.of,
    "qwen2": LlamaModel.of,
    "qwen3": LlamaModel.of,
    **dict.fromkeys((*HYBRIDS, "granite", "mistral", "olmo2"), _of_the_library),
}


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    tokenizer: Path | None = None,
    form: str = "auto",
    threads: int = 1,
) -> tuple[DrafterModel, Checkpoint]:
    """Load a drafter. Raises BadRequest with the reason if the checkpoint cannot be used, or not in this form.

    tokenizer: folder of the tokenizer, if not the checkpoint's   form: one of FORMS   threads: those of a fused model
    """
    if form not in FORMS:
        raise BadRequest("form", f"must be one of {', '.join(FORMS)}, got {form!r}")
    try:
        facts = read_facts(path, tokenizer)
        refuse_quantised(facts)
        kind = facts.model_type
        if kind not in MODELS:
            raise CheckpointError(f"{path}: a drafter of type {kind!r} is not supported; supported: {sorted(MODELS)}")
        reason = "" if form == "eager" else why_not_fused(kind, device)
        if form == "fused" and reason:
            raise BadRequest("form", f"this drafter cannot be fused: {reason}")
        checkpoint = read_checkpoint(facts)
        model = MODELS[kind](checkpoint, dtype, device)
    except CheckpointError as error:
        raise BadRequest("checkpoint", str(error)) from error
    if form != "eager" and not reason:
        model = FUSED[kind](model, threads)
    log.info("the drafter %s runs %s", path, described_form(model, facts.model_type, device, form))
    return model, checkpoint


def described_form(model: DrafterModel, kind: str, device: torch.device, wanted: str) -> str:
    """Form of a model that was loaded with `form=wanted`; for an eager one also the reason, after a colon."""
    if model.form != "eager":
        return model.form
    return f"eager: {'this form is configured' if wanted == 'eager' else why_not_fused(kind, device)}"


def why_not_fused(kind: str, device: torch.device) -> str:
    """Reason why a drafter of this `model_type` has no fused form on this device; empty if it has one.

    Compiles the form's kernels if they are not in the cache.
    """
    if kind not in FUSED:
        return f"there is no fused form of a {kind} drafter"
    if device.type != "cpu":
        return f"the fused form runs on a CPU, not on {device}"
    return why_not_compiled(kind) or tree_levels.why_not_compiled()
