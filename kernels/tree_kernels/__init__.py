"""Operations on tensors. Each has a folder with a plain reference. Imports no other package of this project."""

ROW_MULTIPLE = 8
"""Rows of a step, and of a product over some of them, are padded to a multiple of this: libraries use other kernels for
other numbers of rows. Predicted times of steps are those of padded rows."""
