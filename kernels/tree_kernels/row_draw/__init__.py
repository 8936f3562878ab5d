"""The target's token of one row, in one pass over its scores: most tokens' noise is never computed.

`tree_kernels.warp.tokens_of` with the noise of `tree_kernels.noise` is the reference: the tokens are the same.
"""

from tree_kernels.row_draw.cpu import RowDraw

__all__ = ["RowDraw"]
