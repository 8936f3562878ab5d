"""What the compiled functions and their caller agree on."""

SUMS = 8
"""Partial sums of squares of a row: number i is added to sum i mod SUMS."""
