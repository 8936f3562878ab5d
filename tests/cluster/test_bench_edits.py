"""`dendro bench edits`: answers with predictions that differ from them by an edit."""

from __future__ import annotations

import pytest

from cluster.bench import edits
from cluster.bench.edits import CHANGES, EDITS, EditsOptions, changed_line, renamed
from cluster.measure.targets import DEMO


def test_an_edit_changes_one_name_or_one_line_and_a_text_without_names_stays():
    assert renamed("while count < 3: count += 1") == "while other_name < 3: other_name += 1"
    assert renamed("if 1: 2") == "if 1: 2"
    assert changed_line("one line") == "changed = None"


@pytest.mark.slow
async def test_every_way_is_compared_with_off_and_a_right_prediction_saves_rounds(monkeypatch):
    monkeypatch.setattr(edits, "COSTLY", DEMO)
    found = await edits.measure(EditsOptions(prompts=1, tokens=48, temperatures=(0.0, 1.0)), lambda *_: lambda: None)
    assert found["differences"] == [] and found["plan"]["answers"] == 2 * (2 + 2 * len(CHANGES))
    rows = {(row["temperature"], row["prediction"], row["row"]): row for row in found["rows"]}
    for temperature in (0.0, 1.0):
        assert rows[temperature, "the answer itself", edits.GUESSING]["emitted"]["median"] > 4
        assert rows[temperature, edits.NONE, "off"]["emitted"]["median"] == 1
    for _, columns, cells in EDITS.all_tables(found | {"aims": []}):
        assert cells and all(len(each) == len(columns) for each in cells)
