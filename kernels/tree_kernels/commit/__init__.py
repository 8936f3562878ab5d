"""Moves the accepted rows of a tree to their final slots (README.md in this folder)."""

from tree_kernels.commit.reference import commit

__all__ = ["commit"]
