"""The acceptance head: the chances of a row's candidates to be the text's next token (README.md).

`reference.py` is what training and the eager form run; `cpu.py` runs it after a fused drafter's level.
"""

from tree_kernels.acceptance_head.reference import (
    HeadWeights,
    RowLaw,
    head_outputs,
    log_chances,
    row_law,
    row_numbers,
)

__all__ = ["HeadWeights", "RowLaw", "head_outputs", "log_chances", "row_law", "row_numbers"]
