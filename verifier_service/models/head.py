"""The target's head, run separately from its layers: logits of a few rows at a time, when a walk visits them.

A step's logits are [rows, vocabulary] float32, larger than all other results of a small model's step. A walk visits few
of a tree's rows, in order: so one block of logits is held at a time, and some blocks are never computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

HEAD_ROWS = 32
"""Rows of a block. The check at start compares smaller blocks with a full one, as it does steps."""

Product = Callable[[Tensor], Tensor]


class Head:
    """Replaces the product of the model's head; the library's code before and after it stays.

    `take` runs the whole model except the product; `logits` runs the product and what comes after, and no layer.
    """

    def __init__(self, model: PreTrainedModel, product: Product, together: bool) -> None:
        """product: [..., D] hidden -> [..., vocabulary] float32 logits, before the library scales or caps them.
        together: True if several workers compute the logits: then all rows of a step are computed at once, needed or
        not."""
        self.together = together
        self._model: Any = model
        self._product = product
        self._layers: Any = None  # the module that the model calls for its hidden rows
        self._kind: Any = None  # the class of that module's output
        self._width = 0  # width of the output's rows
        self._wanted: Tensor | None = None
        self._taking = False
        self._taken: Tensor | None = None
        self._given: Tensor | None = None
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        head.forward = self._forward
        for module in model.modules():
            if module is not model and isinstance(module, PreTrainedModel):
                module.register_forward_hook(self._note)

    @contextmanager
    def of_rows(self, wanted: Tensor) -> Iterator[None]:
        """Context in which the head computes only these rows [k] of a step. Not every family has `logits_to_keep`."""
        self._wanted = wanted
        try:
            yield
        finally:
            self._wanted = None

    def take(self, run: Callable[[], object]) -> Tensor:
        """The hidden rows [k, D] that a run of the model passes to its head; no logits are computed."""
        self._taking = True
        try:
            run()
        finally:
            self._taking = False
        taken, self._taken = self._taken, None
        assert taken is not None
        return taken.flatten(0, -2)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [k, vocabulary] float32 of taken rows [k, D]."""
        self._given = hidden[None]
        try:
            with self._without_layers(self._given.new_zeros(1, len(hidden), self._width)):
                rows = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
                logits: Tensor = self._model(input_ids=rows, use_cache=False).logits[0]
                return logits
        finally:
            self._given = None

    def product(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] float32 of rows [..., D], without what the library computes before and after it."""
        return self._product(hidden)

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Context in which the product's results are multiplied."""
        product = self._product
        self._product = lambda hidden: product(hidden) * factor
        try:
            yield
        finally:
            self._product = product

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._given is not None:
            return self._product(self._given)
        if self._wanted is not None:
            hidden = hidden[:, self._wanted]
        if self._taking:
            self._taken = hidden
            return hidden.new_empty(*hidden.shape[:-1], 0)
        return self._product(hidden)

    def _note(self, layers: nn.Module, given: Any, answer: Any) -> None:
        """Record the inner model whose forward ends last: it is the one that the model itself calls. It need not be
        `base_model`: OPT calls its decoder."""
        self._layers, self._kind, self._width = layers, type(answer), answer[0].shape[-1]

    @contextmanager
    def _without_layers(self, answer: Tensor) -> Iterator[None]:
        """Context in which the model's layers return `answer` without running."""
        layers, kind = self._layers, self._kind
        assert kind is not None, "the model has not run yet"
        kept = layers.forward
        layers.forward = lambda *_, **__: kind(last_hidden_state=answer)
        try:
            yield
        finally:
            layers.forward = kept


class Logits:
    """The logits of a step's wanted rows, computed block by block on demand; the newest block is held."""

    def __init__(self, hidden: Tensor, head: Product) -> None:
        """hidden [k, D]: the wanted rows   head: computes logits [n, vocabulary] of rows [n, D]"""
        self._blocks = hidden.split(HEAD_ROWS)
        self._head = head
        self._block = -1
        self._held = hidden  # a placeholder: logits replace it before it is read
        self.took_s = 0.0

    @classmethod
    def made(cls, logits: Tensor) -> Logits:
        """Wrap logits [k, vocabulary] that exist already."""
        found = cls(logits, lambda block: block)
        found._blocks, found._block = (logits,), 0
        return found

    def row(self, row: int) -> Tensor:
        """Logits of one row, [1, vocabulary] float32."""
        block, at = divmod(row, len(self._blocks[0]))
        if block != self._block:
            began = time.perf_counter()
            self._held = self._blocks[block]  # drops the old logits before the new ones are computed
            self._held, self._block = self._head(self._blocks[block]), block
            self.took_s += time.perf_counter() - began
        return self._held[at : at + 1]

    def all(self) -> Tensor:
        """Logits of all rows, [k, vocabulary] float32. The block that is held is not computed again."""
        made = (self._held if place == self._block else self._head(rows) for place, rows in enumerate(self._blocks))
        return torch.cat([*made])
