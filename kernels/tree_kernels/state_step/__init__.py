"""One step, or a chain of steps, of the recurrence of Mamba-1 and Mamba-2 (README.md in this folder).

Every device runs `cpu.py`; an accelerator has a form of Mamba-1's step of its own, `triton.py`.
"""

from tree_kernels.state_step.cpu import (
    conv_chain,
    conv_step,
    conv_tail,
    mamba1_chain,
    mamba1_step,
    mamba2_chain,
    mamba2_drive,
    mamba2_fold,
    mamba2_step,
)
from tree_kernels.state_step.slots import Slots

__all__ = [
    "Slots",
    "conv_chain",
    "conv_step",
    "conv_tail",
    "mamba1_chain",
    "mamba1_step",
    "mamba2_chain",
    "mamba2_drive",
    "mamba2_fold",
    "mamba2_step",
]
