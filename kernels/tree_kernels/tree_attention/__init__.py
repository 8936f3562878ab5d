"""Attention of a list of rows, each over its own path, in a paged pool (README.md in this folder)."""

from tree_kernels.tree_attention.reference import (
    PAGE,
    FarRows,
    Layout,
    TreeRows,
    attend,
    near_window,
    prepare,
    write,
)

__all__ = ["PAGE", "FarRows", "Layout", "TreeRows", "attend", "near_window", "prepare", "write"]
