"""Tree attention as the formula: a softmax of each row and head over the row's own path, in float64.

The formula of docs/design/attention.md#which-keys-a-row-sees:

    score_k = scaling q . k_k      with a softcap c: c tanh(score_k / c)
    o       = sum_k e^score_k v_k / sum_k e^score_k, over the keys of the path with p - position(k) < window

A sink is one more score, which has no value. Head h reads key-value head h // (heads / kv_heads).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.tree_attention.rows import PAGE, Layout, TreeRows


def write(pool: Tensor, key: Tensor, value: Tensor, step: TreeRows) -> None:
    """Put each row's key, value and a one, side by side, into its slot; the rest of the slot is ones.

    pool [slots, kv_heads, width], written here   key [kv_heads, padded, key_dim]   value [kv_heads, padded, value_dim]
    """
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    for row, slot in enumerate(step.slots.tolist()):  # padding rows have no slot
        pool[slot] = 1.0
        pool[slot, :, :key_dim] = key[:, row]
        pool[slot, :, key_dim : key_dim + value_dim] = value[:, row]


def path_keys(step: TreeRows, row: int) -> list[tuple[int, int]]:
    """(position, slot) of each key of the row's path, itself last. A text's keys before its first page are absent."""
    near = step.near.shape[1] // 2
    first = near * (int(step.positions[row]) // near - 1)  # position of near column 0; the keys before it are far
    keys = []
    for part in step.far:
        if part.start <= row < part.stop:
            for index, page in enumerate(part.pages, part.first):  # the page of positions PAGE * index + 0, 1, ...
                keys += [(PAGE * index + at, PAGE * page + at) for at in range(PAGE) if PAGE * index + at < first]
    return keys + [(first + column, slot) for column, slot in enumerate(step.near[row].tolist()) if slot != 0]


def attend(
    query: Tensor,
    pool: Tensor,
    step: TreeRows,
    layout: Layout,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its own path, whose keys are all in the pool.

    query [heads, at least rows, key_dim]   pool [slots, kv_heads, width]   sinks [heads]
    returns [rows, heads, value_dim] float64
    """
    heads, rows = len(query), len(step.positions)
    out = torch.zeros(rows, heads, layout.value_dim, dtype=torch.float64)
    for row in range(rows):
        position = int(step.positions[row])
        seen = [slot for at, slot in path_keys(step, row) if window is None or position - at < window]
        for head in range(heads):
            own = pool[seen, head // (heads // layout.kv_heads)].double()  # [keys, width]
            k, v = own[:, : layout.key_dim], own[:, layout.key_dim : layout.key_dim + layout.value_dim]
            scores = scaling * (k @ query[head, row].double())  # [keys]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            out[row, head] = scores.softmax(0)[: len(seen)] @ v
    return out
