"""Measuring: contenders are interleaved in one run, and every aim is judged from the reported rows."""
