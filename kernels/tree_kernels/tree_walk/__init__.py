"""The walk down a draft tree, for any temperature (README.md in this folder)."""

from tree_kernels.tree_walk.reference import Walk, children_of, walk

__all__ = ["Walk", "children_of", "walk"]
