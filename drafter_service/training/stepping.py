"""Runs any causal model of transformers token by token."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

CACHES = ("past_key_values", "cache_params")
"""Names of the cache in forwards and their outputs: of attention and hybrids, and of pure state-space models."""


class SteppedText:
    """Rows of text of equal length at a model, with the cache that the model's own forward returns.

    A model that returns none computes the whole text again at every step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._caches: dict[str, Any] = {}
        self._text: Tensor | None = None  # [rows, tokens]

    def feed(self, tokens: Tensor) -> Tensor:
        """Append tokens [rows, new]; returns the logits of the next token, [rows, V] float32."""
        self._text = tokens if self._text is None else torch.cat([self._text, tokens], 1)
        inputs = tokens if self._caches else self._text
        options: dict[str, Any] = {"logits_to_keep": 1} if self._last_only else {}
        output: Any = self._model(inputs, use_cache=True, **self._caches, **options)
        self._caches = {name: output[name] for name in CACHES if output.get(name) is not None}
        last: Tensor = output.logits[:, -1].float()
        return last
