"""A step's rows for mixers on an accelerator: plain arrays of fixed shapes, which are uploaded with the plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from tree_kernels.commit.triton import commit_rows
from tree_kernels.row_slots import Ints
from tree_kernels.runs import places_in_runs
from tree_kernels.tree_scan.triton import ITEM_ROWS, ScanTable
from tree_layers.device_mixers import FoldRooms, TabledStep
from tree_layers.tree_mixers import RecurrentMemory

from verifier_service.recurrent import Arrangement, last_writers
from verifier_service.rows import RecurrentRows, StepPlan


class DeviceStates:
    """Fills a step's arrays for mixers, and keeps the inputs of accepted rows."""

    def __init__(self, memory: RecurrentMemory, arrangement: Arrangement, texts: int, rows: int) -> None:
        """texts, rows: most texts and rows of a step"""
        self._memory = memory
        self._arrangement = arrangement
        self._texts = texts
        states = [layer.states for layer in memory.layers]
        self._rooms = FoldRooms([tuple(each.shape[1:]) for each in states], self._folds(rows), states[0].device)

    def _folds(self, rows: int) -> int:
        """Most folds of a step of this many rows: one for each full block of prompt rows, and two for each text, whose
        rows may begin and end in the middle of a block."""
        return rows // self._arrangement.extent.block + 2 * self._texts

    def sizes(self, rows: int, drawn: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a step's arrays, by name. rows, drawn: padded numbers of rows, and of rows whose logits are
        wanted"""
        block, folds = self._arrangement.extent.block, self._folds(rows)
        # Rows of a served text start from the newest states of that text; rows of the runner's checks start from any
        # state of the runner's own place.
        states = max(folds, self._arrangement.whole.checkpoints)
        return {
            "columns": (rows, 2 * block),
            "items": (min(rows, rows // ITEM_ROWS + states), 2 + ITEM_ROWS),
            "chains": (self._texts, 2),
            "fold_columns": (folds, block),
            "fold_states": (folds, 2),
            **dict.fromkeys(("last", "kept_from", "kept_to"), (rows,)),
            "moved": (folds,),
            **dict.fromkeys(("input_slots", "rings"), (drawn,)),
        }

    def fill(self, plan: StepPlan, whole: Mapping[str, Ints]) -> None:
        """Write the arrays of a plan. The arrays must be zero before."""
        rows = plan.recurrent
        assert rows is not None
        scratch, count = self._arrangement.scratch, len(rows.own)
        whole["columns"][:count] = rows.columns
        whole["last"][:count] = rows.own + 1
        placed = self._fill_folds(rows, whole)
        states, folded = rows.sources.copy(), rows.sources < 0
        states[folded] = placed[-1 - states[folded]]
        order = np.argsort(states, kind="stable")
        of_items, counts = np.unique(states, return_counts=True)
        within = places_in_runs(counts)  # place among the rows of a state
        items = -(-counts // ITEM_ROWS)  # number of each state's items
        item = np.repeat(np.cumsum(items) - items, counts) + within // ITEM_ROWS
        whole["items"][item, 2 + within % ITEM_ROWS] = order
        whole["items"][: items.sum(), 0] = np.bincount(item)
        whole["items"][: items.sum(), 1] = np.repeat(of_items, items)
        certain = np.flatnonzero(plan.certain)
        source, target = last_writers(scratch + certain, rows.homes[certain])
        whole["kept_from"][: len(source)], whole["kept_to"][: len(source)] = source, target
        whole["input_slots"][: len(plan.wanted)] = scratch + plan.wanted
        whole["rings"][: len(plan.wanted)] = rows.homes[plan.wanted]

    def _fill_folds(self, rows: RecurrentRows, whole: Mapping[str, Ints]) -> Ints:
        """Write the arrays of the folds. Returns for each fold the number of the state that it stores, as `ScanTable`
        counts states."""
        placed = np.array(
            [
                each.target if direct else self._arrangement.states + number
                for number, (each, direct) in enumerate(zip(rows.folds, _direct(rows), strict=True))
            ],
            np.int64,
        )
        chain = -1
        for number, each in enumerate(rows.folds):
            if each.source >= 0:
                chain += 1
                whole["chains"][chain] = number, 0
                whole["fold_states"][number, 0] = each.source
            whole["chains"][chain, 1] += 1
            whole["fold_columns"][number] = each.columns
            whole["fold_states"][number, 1] = placed[number]
            if placed[number] != each.target:
                whole["moved"][number] = max(each.target, 0)
        return placed

    def step(self, given: Mapping[str, Tensor], moves: bool) -> TabledStep:
        """The step for mixers, from its uploaded arrays. moves: True if the results of some folds are stored elsewhere
        first and moved to their slots after the scan"""
        table = ScanTable(**{name: given[name] for name in ScanTable._fields})
        return TabledStep(table, self._arrangement.scratch, self._rooms, moves)

    def keep(self, given: Mapping[str, Tensor], below: Tensor, accepted: Tensor) -> None:
        """Copy the inputs of committed rows, then those of accepted guesses, into the texts' rings.

        below [texts, depth] wanted rows   accepted [texts, depth] bool
        """
        source = torch.where(accepted, given["input_slots"][below], 0)  # 0: skipped
        target = torch.where(accepted, given["rings"][below], 0)
        for stores in self._memory.stores:
            for store in stores:
                # Committed rows first: an accepted guess a whole ring after a row of a long prompt has the same slot
                # and must win.
                commit_rows(store, given["kept_from"], given["kept_to"])
                commit_rows(store, source.view(-1), target.view(-1))


def folds_in_place(rows: RecurrentRows) -> bool:
    """True if each of a step's folds may write its checkpoint before the step's rows are scanned."""
    return all(_direct(rows))


def _direct(rows: RecurrentRows) -> list[bool]:
    """True for each fold that has a slot whose former state nothing in the step reads."""
    if not rows.folds:
        return []
    read = {*rows.sources.tolist(), *(each.source for each in rows.folds)}
    return [each.target >= 0 and each.target not in read for each in rows.folds]
