"""The recurrence of state-space layers for a list of rows, each along its own path (README.md in this folder)."""

from tree_kernels.tree_scan.cpu import fold, fold_in_order, tree_scan, tree_scan_in_order
from tree_kernels.tree_scan.inputs import TokenInputs
from tree_kernels.tree_scan.paths import BlockFold, Group, Paths

__all__ = [
    "BlockFold",
    "Group",
    "TokenInputs",
    "Paths",
    "fold",
    "fold_in_order",
    "tree_scan",
    "tree_scan_in_order",
]
