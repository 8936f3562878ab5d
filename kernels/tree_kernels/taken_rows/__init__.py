"""Copies rows of tables, such as those of an embedding, by their indices, without giving up the interpreter lock."""

from tree_kernels.taken_rows.cpu import take_rows

__all__ = ["take_rows"]
