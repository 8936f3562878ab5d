"""docs/configuration.md: every key of the configuration, with type, default, bounds and meaning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

import cluster.sections
from cluster import config
from cluster.sections import Section
from tests import configuration
from tests.configuration import PAGE, page, sections, undescribed


def test_the_page_is_generated_from_the_classes():
    assert PAGE.read_text() == page(), "run python -m tests.configuration"


def test_every_key_says_what_it_means():
    assert not undescribed()


def test_every_section_is_on_the_page():
    classes = [*vars(config).values(), *vars(cluster.sections).values()]
    every = {each for each in classes if isinstance(each, type) and issubclass(each, Section)}
    bases = {base for each in every for base in each.__bases__}
    assert {section for _, section in sections()} == every - bases


class Example(Section):
    """An example."""

    kind: Literal["one", "two"] = "one"
    """Which."""
    size: int = Field(default=3, ge=1, lt=10)
    names: tuple[str, ...] = ()
    """Of all."""


def test_a_row_has_type_default_bounds_and_the_text_below_the_field():
    fields = Example.model_fields
    assert [configuration.kind(field.annotation) for field in fields.values()] == [
        "`one`, `two`",
        "integer",
        "list of text",
    ]
    assert [configuration.default(field) for field in fields.values()] == ["`one`", "`3`", "empty"]
    assert configuration.bounds(fields["size"]) == "at least 1, less than 10"
    assert configuration.docstrings(Example) == {"kind": "Which.", "names": "Of all."}


def test_a_key_without_a_text_is_a_fault(monkeypatch):
    monkeypatch.setattr(configuration, "sections", lambda: iter([("example", Example)]))
    assert undescribed() == ["example.size"]
