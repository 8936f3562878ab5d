"""Numbers of rows to which a verifier pads its steps. Times of steps are predicted for padded rows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

MULTIPLE = 8
"""Steps of a verifier that does not report its sizes, and rows above its largest, count as padded to a multiple."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Ascending numbers of rows, from a verifier's hello; none: every multiple of MULTIPLE."""

    sizes: tuple[int, ...] = ()

    def padded(self, rows: int) -> int:
        """Padded size of a step with `rows` rows."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else -(-rows // MULTIPLE) * MULTIPLE
