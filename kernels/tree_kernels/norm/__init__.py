"""Norms of rows on an accelerator, whose bits do not depend on the number of rows (README.md in this folder)."""

from tree_kernels.norm.form import GATE_FIRST, GATE_LAST, NO_GATE, WIDEST, RowNorm
from tree_kernels.norm.reference import norm

__all__ = ["GATE_FIRST", "GATE_LAST", "NO_GATE", "WIDEST", "RowNorm", "norm"]
