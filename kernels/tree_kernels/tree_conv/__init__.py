"""The causal convolution of a list of rows, each over its own path (README.md in this folder)."""

from tree_kernels.tree_conv.reference import tree_conv

__all__ = ["tree_conv"]
