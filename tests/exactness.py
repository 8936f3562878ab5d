"""The exactness that an engine must announce on this processor."""

from __future__ import annotations

import pytest

from verifier_service.engine import VerifierEngine


def announces_what_it_must(engine: VerifierEngine) -> bool:
    """Whether the engine announces `bitwise`. Asserts that it does if each of its products has a form that passes the
    row check, and that it announces `margin` otherwise."""
    lacking = _products_without_form(engine)
    assert engine._hello.exactness == ("margin" if lacking else "bitwise"), engine.dependent
    return not lacking


def bitwise_or_skip(engine: VerifierEngine) -> None:
    """For tests that compare bits: skip, with the products' names, if some products have no row-independent form."""
    if not announces_what_it_must(engine):
        lacking = ", ".join(_products_without_form(engine))
        pytest.skip(f"NOT RUN: on this processor these products have no row-independent form: {lacking}")


def _products_without_form(engine: VerifierEngine) -> list[str]:
    crew = engine.runner.crew
    others = [name for report in crew.reports for name in report.dependent] if crew is not None else []
    return [*engine.runner.target.linear.failed, *others]
