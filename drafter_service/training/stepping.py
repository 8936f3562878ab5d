"""Runs any causal model of transformers token by token."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

log = logging.getLogger("dendro.training")

CACHES = ("past_key_values", "cache_params")
"""Names of the cache in forwards and their outputs: in models with attention, and in pure state-space models."""
CHECKED_STEPS = 3
"""Number of first steps with a cache that are compared with the forward of the whole text. Without mamba-ssm's kernels
some hybrids of transformers step wrongly (Bamba with two groups, transformers 5.23)."""
APART = 0.1
"""Total variation distance of next-token probabilities, averaged over the rows, above which the cache counts as wrong.
Rounding to bfloat16 moves logits by about a hundredth."""


class SteppedText:
    """Runs a model on rows of text of equal length, with the cache that the model's own forward returns.

    If the model returns no cache, or a wrong one, it computes the whole text again at every step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        self._caches: dict[str, Any] = {}
        self._text: Tensor | None = None  # [rows, tokens]
        self._steps = 0  # steps so far with a cache
        self._cached = True

    def feed(self, tokens: Tensor) -> Tensor:
        """Append tokens [rows, new]. Returns the logits of the next token [rows, V] float32."""
        self._text = tokens if self._text is None else torch.cat([self._text, tokens], 1)
        if not self._cached:
            return self._whole(self._text)
        self._steps += bool(self._caches)
        output: Any = self._model(
            tokens if self._caches else self._text, use_cache=True, **self._caches, **self._options
        )
        last: Tensor = output.logits[:, -1].float()
        if 0 < self._steps <= CHECKED_STEPS and self._apart(last, self._text) > APART:
            log.warning("%s steps wrongly with its cache: each step computes the text", type(self._model).__name__)
            self._cached, self._caches = False, {}
            return self._whole(self._text)
        self._caches = {name: output[name] for name in CACHES if output.get(name) is not None}
        return last

    def _apart(self, logits: Tensor, text: Tensor) -> float:
        """Mean total variation distance between the rows' step and the forward of their whole text."""
        return (logits.softmax(-1) - self._whole(text).softmax(-1)).abs().sum(-1).mean().item() / 2

    def _whole(self, text: Tensor) -> Tensor:
        logits: Tensor = self._model(text, use_cache=False, **self._options).logits[:, -1].float()
        return logits
