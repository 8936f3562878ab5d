"""Attention of a list of rows, each over its own path, in a paged pool (README.md in this folder).

These functions are `cpu.py`'s, of the library's products. `compiled.py` has the form that this project compiles for a
CPU, and `triton.py`, whose import needs Triton, an accelerator's.
"""

from tree_kernels.tree_attention.cpu import Prepared, attend, prepare, write
from tree_kernels.tree_attention.rows import NEAR_CHOICES, PAGE, FarRows, Layout, RowRotation, TreeRows, near_window

__all__ = [
    "NEAR_CHOICES",
    "PAGE",
    "FarRows",
    "Layout",
    "Prepared",
    "RowRotation",
    "TreeRows",
    "attend",
    "near_window",
    "prepare",
    "write",
]
