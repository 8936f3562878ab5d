"""Plans of a step that has the round of one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.warp import History, Warp

from verifier_service.rows import NO_ROWS, StepPlan, text_rows
from verifier_service.runner import StepRunner
from verifier_service.walk import Draw


def lone_round(
    runner: StepRunner,
    ids: Sequence[int],
    tree: DraftTree | None = None,
    warp: Warp | None = None,
    sampling: Sampling | None = None,
    history: History | None = None,
) -> StepPlan:
    """The round of a text whose rows, before its last one, were kept by earlier steps. tree: a lone root by default"""
    tree = tree or DraftTree.root_only(ids[-1])
    plan = text_rows(ids, NO_ROWS, tree, runner.own_pages, runner.pages.scratch, runner.near)
    draw = Draw(0, 0, len(ids), tree, warp or Warp(), sampling or Sampling(), history)
    return replace(plan, wanted=np.arange(tree.rows), draws=(draw,))
