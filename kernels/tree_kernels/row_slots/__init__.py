"""The slots of a step's rows: for each row, where it stores its own key or input, and where its path's are."""

from tree_kernels.row_slots.cpu import path_slots
from tree_kernels.row_slots.shapes import Homes, Ints, PathSlots, StepRows, first_seen

__all__ = ["Homes", "Ints", "PathSlots", "StepRows", "first_seen", "path_slots"]
