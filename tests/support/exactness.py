"""The exactness that an engine must announce on this processor."""

from __future__ import annotations

import os

import pytest

from verifier_service.engine import VerifierEngine

STRICT = "STRICT" in os.environ.get("MKL_CBWR", "")
"""As in all our processes. Without it, rows of MKL's float32 products depend on others on some Intel processors."""


def announces_what_it_must(engine: VerifierEngine) -> bool:
    """Whether the engine announces `bitwise`. Asserts that it does if each of its products has a form that passes the
    row check, unless MKL is not STRICT, and that it announces `margin` if the check of its rows has found any that
    depend on others."""
    lacking, bitwise = _products_without_form(engine), engine._hello.exactness == "bitwise"
    assert bitwise is not bool(lacking or engine.dependent), engine.dependent
    assert bitwise or lacking or not STRICT, engine.dependent
    return bitwise


def bitwise_or_skip(engine: VerifierEngine) -> None:
    """For tests that compare bits: skip, with the products' names, if some products have no row-independent form."""
    if not announces_what_it_must(engine):
        lacking = ", ".join(_products_without_form(engine) or engine.dependent)
        pytest.skip(f"NOT RUN: on this processor these have no row-independent form: {lacking}")


def _products_without_form(engine: VerifierEngine) -> list[str]:
    crew = engine.runner.crew
    others = [name for report in crew.reports for name in report.dependent] if crew is not None else []
    return [*engine.runner.target.linear.failed, *others]
