"""The slots of rows in NumPy. Runs where the kernel cannot be compiled."""

from __future__ import annotations

import numpy as np

from tree_kernels.row_slots.shapes import ABOVE, POSITION, TEXT, Homes, Ints, PathSlots, StepRows, lines


def path_slots(rows: StepRows, block: int, homes: Homes, scratch: int, for_all: bool) -> PathSlots:
    """Compute in NumPy what `cpu.path_slots` computes."""
    numbers = np.frombuffer(rows.numbers, np.int64).reshape(4, -1)
    texts, positions, above = numbers[TEXT], numbers[POSITION], numbers[ABOVE]
    table, offsets, certain = (np.array(each, np.int64) for each in (homes.table, homes.offsets, rows.certain))
    ends, zero_list = lines(rows, block)
    lowest, zero = np.array(rows.lowest), np.array(zero_list)

    def home(of: Ints, at: Ints) -> Ints:
        page, place = np.divmod(at, homes.unit)
        found: Ints = table[offsets[of] + page] * homes.unit + place if homes.paged else table[offsets[of]] + place
        return found

    own_homes, guessed = home(texts, positions), above >= 0
    own = own_homes.copy()
    scratched = np.arange(len(own)) if for_all else np.flatnonzero(guessed)
    own[scratched] = np.arange(scratch, scratch + len(scratched))
    lengths = np.array(ends) - lowest
    its = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(its)) - zero[its]
    line = np.zeros(len(its), np.int64)
    held = np.flatnonzero((at >= 0) & (at <= certain[its]))
    line[held] = home(its[held], at[held])
    line[zero[texts[~guessed]] + positions[~guessed]] = own[~guessed]

    first = block * (positions // block - 1)
    at = first[:, None] + np.arange(2 * block)
    seen = np.where(guessed, certain[texts], positions)[:, None]
    columns = np.where(at <= seen, line[zero[texts][:, None] + at], 0)
    row = up = np.flatnonzero(guessed)
    while len(up):  # a level of all trees at a time, upwards
        columns[row, positions[up] - first[row]] = own[up]
        up = above[up]
        row, up = row[guessed[up]], up[guessed[up]]
    return PathSlots(own_homes, own, columns, line, zero_list)
