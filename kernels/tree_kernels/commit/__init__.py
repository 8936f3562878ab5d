"""Keeping the accepted rows of a tree (README.md beside this file)."""

from tree_kernels.commit.reference import commit

__all__ = ["commit"]
