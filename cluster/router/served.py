"""What a router knows of a target that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from dendro.errors import BadRequest
from dendro.grammars import Grammars
from tree_layers.checkpoint import Facts

from cluster.config import Structures, TargetConfig
from cluster.hub import fetched_model
from cluster.router.tokenizer import CheckpointTokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """Facts of a target by which admission refuses requests that the target cannot serve."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    max_length: int
    end_ids: frozenset[int]
    dtype: str
    grammars: Grammars | None = None  # grammars for the tokenizer; None: no structure can be requested

    @classmethod
    def of(cls, name: str, target: TargetConfig, facts: Facts, structures: Structures) -> Self:
        """Load a target's tokenizer; raises BadRequest naming what is missing."""
        target = fetched_model(f"targets.{name}", target, weights=False)
        try:
            tokenizer = CheckpointTokenizer(target.tokenizer_folder, facts.tokenizer, target.chat_template)
        except BadRequest as error:
            field = "chat_template" if error.field == "chat_template" else target.tokenizer_field
            raise BadRequest(f"targets.{name}.{field}", error.reason) from error
        if min(tokenizer.size, facts.rows) != facts.vocabulary:
            raise BadRequest(
                f"targets.{name}.{target.tokenizer_field}",
                f"{target.tokenizer_folder}: its tokenizer, as transformers loads it, has {tokenizer.size} token ids; "
                f"its files name {facts.known}",
            )
        grammars = Grammars(tokenizer.token_bytes, facts.vocabulary, structures.limits) if structures.enabled else None
        return cls(
            name=name,
            tokenizer=tokenizer,
            vocabulary=facts.vocabulary,
            max_length=min(target.max_length, facts.positions or target.max_length),
            end_ids=facts.end_ids,
            dtype=target.dtype,
            grammars=grammars,
        )
