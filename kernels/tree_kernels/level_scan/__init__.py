"""Mamba-2 on the newest level of drafted trees, from nodes' inputs (README.md in this folder)."""

from tree_kernels.level_scan.cpu import Lines, NodeInputs, level_scan

__all__ = ["Lines", "NodeInputs", "level_scan"]
