"""Products of rows with a packed weight, at the speed of reading it for few rows.

Each sum adds its inputs in order, so a row's bits depend on nothing but the row and the weight. The kernels are compiled
by numba (`tree_kernels.kernel_cache`); torch's product is the reference.
"""

from tree_kernels.matmul.cpu import PackedWeight, why_not_packed

__all__ = ["PackedWeight", "why_not_packed"]
