"""Products of rows with a packed weight, at the speed of reading it for few rows.

Each sum adds its inputs in order, so a row's bits depend on nothing but the row and the weight. numba compiles the
kernels (`tree_kernels.kernel_cache`); `reference.py` states what they compute.
"""

from tree_kernels.matmul.cpu import PackedWeight, RowLimit, why_not_packed

__all__ = ["PackedWeight", "RowLimit", "why_not_packed"]
