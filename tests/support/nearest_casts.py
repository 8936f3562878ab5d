"""Triton's interpreter with casts of float32 to bfloat16 that round to the nearest, as a device does; its own
truncate."""

from __future__ import annotations

import numpy as np


def round_casts(monkeypatch):
    import triton.language as tl
    from triton.runtime import interpreter

    library = interpreter._convert_float

    def convert(given, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return library(given, source, target, mode)
        bits = np.ascontiguousarray(given).view(np.uint32)
        rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        return np.where(np.isnan(given), np.uint16(0x7FC0), rounded)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
