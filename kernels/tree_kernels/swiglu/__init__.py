"""SiLU of a gate times another row on an accelerator, in one launch (README.md in this folder)."""

from tree_kernels.swiglu.reference import swiglu

__all__ = ["swiglu"]
