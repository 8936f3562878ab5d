"""The causal convolution of a list of rows, each with a path of its own (README.md beside this file)."""

from tree_kernels.tree_conv.reference import tree_conv

__all__ = ["tree_conv"]
