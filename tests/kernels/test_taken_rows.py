"""Rows of tables by their indices."""

from __future__ import annotations

import pytest
import torch
from tree_kernels.decoder_layer import why_not_compiled
from tree_kernels.taken_rows import take_rows

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())


@pytest.mark.parametrize("rows", [1, 8, 33])
def test_rows_of_several_tables_are_those_of_index_select(rows):
    generator = torch.Generator().manual_seed(rows)
    tables = [
        torch.randn(50, width, generator=generator).to(dtype)
        for width, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (7, torch.float32), (576, torch.float16))
    ]
    indices = torch.randint(0, 50, (rows,), generator=generator)
    made = [table.new_full((rows, table.shape[1]), torch.nan) for table in tables]
    take_rows(indices, *zip(tables, made, strict=True))
    for table, found in zip(tables, made, strict=True):
        assert torch.equal(found, table.index_select(0, indices))
