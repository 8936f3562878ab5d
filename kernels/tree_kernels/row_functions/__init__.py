"""RMS norms and gated activations of rows, each in one call: torch takes seven and two."""

from tree_kernels.row_functions.cpu import CompiledNorm, gated_silu, why_not_compiled

__all__ = ["CompiledNorm", "gated_silu", "why_not_compiled"]
