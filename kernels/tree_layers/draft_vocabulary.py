"""A drafter that guesses some of its target's tokens: the file beside its weights that says which, and its sizes.

The checkpoint's own token ids are 0..N-1. The target has V tokens; `DRAFT_VOCABULARY` has

    ids           [N] int32     ascending: the target's id of each of the drafter's tokens
    others_rows   [V - N, r]    a row for each other id of the target, ascending by id
    others_basis  [r, d]        the embedding of such a token is its row @ others_basis

so that every token of the target can be read. Imports only the standard library, as `checkpoint.py`; `weights.py` loads
the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tree_layers.errors import CheckpointError
from tree_layers.headers import tensor_shapes

DRAFT_VOCABULARY = "draft_vocabulary.safetensors"
IDS, OTHERS_ROWS, OTHERS_BASIS = "ids", "others_rows", "others_basis"
_DIMENSIONS = {IDS: 1, OTHERS_ROWS: 2, OTHERS_BASIS: 2}


@dataclass(frozen=True, slots=True)
class DraftVocabularySizes:
    guessed: int  # N
    others: int  # V - N
    rank: int  # r
    width: int  # d

    @property
    def all(self) -> int:
        """V"""
        return self.guessed + self.others

    def __str__(self) -> str:
        return f"guesses {self.guessed} of {self.all} tokens"


def draft_vocabulary_sizes(folder: Path, config: Mapping[str, Any]) -> DraftVocabularySizes | None:
    """The sizes of a checkpoint's draft vocabulary by the header of its file; None where there is none.

    config: with transformers' keys. Raises CheckpointError, naming the tensor.
    """
    file = folder / DRAFT_VOCABULARY
    if not file.is_file():
        return None
    shapes = tensor_shapes([file])
    for name, dimensions in _DIMENSIONS.items():
        if len(shapes.get(name, ())) != dimensions:
            found = list(shapes[name]) if name in shapes else "none"
            raise CheckpointError(f"{file}: {name} must be a tensor of {dimensions} dimensions; found {found}")
    (guessed,), (others, rank), basis = shapes[IDS], shapes[OTHERS_ROWS], shapes[OTHERS_BASIS]
    if guessed == 0 or guessed != config.get("vocab_size"):
        raise CheckpointError(f"{file}: {IDS} has {guessed} ids; vocab_size is {config.get('vocab_size')!r:.100}")
    if basis != (rank, config.get("hidden_size")):
        raise CheckpointError(
            f"{file}: {OTHERS_BASIS} has shape {list(basis)}; {OTHERS_ROWS} has {rank} columns, and hidden_size is "
            f"{config.get('hidden_size')!r:.100}"
        )
    return DraftVocabularySizes(guessed, others, rank, basis[1])
