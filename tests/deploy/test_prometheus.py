"""A real Prometheus that scrapes a running cluster."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.prometheus_run import MONITORING, PROMETHEUS, every_query, run

NAMES = {"DendroNotServing", "DendroPartLost", "DendroFirstTokenLate", "DendroAcceptanceCollapsed"}
PAGE = Path(__file__).parents[2] / "docs" / "prometheus-run.md"


def test_the_committed_run_has_every_query_and_alert_of_today():
    """A metric, a panel or an alert that is new is not on the page until `python -m tests.prometheus_run` ran again."""
    page = PAGE.read_text()
    places = Counter(place for place, _ in every_query())
    assert Counter(re.findall(r"^\| ((?:panel |dendro_).+?) \|", page, re.MULTILINE)) == places
    assert f"Queries: {places.total()} asked, all answered" in page
    alerts = re.findall(r"^ *- alert: (\w+)", (MONITORING / "alerts.yaml").read_text(), re.MULTILINE)
    assert re.findall(r"^\| (Dendro\w+) \| ok \|", page, re.MULTILINE) == alerts


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus: it is Debian's package of that name")
def test_a_prometheus_scrapes_each_process_and_answers_every_query_with_what_clients_got(tmp_path):
    found = asyncio.run(run(tmp_path))
    assert len(found.targets) == 3 and set(found.targets.values()) == {"up"}
    assert found.counted == found.received > 0
    assert {*found.alerts} >= NAMES and {health for health, _ in found.alerts.values()} == {"ok"}
    assert found.alerts["DendroNotServing"][1] == "inactive"
    assert len(found.queries) == len(every_query()), "it takes every query"
    series = {each.place: each.series for each in found.queries}
    assert all(
        series[f"dendro_{name}"] for name in ("router_tokens_total", "verifier_steps_total", "drafter_calls_total")
    )
