"""TLS by the names of secrets, and the Ingress: nothing unless a value asks for it."""

from __future__ import annotations

import jsonschema
import kubernetes_validate
import pytest
from dendro.certificates import ROLES
from helm_python import HelmError

from cluster.config import Config
from tests.support.chart import CHART, KUBERNETES, SMALL, merged, rendered, serve_config, service, strict_crd

CLIENTS = {"tls": {"clients": "front"}}
PEERS = {"tls": {"peers": {role: f"of-{role}" for role in ROLES}}}


def mounted(chosen):
    """The secrets that each pool mounts, by folder."""
    found = {}
    for group in service(chosen)["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        secrets = {each["name"]: each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each}
        mounts = spec["containers"][0]["volumeMounts"]
        found[group["groupName"]] = {
            each["mountPath"]: secrets[each["name"]] for each in mounts if each["name"] in secrets
        }
        assert all(each["readOnly"] for each in mounts if each["name"] in secrets)
    return found


def tls_of(chosen):
    (application,) = serve_config(chosen)["applications"]
    return Config.of(application["args"], CHART).tls


def test_by_default_there_is_neither():
    assert tls_of(SMALL).clients is None and tls_of(SMALL).peers is None
    assert not any(mounted(SMALL).values()) and rendered().get("ingress.yaml", []) == []


def test_routers_alone_mount_the_certificate_that_clients_see_and_are_probed_without_it():
    chosen = merged(SMALL, CLIENTS)
    folder = "/etc/dendro/tls-clients"
    assert mounted(chosen) == {"router": {folder: "front"}, "verifier": {}, "drafter": {}}
    section = tls_of(chosen).clients
    assert (str(section.certificate), str(section.key)) == (f"{folder}/tls.crt", f"{folder}/tls.key")
    (entry,) = rendered(chosen)["router.yaml"]
    assert {port["appProtocol"] for port in entry["spec"]["ports"]} == {"https"}
    jsonschema.validate(service(chosen), strict_crd())


def test_each_role_mounts_the_secret_of_its_own_certificate_and_no_other():
    chosen = merged(SMALL, PEERS)
    folder = "/etc/dendro/tls-peers"
    assert mounted(chosen) == {role: {folder: f"of-{role}"} for role in ROLES}
    section = tls_of(chosen).peers
    assert str(section.authority) == f"{folder}/ca.crt"
    assert {str(getattr(section, role).key) for role in ROLES} == {f"{folder}/tls.key"}
    jsonschema.validate(service(chosen), strict_crd())
    with pytest.raises(HelmError, match=r"tls\.peers: name the secrets of"):
        rendered(merged(SMALL, {"tls": {"peers": {"router": "r"}}}))


def test_an_ingress_leads_a_host_to_the_routers_http_port():
    given = {
        "enabled": True,
        "host": "llm.example",
        "className": "nginx",
        "tlsSecret": "cert",
        "annotations": {"a": "b"},
    }
    (made,) = rendered(merged(SMALL, {"ingress": given}))["ingress.yaml"]
    kubernetes_validate.validate(made, KUBERNETES, strict=True)
    (rule,), (entry,) = made["spec"]["rules"], rendered()["router.yaml"]
    (path,) = rule["http"]["paths"]
    assert rule["host"] == "llm.example" and path["backend"]["service"]["name"] == entry["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in entry["spec"]["ports"]}
    assert made["spec"]["ingressClassName"] == "nginx" and made["metadata"]["annotations"] == {"a": "b"}
    assert made["spec"]["tls"] == [{"hosts": ["llm.example"], "secretName": "cert"}]
    with pytest.raises(HelmError, match=r"ingress\.host"):
        rendered(merged(SMALL, {"ingress": {"enabled": True}}))
