"""Rows that a verifier pads its steps to."""

from __future__ import annotations

import pytest
from dendro.step_sizes import StepSizes


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 2), (3, 8), (8, 8), (9, 32), (32, 32), (33, 40)])
def test_a_step_is_padded_to_the_next_size_and_above_the_largest_to_a_multiple_of_8(rows, size):
    assert StepSizes((1, 2, 8, 32)).padded(rows) == size


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 72)])
def test_steps_of_a_verifier_that_reports_no_sizes_count_as_padded_to_multiples_of_8(rows, size):
    assert StepSizes().padded(rows) == size
