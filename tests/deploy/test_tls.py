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


def test_gateways_need_no_keys_and_their_authority_is_in_the_secret_of_the_routers():
    chosen = merged(SMALL, {"keys": {"open": False}, "tls": {"clients": "front", "gateways": True}})
    assert str(tls_of(chosen).clients.gateways) == "/etc/dendro/tls-clients/ca.crt"
    assert mounted(chosen) == {"router": {"/etc/dendro/tls-clients": "front"}, "verifier": {}, "drafter": {}}
    for change in ({"keys": {"open": True}}, {"keys": {"existingSecret": "mine"}}, {"tls": {"clients": ""}}):
        with pytest.raises(HelmError, match="tls\\."):
            rendered(merged(chosen, change))


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


def test_the_authority_and_the_user_of_redis_reach_the_cluster_and_rays_head():
    """Ray, which keeps its head's state in the same server, reads an authority from its environment."""
    redis = {"url": "rediss://cache:6379", "existingSecret": "mine", "user": "dendro", "authoritySecret": "authority"}
    chosen = merged(SMALL, {"redis": redis})
    manifest = service(chosen)
    jsonschema.validate(manifest, strict_crd())
    inside = manifest["spec"]["rayClusterConfig"]
    assert inside["gcsFaultToleranceOptions"]["redisUsername"] == {"value": "dendro"}
    (application,) = serve_config(chosen)["applications"]
    section = Config.of(application["args"], CHART).redis
    file = "/etc/dendro/redis/ca.crt"
    assert (section.user, str(section.authority)) == ("dendro", file)
    head = inside["headGroupSpec"]["template"]["spec"]
    for spec in (head, *(group["template"]["spec"] for group in inside["workerGroupSpecs"])):
        container, volume = spec["containers"][0], {"name": "redis-authority", "secret": {"secretName": "authority"}}
        assert volume in spec["volumes"]
        mount = {"name": "redis-authority", "mountPath": "/etc/dendro/redis", "readOnly": True}
        assert mount in container["volumeMounts"]
        assert {"name": "RAY_REDIS_CA_CERT", "value": file} in container["env"]
    with pytest.raises(HelmError, match="redis\\.url"):
        rendered(merged(chosen, {"redis": {"url": ""}}))


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
