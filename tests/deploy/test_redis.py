"""templates/redis.yaml: a small server for trials, or none if a URL is given."""

from __future__ import annotations

import kubernetes_validate
import pytest
from chart import KUBERNETES, SMALL, merged, rendered, service

SECRET = {"redis": {"existingSecret": "mine"}}


@pytest.mark.parametrize("values", [SMALL, merged(SMALL, SECRET)], ids=["open", "with a password"])
def test_kubernetes_accepts_its_manifests(values):
    kinds = []
    for manifest in rendered(values)["redis.yaml"]:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        kinds.append(manifest["kind"])
    assert kinds == ["Service", "StatefulSet"]


def test_the_clusters_redis_address_is_its_service():
    name, _ = (manifest["metadata"]["name"] for manifest in rendered()["redis.yaml"])
    address = service()["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    assert address == f"redis://{name}:6379"


def test_its_service_selects_its_pods():
    found, stateful = rendered()["redis.yaml"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"].items() <= labels.items()
    assert stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (port,) = stateful["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert found["spec"]["ports"][0]["targetPort"] == port["name"]


def test_it_requires_the_secrets_password():
    _, stateful = rendered(merged(SMALL, SECRET))["redis.yaml"]
    container = stateful["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-2:] == ["--requirepass", "$(REDIS_PASSWORD)"]
    (variable,) = container["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "password"}}


def test_none_is_started_if_a_url_is_given():
    assert rendered(merged(SMALL, {"redis": {"url": "redis://mine:6379"}}))["redis.yaml"] == []


def test_only_keys_with_an_expiry_are_evicted():
    """Ray's own keys have no expiry; states and records have one."""
    _, stateful = rendered()["redis.yaml"]
    args = stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--maxmemory-policy") + 1] == "volatile-lru"
