"""Converts a step's rows to tensors, in the form that the mixers of a model take."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from tree_kernels import ROW_MULTIPLE
from tree_kernels.tree_scan import BlockFold, Group, Paths
from tree_layers.tree_mixers import RecurrentStep

from verifier_service.recurrent import Ints, RecurrentRows


def on_device(device: torch.device, array: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def recurrent_step(rows: RecurrentRows, padded: int, scratch: int, device: torch.device) -> RecurrentStep:
    """Convert a step's rows for the model's mixers. Inputs are written to slots from `scratch` on; rows of padding have
    no path."""
    tensor = partial(on_device, device)
    missing = (0, padded - len(rows.columns))
    groups = []
    for source in np.unique(rows.sources).tolist():
        if source:
            its = np.flatnonzero(rows.sources == source)
            more = np.full(-len(its) % ROW_MULTIPLE, its[0])
            groups.append(Group(source, tensor(np.concatenate([its, more])), len(its)))
    folds = [BlockFold(each.source, tensor(each.columns), each.target) for each in rows.folds]
    columns = torch.nn.functional.pad(tensor(rows.columns), (0, 0, *missing))
    own = torch.nn.functional.pad(tensor(rows.own), missing, value=rows.columns.shape[1] // 2)
    return RecurrentStep(torch.arange(scratch, scratch + padded, device=device), own, Paths(columns, groups, folds))
