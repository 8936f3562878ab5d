"""One or more levels of draft trees in one compiled call: forward, logits and ranking of each (README.md)."""

from tree_kernels.tree_levels.cpu import LevelCalls, why_not_compiled

__all__ = ["LevelCalls", "why_not_compiled"]
