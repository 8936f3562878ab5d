"""What a status port exports, read as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster.api.metrics import MetricFamily, MetricType
from cluster.api.status import registry_of

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by name and labels."""


def scrape(*collectors: Collector) -> str:
    """The page of a process with these collectors."""
    return generate_latest(registry_of(collectors)).decode()


def series_of(page: str) -> Series:
    """Every sample of a page."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def total(page: str, name: str, **labels: str) -> float:
    """Sum of the series of this name with these labels."""
    wanted = set(labels.items())
    return sum(value for (found, given), value in series_of(page).items() if found == name and wanted <= given)


def labels_of(page: str, name: str, label: str) -> set[str]:
    """Values that a label has."""
    return {dict(given)[label] for found, given in series_of(page) if found == name}


def exported(page: str) -> set[str]:
    """Names of our metrics on a page, as they are declared."""
    families = text_string_to_metric_families(page)
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if family.name.startswith("dendro_")
    }


def declared(families: Iterable[MetricFamily]) -> set[str]:
    """Names of declared metrics."""
    for family in families:
        assert family.name.endswith("_total") is (family.type is MetricType.COUNTER), family.name
    return {family.name for family in families}
