"""One step, or a chain of steps, of the recurrence of Mamba-1 and Mamba-2 (README.md in this folder)."""

from tree_kernels.state_step.reference import (
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

__all__ = [
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
