"""Runs any causal model of transformers token by token."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

log = logging.getLogger("dendro.training")

CACHES = ("past_key_values", "cache_params")
"""Names of the cache in forwards and their outputs: in models with attention, and in pure state-space models."""
CHECKED_STEPS = 3
"""Number of first steps with a cache that are compared with the forward of the whole text. Without mamba-ssm's kernels
some hybrids of transformers step wrongly (Bamba with two groups, transformers 5.23)."""
APART = 0.1
"""Total variation distance of next-token probabilities, averaged over the rows, above which the cache counts as wrong.
Rounding to bfloat16 moves logits by about a hundredth."""


class ReservedLayer(DynamicLayer):  # type: ignore[misc]  # transformers gives it no types
    """A layer of a cache with memory for a whole text. transformers' own layer copies all its keys and values at every
    step, which took longer than the attention to them with 2,048 texts."""

    def __init__(self, tokens: int) -> None:
        """tokens: length of the longest text; a longer text is copied at every step, as by transformers"""
        super().__init__()
        self._reserved = tokens
        self._memory: tuple[Tensor, Tensor] | None = None  # keys, values [rows, heads, tokens, size]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, new, size]. Returns all of them so far."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        if end > self._reserved:
            whole: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return whole
        if self._memory is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._memory = self._room(key_states), self._room(value_states)
        for memory, new in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, begin:end] = new
        self.keys, self.values = (memory[:, :, :end] for memory in self._memory)
        return self.keys, self.values

    def _room(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        return like.new_empty(rows, heads, self._reserved, size)


def reserved_cache(model: PreTrainedModel, tokens: int) -> dict[str, Any]:
    """A cache for texts of this length as an argument of the model's forward; nothing for a model without keys and
    values."""
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return {}
    cache = DynamicCache(config=model.config)
    cache.layers = [ReservedLayer(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return {"past_key_values": cache}


class SteppedText:
    """Runs a model on rows of text of equal length, with the cache of the model's own forward.

    If the model returns no cache, or a wrong one, it computes the whole text again at every step.
    """

    def __init__(self, model: PreTrainedModel, longest: int | None = None) -> None:
        """longest: tokens of the text at its end, for which memory is taken at the first step; None: not known"""
        self._model = model
        last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        self._caches = {} if longest is None else reserved_cache(model, longest)
        self._text: Tensor | None = None  # [rows, tokens]
        self._steps = 0  # steps so far with a cache
        self._cached = True

    def feed(self, tokens: Tensor) -> Tensor:
        """Append tokens [rows, new]. Returns the logits of the next token [rows, V] float32."""
        begun, self._text = self._text is not None, tokens if self._text is None else torch.cat([self._text, tokens], 1)
        if not self._cached:
            return self._whole(self._text)
        self._steps += begun and bool(self._caches)
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
