"""How a call names the slots that its rows write."""

from __future__ import annotations

from torch import Tensor

Slots = Tensor | slice  # [rows] int64, or a slice of `rows` consecutive slots
