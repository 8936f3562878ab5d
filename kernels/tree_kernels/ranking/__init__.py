"""The order of a drafter's guesses without masks, as one compiled call for rows of any sessions.

`tree_kernels.warp.drafter_ranking` is the reference: the ids and the scores are the same, bit for bit.
"""

from tree_kernels.ranking.cpu import Orders, ranking_of

__all__ = ["Orders", "ranking_of"]
