"""What tests plant in one text's part of a step."""

from __future__ import annotations


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""
