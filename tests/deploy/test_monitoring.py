"""What the chart makes for Prometheus, Grafana and the network: nothing unless a value asks for it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml

from tests import metrics_page
from tests.support.chart import CHART, KUBERNETES, SMALL, merged, rendered, serve_config, service
from tests.support.scraped import declared

MONITORING = CHART / "monitoring"
KNOWN = declared([family for families in metrics_page.SECTIONS.values() for family in families])
POOLS = {"pools": {"verifier": {"slots": 3, "maxPods": 1}, "drafter": {"slots": 2, "maxPods": 1}}}


def manifests(file, **values):
    return rendered(merged(SMALL, values)).get(file, [])


def pods(chosen):
    groups = service(chosen)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {each["groupName"]: each["template"] for each in groups}


def ports(template):
    return {each["name"]: each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}


def named_in(text):
    """The metrics that a query or a file names, without the parts of histograms."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdendro_\w+", text)}


@pytest.mark.parametrize("file", ["monitoring.yaml", "network.yaml", "disruption.yaml"])
def test_nothing_is_made_by_default(file):
    assert manifests(file) == []


@pytest.mark.parametrize(
    "value, kind", [("podMonitor", "PodMonitor"), ("rules", "PrometheusRule"), ("dashboard", "ConfigMap")]
)
def test_each_object_for_prometheus_is_behind_one_value_and_has_the_labels_asked_for(value, kind):
    (made,) = manifests("monitoring.yaml", monitoring={value: True, "labels": {"release": "prometheus"}})
    assert made["kind"] == kind and made["metadata"]["labels"]["release"] == "prometheus"
    if kind == "ConfigMap":
        kubernetes_validate.validate(made, KUBERNETES, strict=True)
        assert json.loads(made["data"]["dendroaspis.json"]) == json.loads((MONITORING / "dashboard.json").read_text())
    if kind == "PrometheusRule":
        assert made["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text())


def test_every_replica_of_a_pod_has_a_status_port_which_the_pod_monitor_reads():
    chosen = merged(SMALL, merged(POOLS, {"grpc": {"replicaStatusPort": 9300, "statusPort": 9200}}))
    args = serve_config(chosen)["applications"][0]["args"]["grpc"]
    assert (args["status_port"], args["replica_status_port"]) == (9200, 9300)
    found = {pool: ports(template) for pool, template in pods(chosen).items()}
    assert [found["verifier"][f"status-{number}"] for number in range(3)] == [9300, 9301, 9302]
    assert [name for name in found["drafter"] if name.startswith("status")] == ["status-0", "status-1"]
    (monitor,) = manifests("monitoring.yaml", **POOLS, monitoring={"podMonitor": True})
    read = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
    assert read == {name for each in found.values() for name in each if name.startswith("status")}
    wanted = monitor["spec"]["selector"]
    for pool, template in pods(chosen).items():
        labels = template["metadata"]["labels"]
        assert wanted["matchLabels"].items() <= labels.items()
        assert pool in wanted["matchExpressions"][0]["values"]


def policies(**values):
    found = manifests("network.yaml", networkPolicies={"enabled": True} | values, **POOLS)
    for each in found:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    return {each["metadata"]["name"].removeprefix("dendro-"): each["spec"] for each in found}


def test_network_policies_deny_what_none_of_them_allows():
    found = policies()
    assert set(found) == {"deny", "inside", "clients", "operator", "prometheus"}
    assert "ingress" not in found["deny"] and found["deny"]["policyTypes"] == ["Ingress"]
    whole = {"matchLabels": {"app.kubernetes.io/instance": "dendro"}}
    assert found["deny"]["podSelector"] == found["inside"]["podSelector"] == whole
    assert found["inside"]["ingress"] == [{"from": [{"podSelector": whole}]}]
    for name, template in pods(SMALL).items():
        assert whole["matchLabels"].items() <= template["metadata"]["labels"].items(), name


def test_clients_reach_the_routers_api_alone_and_prometheus_the_status_ports_alone():
    found = policies(clients=[{"ipBlock": {"cidr": "10.0.0.0/8"}}])
    assert found["clients"]["podSelector"]["matchLabels"]["dendroaspis/pool"] == "router"
    (rule,) = found["clients"]["ingress"]
    assert rule == {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": "grpc"}, {"port": "http"}]}
    (rule,) = found["prometheus"]["ingress"]
    assert {each["port"] for each in rule["ports"]} == {"status", "status-0", "status-1", "status-2"}


def test_an_empty_list_of_peers_makes_no_policy():
    assert set(policies(clients=[], operator=[], prometheus=[])) == {"deny", "inside"}


def test_a_disruption_budget_leaves_all_but_one_of_each_pools_least_pods():
    """An integer minimum: for any other budget Kubernetes asks the owner for its scale, which a RayCluster lacks, and
    then refuses every eviction."""
    pools = {"verifier": {"minPods": 0}, "drafter": {"minPods": 1}, "router": {"minPods": 3, "maxPods": 3}}
    found = manifests("disruption.yaml", podDisruptionBudgets=True, pools=pools)
    for each in found:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    specs = {each["spec"]["selector"]["matchLabels"]["dendroaspis/pool"]: each["spec"] for each in found}
    assert {pool: spec["minAvailable"] for pool, spec in specs.items()} == {"verifier": 0, "drafter": 0, "router": 2}
    assert all(set(spec) == {"minAvailable", "selector"} for spec in specs.values())
    for pool, template in pods(SMALL).items():
        assert specs[pool]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ["alerts.yaml", "alerts.test.yaml", "dashboard.json"])
def test_alerts_and_dashboard_name_metrics_that_are_exported(name):
    named = named_in((MONITORING / name).read_text())
    assert named and named <= KNOWN


def test_no_two_panels_of_the_dashboard_overlap():
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    cells = [
        (column, line)
        for place in (each["gridPos"] for each in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for line in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(column for column, _ in cells) < 24
    assert len({each["id"] for each in panels}) == len(panels)


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: it is in Debian's package prometheus")
def test_promtool_accepts_the_alerts_which_fire_when_they_should():
    for command in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")):
        done = subprocess.run([str(PROMTOOL), *command], cwd=MONITORING, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: it is in Debian's package prometheus")
def test_promtool_accepts_every_query_of_the_page_and_of_the_dashboard(tmp_path):
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    shown = (each["expr"] for panel in panels for each in panel.get("targets", ()))
    written = (family.query for families in metrics_page.SECTIONS.values() for family in families)
    queries = [each.replace("$__rate_interval", "5m") for each in (*shown, *written)]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", "queries.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
