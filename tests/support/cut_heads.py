"""Drafters whose head is cut to some tokens, made of drafters that guess all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tree_layers.checkpoint import CONFIG, SAFE
from tree_layers.draft_vocabulary import DRAFT_VOCABULARY, IDS, OTHERS_BASIS, OTHERS_ROWS

EMBEDDINGS = ("backbone.embeddings.weight", "model.embed_tokens.weight")
HEAD = "lm_head.weight"


def cut_head(source: Path, folder: Path, ids: Sequence[int], size: int, rank: int | None = None) -> Path:
    """Write the drafter of `source` with the tokens `ids` of `size` as its head.

    rank: of the other tokens' embedding; None: it stays as it is, in float32
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / SAFE)
    (name,) = tensors.keys() & {*EMBEDDINGS}
    others = torch.tensor(sorted(set(range(size)) - set(ids)))
    rows = tensors[name].float()[others]
    basis = torch.eye(rows.shape[1])
    if rank is not None:
        left, values, right = torch.linalg.svd(rows, full_matrices=False)
        rows, basis = (left * values)[:, :rank].bfloat16(), right[:rank].bfloat16()
    for each in {name, HEAD} & tensors.keys():
        tensors[each] = tensors[each][torch.tensor(ids)].contiguous()
    save_file(tensors, folder / SAFE, {"format": "pt"})
    config = json.loads((source / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"vocab_size": len(ids)}))
    write_draft_vocabulary(folder, torch.tensor(ids, dtype=torch.int32), rows, basis)
    return folder


def write_draft_vocabulary(folder: Path, ids: Tensor, rows: Tensor, basis: Tensor) -> None:
    tensors = {IDS: ids, OTHERS_ROWS: rows.contiguous(), OTHERS_BASIS: basis.contiguous()}
    save_file(tensors, folder / DRAFT_VOCABULARY)
