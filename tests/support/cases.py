"""Parameters of tests: `make test` runs a few of them, CI all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def few_of(cases: Iterable[object], *few: object) -> list[object]:
    """The cases as parameters; all but the few are marked `long`."""
    cases = list(cases)
    assert all(case in cases for case in few), f"{few} are not all among {cases}"
    return [case if case in few else pytest.param(case, marks=pytest.mark.long) for case in cases]
