"""A whole forward of a Mamba-1 or Mamba-2 drafter as one compiled call (README.md in this folder).

The torch forms in `tree_layers.mixers` are the reference.
"""
