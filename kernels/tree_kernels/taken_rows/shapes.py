"""The words of the kernel's call."""

from __future__ import annotations

ROWS, INDICES, TABLES = range(3)
"""Numbers of rows and of tables, address of the indices [ROWS] int64. TABLE_WORDS words of each table follow."""
CALL_WORDS = 3
SOURCE, TARGET, HALVES = range(3)
"""A table's words: its address, that of the copies, and numbers of 16 bits in a row."""
TABLE_WORDS = 3
