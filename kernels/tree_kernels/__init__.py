"""Operations on tensors. Each has a folder with a plain reference. Imports no other package of this project."""

ARITHMETIC = 7
"""The version of what a target computes: raised by every change, here or in the packages above, that alters the bits of
its logits, probabilities or noise. It is part of a target's fingerprint, so no text, answer or state goes on with
other bits."""

ROW_MULTIPLE = 8
"""Rows of a product over some of a step's are padded to a multiple of this, and so is a step where its products are a
library's: libraries use other kernels for other numbers of rows."""
FEW_ROWS = (1, 2, 3, 4, 5, 6, 10, 12)
"""Other numbers of rows that a step may have, where its products are this project's own."""
