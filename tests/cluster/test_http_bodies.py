"""The number of values in a body, which is counted before it is parsed."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.openai import bodies
from cluster.api.openai.bodies import SLICE_BYTES, values_of
from tests.cluster.test_http_edges import VALUES

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string of a whole text, or the rest of a text in which one begins and does not end."""
GARBAGE = st.lists(st.sampled_from([*b'"\\,[{a\n', 0xFF]), max_size=40).map(bytes)


@settings(deadline=None, max_examples=500)
@given(text=GARBAGE | VALUES.map(lambda value: json.dumps(value).encode()), size=st.integers(1, 9))
def test_the_values_counted_in_slices_are_those_of_the_whole_text(text, size):
    rest = STRING.sub(b"", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "SLICE_BYTES", size)
        assert values_of(text) == rest.count(b",") + rest.count(b"[") + rest.count(b"{")


def test_no_search_for_strings_in_a_body_is_longer_than_a_slice(monkeypatch):
    """A search holds the interpreter's lock until it ends: over 8 MiB, the event loop would stand still for 0.5 s."""
    sizes, search = [], bodies._STRING.sub
    noted = SimpleNamespace(sub=lambda new, text: sizes.append(len(text)) or search(new, text))
    monkeypatch.setattr(bodies, "_STRING", noted)
    assert values_of(b'"' + b'\\"' * (2 * SLICE_BYTES) + b'",[') == 2
    assert len(sizes) == 5 and max(sizes) <= SLICE_BYTES + len(b'"\\ ')
