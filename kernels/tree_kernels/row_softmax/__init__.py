"""Probabilities of rows and their logarithms, in one order of operations on every processor (README.md)."""

from tree_kernels.row_softmax.cpu import log_probabilities, prepare_softmax, softmax

__all__ = ["log_probabilities", "prepare_softmax", "softmax"]
