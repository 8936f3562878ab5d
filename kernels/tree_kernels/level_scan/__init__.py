"""Mamba-2 on the newest level of drafted trees, from nodes' inputs (README.md in this folder)."""

from tree_kernels.level_scan.cpu import level_scan
from tree_kernels.level_scan.inputs import Lines, NodeInputs

__all__ = ["Lines", "NodeInputs", "level_scan"]
