"""A real Prometheus that scrapes a running cluster."""

from __future__ import annotations

import asyncio

import pytest

from tests.prometheus_run import PROMETHEUS, every_query, run

NAMES = {"DendroNotServing", "DendroPartLost", "DendroFirstTokenLate", "DendroAcceptanceCollapsed"}


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
