"""The recurrence of state-space layers for a list of rows, each along its own path (README.md in this folder)."""

from tree_kernels.tree_scan.cpu import (
    ROW_MULTIPLE,
    BlockFold,
    Group,
    Paths,
    TokenInputs,
    fold,
    fold_in_order,
    tree_scan,
    tree_scan_in_order,
)

__all__ = [
    "ROW_MULTIPLE",
    "BlockFold",
    "Group",
    "TokenInputs",
    "Paths",
    "fold",
    "fold_in_order",
    "tree_scan",
    "tree_scan_in_order",
]
