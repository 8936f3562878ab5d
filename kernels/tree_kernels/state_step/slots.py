"""Slots that the rows of a call write."""

from __future__ import annotations

from torch import Tensor

Slots = Tensor | slice  # [rows] int64, or a slice of `rows` consecutive slots
