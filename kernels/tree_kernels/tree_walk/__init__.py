"""The walk down a draft tree, for every temperature."""

from tree_kernels.tree_walk.reference import Walk, walk

__all__ = ["Walk", "walk"]
