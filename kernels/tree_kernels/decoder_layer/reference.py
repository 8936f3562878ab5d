"""A decoder layer in torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tree_kernels.row_functions.reference import gated_silu, rms_norm

Rows = Callable[[Tensor], Tensor]


def decoder_layer(
    x: Tensor, norms: tuple[Tensor, Tensor], eps: float, attention: Rows, mlp: tuple[Rows, ...]
) -> Tensor:
    """Run a decoder layer on x [rows, D]. norms: the two weights [D]. Returns [rows, D].

    attention: computes the attention of normed rows, with its query, key, value and output products
    mlp: the gate, up and down products
    """
    gate, up, down = mlp
    middle = x + attention(rms_norm(x, norms[0], eps))
    normed = rms_norm(middle, norms[1], eps)
    return middle + down(gated_silu(gate(normed), up(normed)))
