"""Attention of a list of rows, each over its own path, in a paged pool (README.md in this folder).

These functions are `cpu.py`'s. An accelerator's, of other arguments, are in `triton.py`, whose import needs Triton.
"""

from tree_kernels.tree_attention.cpu import Prepared, attend, prepare, write
from tree_kernels.tree_attention.rows import NEAR_CHOICES, PAGE, FarRows, Layout, TreeRows, near_window

__all__ = [
    "NEAR_CHOICES",
    "PAGE",
    "FarRows",
    "Layout",
    "Prepared",
    "TreeRows",
    "attend",
    "near_window",
    "prepare",
    "write",
]
