"""Attention of a list of rows, each with a path of its own, over a paged pool (README.md beside this file)."""

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
