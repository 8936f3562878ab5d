"""templates/NOTES.txt: how to get a first answer."""

from __future__ import annotations

from helm_python import Chart

from tests.support.chart import CHART, SMALL


def test_the_notes_name_the_service_and_the_port_that_clients_call():
    with Chart.load(str(CHART)) as chart:
        files = chart.render(SMALL | {"grpc": {"port": 9999}}, name="mine", namespace="serving")
    notes = next(text for path, text in files.items() if path.endswith("NOTES.txt"))
    assert "mine-router.serving:9999" in notes and "for trials" in notes
    assert "http://mine-router.serving:8080/v1" in notes


def test_the_notes_name_https_where_the_routers_have_a_certificate():
    with Chart.load(str(CHART)) as chart:
        files = chart.render(SMALL | {"tls": {"clients": "front"}}, name="mine", namespace="serving")
    assert "https://mine-router.serving:8080/v1" in files[next(path for path in files if path.endswith("NOTES.txt"))]
