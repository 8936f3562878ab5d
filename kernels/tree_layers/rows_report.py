"""Report of a model's products: their forms, and whether rows are independent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tree_kernels import ROW_MULTIPLE

OWN = "compiled"
"""Names of this project's own products begin so."""


@dataclass(frozen=True, slots=True)
class RowsReport:
    """The chosen forms: the number of layers per form, and the shapes for which every form failed the check."""

    forms: dict[str, int] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    why_library: str = ""  # why products are the library's, where any are that could be ours
    why_padded: str = ""  # why steps need at least ROW_MULTIPLE rows; empty: their products and functions do not

    @property
    def own(self) -> bool:
        """True if some products are this project's own."""
        return any(form.startswith(OWN) for form in self.forms)

    @property
    def independent(self) -> bool:
        return not self.failed

    def beside(self, other: RowsReport, whose: str) -> RowsReport:
        """Join two reports. whose: prefix for the failed shapes of `other`, whose products pad their own rows."""
        failed = (f"{whose} {shape}" for shape in other.failed)
        forms = dict(Counter(self.forms) + Counter(other.forms))
        why = self.why_library or other.why_library
        return RowsReport(forms, (*self.failed, *failed), why, self.why_padded)

    def __str__(self) -> str:
        forms = ", ".join(f"{count} {form}" for form, count in sorted(self.forms.items()))
        why = f"; the library's, as {self.why_library}" if self.why_library else ""
        why += f"; steps of at least {ROW_MULTIPLE} rows, as {self.why_padded}" if self.why_padded else ""
        return forms + why + (f"; not independent: {', '.join(self.failed)}" if self.failed else "")
